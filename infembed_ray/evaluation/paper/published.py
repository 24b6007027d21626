"""The numbers of the paper's tables (`published.yaml`), with known errors of the print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infembed_ray.evaluation.tasks.catalogue import BENCHMARKS


@dataclass(frozen=True)
class Printed:
    """A number of the paper, x100."""

    value: float | None
    """The correct value; None if the paper has none."""
    printed: str | None = None
    """The paper's print, if it is known to be wrong."""
    why: str | None = None
    """Reason of the correction, or what the number contradicts."""

    @property
    def remark(self) -> str | None:
        """The correction or the doubt in words."""
        state = f"printed {self.printed}, read as {self.value}" if self.printed else "doubtful"
        return f"{state}: {self.why}" if self.why else None


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    name: str
    section: str
    """Heading above the row; may be empty."""
    numbers: tuple[Printed, ...]
    """All columns of the first backbone, then of the next; without backbones, all columns."""


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

    number: str
    title: str
    of: str
    """Kind of its rows: models, objectives, designs."""
    columns: tuple[str, ...]
    """Names in `COLUMNS`."""
    backbones: tuple[str, ...]
    """Each has all columns; empty if the rows are models."""
    rows: tuple[Row, ...]


def _part(column: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if "task" in column:
        return ((column["task"], column["figure"]),)
    return tuple(BENCHMARKS[column["benchmark"]].averages[column["average"]].items())


def _table(number: str, plain: Mapping[str, Any], corrections: Any, doubts: Any) -> PaperTable:
    columns, backbones = tuple(plain["columns"]), tuple(plain.get("backbones", ()))
    places = [(backbone, column) for backbone in backbones or (None,) for column in columns]
    marked: dict[tuple[str, str | None, str], Mapping[str, Any]] = {
        (doubt["row"], doubt.get("backbone"), column): doubt
        for doubt in doubts
        for column in doubt["columns"]
        if doubt["table"] == number
    }
    marked |= {(c["row"], c.get("backbone"), c["column"]): c for c in corrections if c["table"] == number}
    rows = []
    for group in plain["groups"]:
        for name, values in group["rows"].items():
            flat = [v for part in values for v in part] if isinstance(values[0], list) else values
            numbers = []
            for place, value in zip(places, flat, strict=True):
                mark = marked.get((name, *place), {})
                numbers.append(Printed(mark.get("reads", value), mark.get("printed"), mark.get("why")))
            rows.append(Row(name, group.get("title", ""), tuple(numbers)))
    return PaperTable(number, plain["title"], plain["rows"], columns, backbones, tuple(rows))


_PLAIN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

SOURCE: str = _PLAIN["source"]
COLUMNS: Mapping[str, tuple[tuple[str, str], ...]] = {name: _part(column) for name, column in _PLAIN["columns"].items()}
"""Column -> (task, figure) pairs; the column is their unweighted mean."""
TABLES: Mapping[str, PaperTable] = {
    number: _table(number, plain, _PLAIN["corrections"], _PLAIN["doubts"]) for number, plain in _PLAIN["tables"].items()
}
"""By number: 2 to 6."""
