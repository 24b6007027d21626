"""Inter-rater agreement of annotators and judges (paper, section 4.1, Figure 4 and appendix F.1).

Cohen's kappa of two raters is (p_o - p_e) / (1 - p_e): p_o is the share of equal answers, p_e the share expected from
their own frequencies of answers. Intervals are bootstraps over items.
"""

import random
import re
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

from infembed_ray.analysis.figures import Section
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.records.files import raw_rows
from infembed_ray.records.tables import Record
from infembed_ray.storage.places import Place

Answers = Mapping[str, Mapping[str, str]]
"""Rater -> item_id -> answer."""
ITEM_COLUMNS = ("item_id", "instruction", "query", "passages")
"""Columns of an item; all other columns are raters."""
CONFIDENCE = 0.95
RESAMPLES = 2000
"""Bootstrap resamples of the items."""
DISTRACTORS = 2
"""Passages of other records per item, beside the record's own three."""


def study(references: Answers, rated: Answers, models: Mapping[str, str]) -> Section:
    """Compare all raters.

    Args:
        references: answers of the reference raters, at least one.
        rated: answers of LLM raters.
        models: LLM rater -> its model.

    Returns:
        The number of `items` that any rater answered; the mean of Cohen's kappas `among_references`; for `llm_raters`, best first,
        the mean of theirs with the reference raters; and all `pairs` of raters with common items, with their share of `equal`
        answers. A kappa is a value and its interval; all None where it is undefined (one single answer).
    """
    everyone = {**references, **rated}
    raters = [
        {
            "rater": rater,
            "model": models[rater],
            "answered": len(rated[rater]),
            "kappa": mean_cohen_kappa(list(product([rater], references)), everyone),
        }
        for rater in rated
    ]
    pairs = []
    for one, other in combinations(everyone, 2):
        if common := [item for item in everyone[one] if item in everyone[other]]:
            equal = sum(everyone[one][item] == everyone[other][item] for item in common) / len(common)
            kappa = mean_cohen_kappa([(one, other)], everyone)
            pairs.append({"one": one, "other": other, "items": len(common), "equal": equal, "kappa": kappa})
    return {
        "items": len({item for answers in everyone.values() for item in answers}),
        "references": list(references),
        "among_references": mean_cohen_kappa(list(combinations(references, 2)), references),
        "llm_raters": sorted(raters, key=lambda r: 2.0 if r["kappa"]["value"] is None else -r["kappa"]["value"]),
        "pairs": pairs,
    }


def read(paths: Sequence[Place], name: str, least: int = 2) -> dict[str, dict[str, str]]:
    """Read rater -> item_id -> answer from one or more files about the same items.

    Raises:
        InputError: as `raw_rows`; a missing or repeated item_id, a rater in two files, or fewer than `least` raters.
    """
    raters: dict[str, dict[str, str]] = {}
    for path in paths:
        of_file: dict[str, dict[str, str]] = {}
        seen: set[str] = set()
        for number, row in enumerate(raw_rows(path, name), start=1):
            item = cell(row.get("item_id"))
            if item is None or item in seen:
                fault = "is missing" if item is None else f"{item} is repeated"
                raise InputError.of(name, path, f"row {number}: item_id {fault}", "give each item a unique one")
            seen.add(item)
            for rater, given in row.items():
                if rater not in ITEM_COLUMNS and (answer := cell(given)) is not None:
                    of_file.setdefault(rater, {})[item] = answer
        if twice := sorted(of_file.keys() & raters.keys()):
            raise InputError.of(name, path, f"rater {twice[0]} is also in another file", "rename the column")
        raters |= of_file
    if len(raters) < least:
        fault = f"{len(raters)} raters; agreement needs at least {least}, each in its own column"
        raise InputError.of(name, ", ".join(map(str, paths)), fault)
    return raters


def cell(value: Any) -> str | None:
    """Return a cell of a table as text, None if it is empty. 3.0 is 3: columns of numbers with gaps hold floats."""
    text = "" if value is None or value != value else str(value).strip()  # NaN differs from itself
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text) or None


def mean_cohen_kappa(pairs: Sequence[tuple[str, str]], raters: Answers) -> Section:
    """Estimate the mean of Cohen's kappas of pairs of raters, each on the items that both answered."""
    items = sorted({item for pair in pairs for rater in pair for item in raters[rater]})
    if not items:
        return dict.fromkeys(("value", "low", "high"))
    places = {item: place for place, item in enumerate(items)}
    size = len(items)
    drawn = np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), size=RESAMPLES)
    weights = np.vstack([np.ones(size, dtype=drawn.dtype), drawn])  # how often each item counts: once in the first row
    kappas = []
    for one, other in pairs:
        both = [item for item in items if item in raters[one] and item in raters[other]]
        if both:
            answers = sorted({raters[rater][item] for rater in (one, other) for item in both})
            cells = np.zeros((len(items), len(answers), len(answers)))
            for item in both:
                cells[places[item], answers.index(raters[one][item]), answers.index(raters[other][item])] = 1
            kappas.append(cohen_kappa(np.tensordot(weights, cells, axes=1)))
    value, *resampled = np.mean(kappas, axis=0) if kappas else [np.nan]
    defined = [kappa for kappa in resampled if not np.isnan(kappa)]
    if np.isnan(value) or not defined:
        return dict.fromkeys(("value", "low", "high"))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(defined, [tail, 1 - tail])
    return {"value": float(value), "low": float(low), "high": float(high)}


def cohen_kappa(counts: np.ndarray) -> np.ndarray:
    """Return the (n,) kappas of (n, answers, answers) confusion counts; NaN if only one answer was given."""
    with np.errstate(invalid="ignore"):  # no items: NaN
        shares = counts / counts.sum(axis=(1, 2), keepdims=True)
    alike = np.einsum("nii->n", shares)
    by_chance = np.einsum("ni,ni->n", shares.sum(axis=1), shares.sum(axis=2))
    only_one = np.isclose(by_chance, 1.0)
    return np.where(only_one, np.nan, (alike - by_chance) / np.where(only_one, 1.0, 1.0 - by_chance))


def sheet(rows: Sequence[Record], items: int) -> tuple[list[Section], list[Section]]:
    """Draw random items for annotators; return them and their key, the pipeline's own answers.

    An item is one record in one of its three scenarios, with its passages and DISTRACTORS of other records in random
    order. An annotator adds a column with the number of the right passage, 0 for none. The key has the same format,
    with a rater called `pipeline`, so both can be given to `agreement.files`.
    """
    rng = random.Random(0)
    asked, key = [], []
    for number, index in enumerate(rng.sample(range(len(rows)), min(items, len(rows)))):
        row, scenario, name = rows[index], rng.choice(tables.SCENARIOS), f"item-{number:04}"
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
                "item_id": name,
                "instruction": row.instruction_negative if poisoned else row.instruction_positive,
                "query": row.query_negative if scenario == "negative_query" else row.query_positive,
                "passages": {str(place): passage for place, passage in enumerate(shown, start=1)},
            }
        )
        key.append({"item_id": name, "pipeline": shown.index(passages[scenario]) + 1})
    return asked, key
