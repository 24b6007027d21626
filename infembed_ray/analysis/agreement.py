"""Do annotators and judges agree on which passage is right (paper, section 4.1, Figure 4 and appendix F.1)?

Cohen's kappa of every two raters: (p_o - p_e) / (1 - p_e), p_o the share of items they answered alike and p_e the share
expected from their own frequencies of answers. Its interval is the bootstrap's, items drawn with replacement.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from infembed_ray import records
from infembed_ray.errors import InputError
from infembed_ray.records import Record

ITEM_COLUMNS = ("item_id", "instruction", "query", "passages")
"""Columns of an item; all others are raters."""
CONFIDENCE = 0.95
DISTRACTORS = 2
"""Passages of other records beside the three of an item's own."""


@dataclass(frozen=True)
class Agreement:
    """Of two raters on the items that both answered."""

    one: str
    other: str
    items: int
    alike: float
    """Share of items answered alike."""
    kappa: float | None
    """None where both gave one and the same answer everywhere: nothing is left to agree on beyond chance."""
    low: float | None
    high: float | None
    """Ends of the bootstrap interval of CONFIDENCE."""


def read(paths: Sequence[Path], name: str) -> dict[str, dict[str, str]]:
    """Rater -> item_id -> answer, from one or several files about the same items.

    Raises:
        InputError: as `records.raw_rows`; no item_id, one that stands twice in a file, a rater in two files, or fewer
            than two raters.
    """
    raters: dict[str, dict[str, str]] = {}
    for path in paths:
        of_file: dict[str, dict[str, str]] = {}
        seen: set[str] = set()
        for number, row in enumerate(records.raw_rows(path, name), start=1):
            item = str(row.get("item_id") or "")
            if not item:
                raise InputError(f"{name}={path}: row {number}: item_id is missing; give each item its own")
            if item in seen:
                raise InputError(f"{name}={path}: row {number}: item_id {item} stands twice; ids must be unique")
            seen.add(item)
            for rater, answer in row.items():
                if rater not in ITEM_COLUMNS and answer is not None and str(answer).strip():
                    of_file.setdefault(rater, {})[item] = str(answer).strip()
        for rater, answers in of_file.items():
            if rater in raters:
                raise InputError(f"{name}={path}: rater {rater} is in another file too; rename the column")
            raters[rater] = answers
    if len(raters) < 2:
        raise InputError(
            f"{name}={', '.join(map(str, paths))}: {len(raters)} raters; agreement needs two, each in a column of its own"
        )
    return raters


def agreements(raters: Mapping[str, Mapping[str, str]], resamples: int, seed: int) -> list[Agreement]:
    """Of every two raters, in the order of the raters; those without a common item are left out."""
    found = []
    for one, other in combinations(raters, 2):
        common = [item for item in raters[one] if item in raters[other]]
        if common:
            pairs = [(raters[one][item], raters[other][item]) for item in common]
            found.append(_agreement(one, other, pairs, resamples, seed))
    return found


def _agreement(one: str, other: str, pairs: Sequence[tuple[str, str]], resamples: int, seed: int) -> Agreement:
    counts = confusion(pairs)
    kappa = float(cohen_kappa(counts[None])[0])
    # Items drawn with replacement are draws of the cells they fall into.
    cells = np.random.default_rng(seed).multinomial(len(pairs), counts.ravel() / len(pairs), size=resamples)
    drawn = cohen_kappa(cells.reshape(resamples, *counts.shape))
    drawn = drawn[~np.isnan(drawn)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail]) if len(drawn) else (np.nan, np.nan)
    return Agreement(
        one=one,
        other=other,
        items=len(pairs),
        alike=float(np.trace(counts) / len(pairs)),
        kappa=None if np.isnan(kappa) else kappa,
        low=None if np.isnan(kappa) else float(low),
        high=None if np.isnan(kappa) else float(high),
    )


def confusion(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """(answers, answers) counts of the pairs of answers, rows the first rater's."""
    answers = {answer: number for number, answer in enumerate(sorted({a for pair in pairs for a in pair}))}
    counts = np.zeros((len(answers), len(answers)), dtype=np.int64)
    for one, other in pairs:
        counts[answers[one], answers[other]] += 1
    return counts


def cohen_kappa(counts: np.ndarray) -> np.ndarray:
    """(n, answers, answers) confusion counts -> (n,) kappas; NaN where only one answer was ever given."""
    shares = counts / counts.sum(axis=(1, 2), keepdims=True)
    alike = np.einsum("nii->n", shares)
    by_chance = np.einsum("ni,ni->n", shares.sum(axis=1), shares.sum(axis=2))
    only_one = np.isclose(by_chance, 1.0)
    return np.where(only_one, np.nan, (alike - by_chance) / np.where(only_one, 1.0, 1.0 - by_chance))


def sheet(rows: Sequence[Record], items: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Random items for annotators, and their key: what the pipeline holds to be right.

    Each item is one record in one of its three scenarios, its passages in random order with DISTRACTORS of other
    records. An annotator adds a column of their own: the number of the right passage, 0 for none. The key is in the
    same form, as a rater called `pipeline`; both can be given to `agreement`.
    """
    rng = random.Random(seed)
    chosen = rng.sample(range(len(rows)), min(items, len(rows)))
    asked, key = [], []
    for number, index in enumerate(chosen):
        row = rows[index]
        scenario = rng.choice(records.SCENARIOS)
        passages = {
            "positive": row.document_positive,
            "negative_instruction": row.hard_negative_document_1,
            "negative_query": row.hard_negative_document_2,
        }
        others = [rows[other].document_positive for other in range(len(rows)) if other != index]
        shown = [*passages.values(), *rng.sample(others, min(DISTRACTORS, len(others)))]
        rng.shuffle(shown)
        poisoned = scenario == "negative_instruction"
        asked.append(
            {
                "item_id": f"item-{number:04}",
                "instruction": row.instruction_negative if poisoned else row.instruction_positive,
                "query": row.query_negative if scenario == "negative_query" else row.query_positive,
                "passages": {str(place): passage for place, passage in enumerate(shown, start=1)},
            }
        )
        key.append({"item_id": f"item-{number:04}", "pipeline": shown.index(passages[scenario]) + 1})
    return asked, key
