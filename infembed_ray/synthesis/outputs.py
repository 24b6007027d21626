"""Output files of a run, written in the order of the seeds, and the figures of its manifest."""

import contextlib
import pickle
import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infembed_ray.errors import InputError
from infembed_ray.llm.prices import PriceTable
from infembed_ray.progress import counted
from infembed_ray.records import tables
from infembed_ray.synthesis.pipeline import SCHEMAS, Kind, Outcome, Spend, kind_of
from infembed_ray.telemetry import report

_FILES: Mapping[Kind, str] = {
    "kept": tables.KEPT_FILE,
    "rejected": tables.REJECTED_FILE,
    "dead_letter": tables.DEAD_LETTER_FILE,
}
_ROW_GROUP = 1000
_CAUSES = 3
"""Kinds of dead letters that an error message names."""


class Outputs(contextlib.ExitStack):
    """Takes outcomes in any order and writes them in the order of their seeds, so equal runs give equal files.

    Memory holds one unwritten row group per file. Outcomes that wait for an earlier one are in a temporary database, which
    spills to disk: one actor may be far behind the others. Files of complements exist only if there are some.
    """

    def __init__(self, directory: Path, table: PriceTable) -> None:
        super().__init__()
        self._directory = directory
        self._prices_as_of = table.as_of
        self._tables = {kind: _Table(directory / name, SCHEMAS[kind], empty=True) for kind, name in _FILES.items()}
        files = tables.COMPLEMENTS_FILE, tables.REJECTED_COMPLEMENTS_FILE
        self._complements = [_Table(directory / name, tables.COMPLEMENT) for name in files]
        self._waiting = sqlite3.connect("", isolation_level=None)  # "": a temporary database in memory and on disk
        self._waiting.execute("PRAGMA journal_mode=OFF")
        self._waiting.execute("CREATE TABLE waiting (seed INTEGER PRIMARY KEY, outcome BLOB)")
        self._next = 0
        self._kinds: Counter[Kind] = Counter()
        self._reasons: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._first_failure = ""
        """Step and reason of the first seed that was not kept."""
        self._audit = JudgeAudit()
        self._paid = Spend()
        self._replayed = Spend()
        self.callback(self._waiting.close)
        for file in (*self._tables.values(), *self._complements):
            self.callback(file.close)

    def add(self, index: int, outcome: Outcome) -> None:
        """Add the outcome of seed number `index`, from 0."""
        if index != self._next:
            self._waiting.execute("INSERT INTO waiting VALUES (?, ?)", (index, pickle.dumps(outcome)))
            return
        next_outcome: Outcome | None = outcome
        while next_outcome is not None:
            self._write(next_outcome)
            self._next += 1
            taken = "DELETE FROM waiting WHERE seed = ? RETURNING outcome"
            row = self._waiting.execute(taken, (self._next,)).fetchone()
            next_outcome = row and pickle.loads(row[0])

    def _write(self, outcome: Outcome) -> None:
        self._kinds[outcome.kind] += 1
        self._audit.add(outcome)
        self._paid += outcome.paid
        self._replayed += outcome.replayed
        if outcome.kind != "kept":
            step, why = outcome.row["step"], outcome.row["reason" if outcome.kind == "rejected" else "error"]
            self._first_failure = self._first_failure or f"seed {outcome.row['id']}, step {step}: {why}"
            if outcome.kind == "dead_letter":
                cause = f"{step}: {kind_of(why)}"
                self._causes[cause] += 1
                self._examples.setdefault(cause, f"{step}: {why}")
            if outcome.kind == "rejected":
                self._rejected[step] += 1
                self._reasons[f"{step}: {why}"] += 1
        self._tables[outcome.kind].add(outcome.row)
        if outcome.complement is not None:
            self._complements[outcome.complement["fault"] is not None].add(outcome.complement)

    def note(self, seeds: int) -> str:
        """Return the share kept, the cost so far and its forecast for all seeds, replayed answers included; "" before a row ends.

        The figures of the rows are also exported.
        """
        report(
            synthesis_seeds_total=dict(self._kinds),
            synthesis_rejected_total=dict(self._rejected),
            synthesis_tokens_total=_tokens(self._paid),
            synthesis_usd_total=self._paid.usd,
        )
        if not self._next:
            return ""
        usd = (self._paid + self._replayed).usd
        cost = "" if usd is None else f", {usd:.2f} of about {usd * seeds / self._next:.2f} USD"
        lost = counted(self._kinds["dead_letter"], "dead letter")
        return f"{self._kinds['kept'] / self._next:.0%} kept, {lost}{cost}, {self._paid.calls} calls"

    def counts(self) -> dict[str, int]:
        """Return the manifest's counts; `calls` are those answered in this run."""
        return {
            "seeds": self._next,
            **{kind: self._kinds[kind] for kind in _FILES},
            "calls": self._paid.calls,
            "replayed": self._replayed.calls,
        }

    def require_few_dead_letters(self, most: float) -> None:
        """Refuse a larger share of dead letters than `most` by an InputError that names the most frequent causes."""
        dead = self._kinds["dead_letter"]
        if dead and dead / self._next > most:
            causes = "; ".join(f"{n} x {self._examples[cause]}" for cause, n in self._causes.most_common(_CAUSES))
            share = f"{dead} of {self._next} seeds ({dead / self._next:.1%}) are dead letters, so nothing is published: {causes}"
            rerun = "Mend the cause and run the same command, which asks again only what was not answered, or raise max_dead_letters"
            file = f"{tables.DEAD_LETTER_FILE} is in {self._directory}"
            raise InputError.of("max_dead_letters", f"{most:g}", f"{share}. {rerun}", file)

    def require_kept(self) -> None:
        """Refuse a run that keeps no record by an InputError that names the first failure."""
        if not self._kinds["kept"]:
            files = f"{tables.REJECTED_FILE} and {tables.DEAD_LETTER_FILE} are in {self._directory}"
            raise InputError(
                f"0 of {self._next} seeds were kept ({self._kinds['rejected']} rejected, {self._kinds['dead_letter']} dead "
                f"letters), so nothing is published: {self._first_failure}; {files}, the journal keeps every answer"
            )

    def facts(self) -> dict[str, Any]:
        """Return the manifest's figures: cost of this run and of replayed completions, and why rows were rejected.

        USD are list prices, None if the price table lacks a model.
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
            "cheap_judge": self._audit.facts(),
        }


class _Table:
    """A Parquet file that is written in row groups; without rows it is created only if `empty`."""

    def __init__(self, path: Path, schema: pa.Schema, empty: bool = False) -> None:
        self._path, self._schema = path, schema
        self._writer = pq.ParquetWriter(path, schema) if empty else None
        self._rows: list[Mapping[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) == _ROW_GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer = self._writer or pq.ParquetWriter(self._path, self._schema)
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []


def _tokens(spend: Spend) -> dict[str, int]:
    return {"prompt": spend.prompt_tokens, "completion": spend.completion_tokens}


class JudgeAudit:
    """Counts records by which judge decided them."""

    def __init__(self) -> None:
        self._settled: Counter[Kind] = Counter()
        self._in_doubt: Counter[Kind] = Counter()
        self._audited: Counter[tuple[Kind, Kind]] = Counter()
        """(outcome by the cheap judge, outcome by the judge) -> records."""

    def add(self, outcome: Outcome) -> None:
        """Count an outcome; a dead letter, or a record that was not judged, does not count."""
        provenance = outcome.row.get("provenance") or {}
        judges = set((provenance.get("judged_by") or {}).values()) - {None}
        if outcome.kind == "dead_letter" or not judges:
            return
        if provenance["audit"] is not None:
            self._settled[provenance["audit"]] += 1
            self._audited[provenance["audit"], outcome.kind] += 1
        else:
            (self._in_doubt if "judge" in judges else self._settled)[outcome.kind] += 1

    def facts(self) -> dict[str, Any] | None:
        """Return the manifest's figures; None without a cheap judge.

        `agreement` is the share of the audited records on which the judges agree; `wrongly_kept` is the share of those
        that the cheap judge would have kept and the judge rejects, and `wrongly_rejected` the reverse. Each has Wilson's
        95 % interval, and is null without such records.
        """
        if not self._settled and not self._in_doubt:
            return None
        audited = self._audited
        alike = audited["kept", "kept"] + audited["rejected", "rejected"]

        def share(part: int, of: int) -> list[float] | None:
            return list(wilson(part, of)) if of else None

        def wrong(by: Kind, instead: Kind) -> list[float] | None:
            return share(audited[by, instead], audited[by, by] + audited[by, instead])

        return {
            "settled": {kind: self._settled[kind] for kind in ("kept", "rejected")},
            "in_doubt": {kind: self._in_doubt[kind] for kind in ("kept", "rejected")},
            "audited": audited.total(),
            "agreement": share(alike, audited.total()),
            "wrongly_kept": wrong("kept", "rejected"),
            "wrongly_rejected": wrong("rejected", "kept"),
        }


def described(facts: dict[str, Any]) -> str:
    """Return one line of the figures."""
    settled, in_doubt = (sum(facts[name].values()) for name in ("settled", "in_doubt"))
    line = f"the cheap judge settled {settled:,} of {settled + in_doubt:,} judged records"
    if facts["agreement"] is None:
        return line
    share, low, high = facts["agreement"]
    return f"{line} and agrees with the judge on {share:.0%} ({low:.0%} to {high:.0%}) of {facts['audited']:,} audited ones"


def wilson(successes: int, trials: int) -> tuple[float, float, float]:
    """Return a share and the ends of its 95 % Wilson score interval (Wilson, 1927)."""
    z2 = NormalDist().inv_cdf(0.975) ** 2
    share = successes / trials
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = (z2 * share * (1 - share) / trials + (z2 / (2 * trials)) ** 2) ** 0.5 / (1 + z2 / trials)
    return share, max(0.0, middle - half), min(1.0, middle + half)
