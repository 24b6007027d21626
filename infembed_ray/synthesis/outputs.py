"""The three files of a run, written in the order of the seeds, and the figures of its manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infembed_ray import records
from infembed_ray.synthesis.prices import PriceTable
from infembed_ray.synthesis.steps import SCHEMAS, STEPS, Kind, Outcome, Spend

_FILES: Mapping[Kind, str] = {
    "kept": records.KEPT_FILE,
    "rejected": records.REJECTED_FILE,
    "dead_letter": records.DEAD_LETTER_FILE,
}
_ROW_GROUP = 1000


class Outputs:
    """Takes outcomes in any order and writes them in the order of their seeds, so that equal runs give equal files.

    In memory are the outcomes that wait for an earlier one, and one unwritten row group of each file.
    """

    def __init__(self, directory: Path, table: PriceTable) -> None:
        self._prices_as_of = table.as_of
        self._writers = {kind: pq.ParquetWriter(directory / name, SCHEMAS[kind]) for kind, name in _FILES.items()}
        self._rows: dict[Kind, list[Mapping[str, Any]]] = {kind: [] for kind in _FILES}
        self._complements = directory / records.COMPLEMENTS_FILE
        self._complements_writer: pq.ParquetWriter | None = None
        self._complement_rows: list[Mapping[str, Any]] = []
        self._waiting: dict[int, Outcome] = {}
        self._next = 0
        self._kinds: Counter[Kind] = Counter()
        self._reasons: Counter[str] = Counter()
        self._ended: dict[Kind, Counter[str]] = {"rejected": Counter(), "dead_letter": Counter()}
        self.first_failure = ""
        """The step and the reason of the first seed that was not kept."""
        self._paid = Spend()
        self._replayed = Spend()

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name, writer in self._writers.items():
            self._flush(name)
            writer.close()
        self._flush_complements()
        if self._complements_writer is not None:
            self._complements_writer.close()

    def add(self, index: int, outcome: Outcome) -> None:
        """The outcome of seed number `index`, from 0."""
        self._waiting[index] = outcome
        while self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1

    def note(self) -> str:
        """The figures so far, in a few words."""
        counts = ", ".join(f"{self._kinds[kind]} {kind.replace('_', ' ')}" for kind in _FILES)
        usd = "" if self._paid.usd is None else f", {self._paid.usd:.2f} USD"
        return f"{counts}, {self._paid.calls} calls{usd}"

    def counts(self) -> dict[str, int]:
        """The manifest's counts; calls are those answered in this run."""
        return {
            "seeds": self._next,
            **{kind: self._kinds[kind] for kind in _FILES},
            "calls": self._paid.calls,
            "replayed": self._replayed.calls,
        }

    def facts(self) -> dict[str, Any]:
        """The manifest's figures: what this run paid, what replayed completions had cost, and why rows were rejected.

        USD are list prices, None where a model's is unknown.
        """
        kept, usd = self._kinds["kept"], (self._paid + self._replayed).usd
        return {
            "usd": self._paid.usd,
            "usd_replayed": self._replayed.usd,
            "usd_per_1000_kept": None if usd is None or not kept else 1000 * usd / kept,
            "prices_as_of": self._prices_as_of,
            "tokens": _tokens(self._paid),
            "tokens_replayed": _tokens(self._replayed),
            "rejected_by": dict(self._reasons.most_common()),
            "funnel": self._funnel(),
        }

    def _funnel(self) -> dict[str, dict[str, int]]:
        """Of each step that a row must pass: how many came to it, and how those ended that it stopped."""
        left = self._next
        funnel: dict[str, dict[str, int]] = {}
        for step in ("seed", *STEPS):  # `seed`: what it lacks
            stopped: dict[str, int] = {kind: ended[step] for kind, ended in self._ended.items()}
            if not step.endswith("_complement"):
                funnel[step] = {"reached": left, **stopped}
            left -= sum(stopped.values())
        return funnel

    def _write(self, outcome: Outcome) -> None:
        self._kinds[outcome.kind] += 1
        self._paid += outcome.paid
        self._replayed += outcome.replayed
        if outcome.kind != "kept":
            why = outcome.row["reason" if outcome.kind == "rejected" else "error"]
            self.first_failure = self.first_failure or f"seed {outcome.row['id']}, step {outcome.row['step']}: {why}"
            self._ended[outcome.kind][outcome.row["step"]] += 1
        if outcome.kind == "rejected":
            self._reasons[f"{outcome.row['step']}: {outcome.row['reason']}"] += 1
        self._rows[outcome.kind].append(outcome.row)
        if len(self._rows[outcome.kind]) == _ROW_GROUP:
            self._flush(outcome.kind)
        if outcome.complement is not None:
            self._complement_rows.append(outcome.complement)
            if len(self._complement_rows) == _ROW_GROUP:
                self._flush_complements()

    def _flush(self, kind: Kind) -> None:
        rows = self._rows[kind]
        self._rows[kind] = []
        if rows:
            self._writers[kind].write_table(pa.Table.from_pylist(rows, schema=SCHEMAS[kind]))

    def _flush_complements(self) -> None:
        """Unlike the other files this one is there only if it has rows."""
        rows, self._complement_rows = self._complement_rows, []
        if rows:
            writer = self._complements_writer or pq.ParquetWriter(self._complements, records.COMPLEMENT)
            writer.write_table(pa.Table.from_pylist(rows, schema=records.COMPLEMENT))
            self._complements_writer = writer


def _tokens(spend: Spend) -> dict[str, int]:
    return {"prompt": spend.prompt_tokens, "completion": spend.completion_tokens}
