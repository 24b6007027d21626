"""Records with their rejected rows, and their figures as sections of the quality report: funnel, verdicts, lengths and cost."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from infembed_ray.records import tables
from infembed_ray.records.tables import SCENARIOS, Record
from infembed_ray.storage.places import Place, errors_at, open_binary
from infembed_ray.storage.steps import MANIFEST, read_manifest
from infembed_ray.synthesis.pipeline import CHEAP_JUDGE, STEPS

Rows = list[dict[str, Any]]

KINDS: Mapping[str, tuple[str, ...]] = {
    "instruction": ("instruction_positive", "instruction_negative"),
    "query": ("query_positive", "query_negative"),
    "passage": ("document_positive", "hard_negative_document_1", "hard_negative_document_2"),
}
"""Kind of text -> its columns in a record."""
Section = dict[str, Any]

PAPER_MEANS = {"instruction": 35.57, "query": 8.06, "passage": 55.2}
"""Mean words of the published InF-IR set (paper, Table 1, columns Avg. I, Avg. Q, Avg. P)."""


@dataclass(frozen=True)
class RecordSet:
    """Records, and for a synthesis output also its rejected rows and their costs.

    Attributes:
        rejected, dead_letter: rows of `tables.REJECTED` and `tables.DEAD_LETTER`.
        complements: rows of `tables.COMPLEMENT`; empty if none were asked for.
        provenance: `kept`, `rejected` or `dead_letter` -> provenance of its rows, if they have one.
        manifest: manifest of the synthesis; empty for other records.
    """

    kept: list[Record]
    rejected: Rows
    dead_letter: Rows
    complements: Rows
    provenance: Mapping[str, Rows]
    manifest: Mapping[str, Any]


def read(path: Place, name: str) -> RecordSet:
    """Read a synthesis output (a directory) or a file of records.

    Raises:
        InputError: as `tables.read`; but a synthesis output without kept records is valid if it has rejected rows.
    """
    with errors_at(path, name):
        rejected, dead_letter = _rows(path / tables.REJECTED_FILE), _rows(path / tables.DEAD_LETTER_FILE)
        file = path if path.is_file() else path / tables.KEPT_FILE
        nothing_kept = (rejected or dead_letter) and file.is_file() and _metadata(file).num_rows == 0
        return RecordSet(
            kept=[] if nothing_kept else tables.read(path, Record, name),
            rejected=rejected,
            dead_letter=dead_letter,
            complements=[*_rows(path / tables.COMPLEMENTS_FILE), *_rows(path / tables.REJECTED_COMPLEMENTS_FILE)],
            provenance={
                "kept": _provenance(_rows(file) if is_ours(file) else []),
                "rejected": _provenance(rejected),
                "dead_letter": _provenance(dead_letter),
            },
            manifest=read_manifest(path, name) if (path / MANIFEST).is_file() else {},
        )


def _rows(file: Place) -> Rows:
    return tables.read_raw(file) if file.is_file() else []


def _metadata(file: Place) -> pq.FileMetaData:
    with open_binary(file) as source:
        return pq.read_metadata(source)


def is_ours(file: Place) -> bool:
    """Return whether synthesis wrote the file; other records may have a `provenance` of another type."""
    return file.suffix == ".parquet" and _metadata(file).schema.to_arrow_schema().equals(tables.RECORD)


def _provenance(rows: Rows) -> Rows:
    return [row["provenance"] for row in rows if row["provenance"]]


def funnel(records: RecordSet) -> Section:
    """Count the rows from seeds to records.

    Returns:
        `seeds` (None without a synthesis output), `kept`, `rejected`, `dead_letter`; `unaccounted`, seeds in none of the three:
        other than 0 means that the output is damaged; `rejections` and `errors` by step and reason, most frequent first;
        `steps`, the rows that each step reached and lost; and the kept records for which a complement was asked for.
    """
    kept, rejected, dead = len(records.kept), len(records.rejected), len(records.dead_letter)
    seeds = records.manifest.get("counts", {}).get("seeds")
    faults = [row["fault"] for row in records.complements if row["fault"] is not None]
    return {
        "seeds": seeds,
        "kept": kept,
        "rejected": rejected,
        "dead_letter": dead,
        "unaccounted": 0 if seeds is None else seeds - kept - rejected - dead,
        "rejections": _losses((row["step"], row["reason"]) for row in records.rejected),
        "errors": _losses((row["step"], row["error"]) for row in records.dead_letter),
        "steps": [] if seeds is None else _steps(kept, records),
        "complements": len(records.complements),
        "complements_fit": len(records.complements) - len(faults),
        "complement_faults": _losses(("complement", fault) for fault in faults),
    }


def _steps(kept: int, records: RecordSet) -> list[Section]:
    rejected = Counter(row["step"] or "unknown" for row in records.rejected)
    dead = Counter(row["step"] or "unknown" for row in records.dead_letter)
    reached = kept + rejected.total() + dead.total()
    flows = []
    lost = rejected.keys() | dead.keys()
    optional = {step for step in STEPS if step.startswith(CHEAP_JUDGE) or step.endswith("_complement")}
    steps = (step for step in STEPS if step in lost or step not in optional)
    for step in (*steps, *sorted(lost - set(STEPS))):
        flow = {"step": step, "reached": reached, "rejected": rejected[step], "dead_letter": dead[step]}
        reached -= rejected[step] + dead[step]
        flows.append(flow | {"passed": reached})
    return flows


def _losses(reasons: Iterable[tuple[str | None, str | None]]) -> list[Section]:
    counted = Counter((step or "unknown", why or "unknown") for step, why in reasons)
    ranked = sorted(counted.items(), key=lambda item: (-item[1], item))
    return [{"step": step, "why": why, "rows": rows} for (step, why), rows in ranked]


def verdicts(records: RecordSet) -> list[Section]:
    """Count the judge's picks in every scenario; empty if no row has a verdict.

    Returns:
        Per scenario: `judged` rows (judging ends at the first scenario that fails), the `right` ones, and all `picks`.
    """
    given = [row["verdicts"] for rows in records.provenance.values() for row in rows if row["verdicts"]]
    counted = []
    for scenario in SCENARIOS:
        picks = Counter(verdict[scenario] for verdict in given if verdict[scenario] is not None)
        if picks:
            right = {"scenario": scenario, "judged": picks.total(), "right": picks[scenario]}
            counted.append(right | {"picks": dict(picks.most_common())})
    return counted


def lengths(records: Sequence[Record]) -> list[Section]:
    """Measure the words (split at white space) of each kind of text, next to the mean of the paper's set."""
    measured = []
    for kind, columns in KINDS.items() if records else ():
        words = [len(getattr(record, column).split()) for record in records for column in columns]
        p5, p50, p95 = (float(p) for p in np.percentile(words, (5, 50, 95)))
        section = {"kind": kind, "mean": float(np.mean(words)), "p5": p5, "p50": p50, "p95": p95}
        measured.append(section | {"paper_mean": PAPER_MEANS[kind]})
    return measured


def cost(records: RecordSet) -> Section | None:
    """Add up tokens and list prices, also for answers from a journal; None if no row has a provenance.

    Returns:
        Per part and in `total`: `rows`, tokens and `usd` (None without a price for every model); `usd_per_1000_kept` with the
        cost of the lost rows.
    """
    every = [row for rows in records.provenance.values() for row in rows]
    if not every:
        return None
    parts: Section = {}
    for name, rows in {**records.provenance, "total": every}.items():
        prices = [row["usd"] for row in rows]
        parts[name] = {
            "rows": len(rows),
            "prompt_tokens": sum(row["prompt_tokens"] or 0 for row in rows),
            "completion_tokens": sum(row["completion_tokens"] or 0 for row in rows),
            "usd": None if None in prices else math.fsum(prices),
        }
    usd = parts["total"]["usd"]
    per_kept = 1000 * usd / len(records.kept) if records.kept and usd is not None else None
    return parts | {"usd_per_1000_kept": per_kept}
