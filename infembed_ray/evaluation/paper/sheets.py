"""The tables of a report: our own, and the paper's (`published.yaml`), without errors of the print, with our results below its rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import yaml

from infembed_ray.config.base import nearest
from infembed_ray.errors import InputError
from infembed_ray.evaluation import tables
from infembed_ray.evaluation.paper.collection import BASE, CombinedResults, ReportedModel
from infembed_ray.evaluation.significance import Compared, compare
from infembed_ray.evaluation.tables import MARK, Column, Number, stratum
from infembed_ray.evaluation.tasks.catalogue import AS_PAPER, BENCHMARKS
from infembed_ray.evaluation.tasks.task import Scores
from infembed_ray.progress import aligned

CONTROLLED = "condition"
"""Kind of the rows of a table of controls, whose sections are models."""
_CONTROL_NOTE = "Means x100 and 95% intervals over queries, under control instructions; the end of this page explains conditions and figures"
MODELS = ("2", "5")
"""Tables whose rows are models, in one decimal; rows of the other tables are rows of sweeps, in two decimals."""


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    name: str
    section: str
    """Heading above the row; may be empty."""
    numbers: tuple[float | None, ...]
    """x100; all columns of the first backbone, then of the next; without backbones, all columns."""


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

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


def _table(given: Mapping[str, Any]) -> PaperTable:
    rows = []
    for group in given["groups"]:
        for name, values in group["rows"].items():
            flat = [v for part in values for v in part] if isinstance(values[0], list) else values
            rows.append(Row(name, group.get("title", ""), tuple(flat)))
    columns, backbones = tuple(given["columns"]), tuple(given.get("backbones", ()))
    return PaperTable(given["title"], given["rows"], columns, backbones, tuple(rows))


_PLAIN = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))

SOURCE: str = _PLAIN["source"]
COLUMNS: Mapping[str, tuple[tuple[str, str], ...]] = {name: _part(column) for name, column in _PLAIN["columns"].items()}
"""Column -> (task, figure) pairs; the column is their unweighted mean."""
TABLES: Mapping[str, PaperTable] = {number: _table(given) for number, given in _PLAIN["tables"].items()}
"""By number: 2 to 6."""


# -------------------------------------------------------------------------------------------------------------- sheets


@dataclass(frozen=True)
class Line:
    """A row of a table."""

    label: str
    ours: bool
    section: str
    """Heading above the row; may be empty."""
    numbers: tuple[Number | None, ...]
    seeds: int = 1


@dataclass(frozen=True)
class Sheet:
    """One table."""

    name: str
    """`Table 2`, or the name of a benchmark."""
    title: str
    of: str
    """Kind of its rows."""
    columns: tuple[tuple[str, str], ...]
    """Heading of each column, which neighbours may share (in Table 3 the backbone), and its own name."""
    lines: tuple[Line, ...]
    note: str = ""
    """What the numbers are, if they are not means of queries."""

    @property
    def ours(self) -> bool:
        """Whether it has any of our numbers."""
        return any(line.ours for line in self.lines)

    @property
    def mixed(self) -> bool:
        """Whether it has numbers of the paper and ours."""
        return self.ours and any(not line.ours for line in self.lines)

    @property
    def titles(self) -> list[str]:
        """The names of its columns, each with its heading."""
        return [" ".join(filter(None, column)) for column in self.columns]


def _evaluated(collection: CombinedResults, columns: Sequence[Column]) -> list[ReportedModel]:
    """Return the models that have any of some columns."""
    return [m for m in collection.models.values() if any(m.key in collection.cells(column) for column in columns)]


def _numbers(
    collection: CombinedResults, columns: Sequence[Column], model: ReportedModel | None
) -> tuple[Number | None, ...]:
    """Format the numbers of a model; None where it has none."""
    cells = [collection.cells(column).get(model.key) if model else None for column in columns]
    return tuple(
        None if cell is None or model is None else Number.from_cell(column, cell, model.spread(column))
        for column, cell in zip(columns, cells, strict=True)
    )


def ours(collection: CombinedResults) -> list[Sheet]:
    """Make one table per benchmark, with all models that were evaluated on it; a sweep's models are grouped by backbone."""
    sheets = []
    for benchmark, columns in tables.columns(collection.results).items():
        models = _evaluated(collection, columns)
        backbones = list(dict.fromkeys(model.backbone for model in models))
        lines = [
            Line(model.shown, True, model.backbone or "", _numbers(collection, columns, model), len(model.runs))
            for model in sorted(models, key=lambda model: backbones.index(model.backbone))
        ]
        headings = tuple(("", column.title) for column in columns)
        sheets.append(Sheet(benchmark, "", "model", headings, tuple(lines)))
    return sheets


def obedience(collection: CombinedResults) -> list[Sheet]:
    """Make one table per task with controls: each model under every condition, then BM25."""
    results, sheets = collection.results, []
    for task, summary in results.tasks.items():
        asked = {
            (label, condition): scores
            for label, of_tasks in results.obedience.items()
            for condition, scores in of_tasks.get(task, {}).items()
        }
        figures = list(dict.fromkeys(figure for scores in asked.values() for figure in scores))
        columns = [_controls(figure, asked, summary.groups) for figure in figures]
        lines = [
            Line(condition, True, label, tuple(column.get((label, condition)) for column in columns))
            for label, condition in asked
        ]
        if lines:
            headings = tuple(("", figure) for figure in figures)
            title = "the same queries under control instructions, x100"
            sheets.append(Sheet(f"Obedience, {task}", title, CONTROLLED, headings, tuple(lines), _CONTROL_NOTE))
    return sheets


def _controls(
    figure: str, asked: Mapping[tuple[str, str], Scores], groups: Mapping[str, str]
) -> dict[tuple[str, str], Number]:
    """Format the means of one figure, x100, with their intervals; rows of the same queries share resamples."""
    of_queries: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for label, scores in asked.items():
        if figure in scores:
            of_queries.setdefault(tuple(sorted(scores[figure])), []).append(label)
    column, number_of = Column(figure, (), 100, 1), {}
    for labels in of_queries.values():
        cells = compare([stratum([asked[label][figure] for label in labels], groups)])
        for label, cell in zip(labels, cells, strict=True):
            number_of[label] = Number.from_cell(column, Compared(cell.mean))
    return number_of


def papers(collection: CombinedResults, rows: Mapping[str, str]) -> list[Sheet]:
    """Make Tables 2 to 6 of the paper, with our results below their rows; Table 6 is one table per backbone.

    `rows` maps a label or key to its row in Tables 2 and 5, if the names differ; InputError if either is unknown.
    """
    row_names = {row.name for number in MODELS for row in TABLES[number].rows}
    labels = {model.label for model in collection.models.values()} | set(collection.models)
    for label, row in rows.items():
        if label not in labels:
            raise InputError.of(f"rows.{label}", None, "no model has this name", nearest(label, labels))
        if row not in row_names:
            fault = "no row of Tables 2 and 5 has this name"
            raise InputError.of(f"rows.{label}", row, fault, nearest(row, row_names))
    return [sheet for number in TABLES for sheet in _paper_sheets(number, collection, rows)]


def stands_for(model: ReportedModel, row: str, rows: Mapping[str, str]) -> bool:
    """Whether a row of Tables 2 and 5 is about the model: by `rows`, or by its label."""
    given = rows.get(model.key, rows.get(model.label))
    if given is not None:
        return given == row
    if model.backbone is not None:
        return model.label == BASE and plain(model.backbone) == plain(row)
    return plain(row) == plain(model.label)


def _paper_sheets(number: str, collection: CombinedResults, rows: Mapping[str, str]) -> Iterator[Sheet]:
    table, decimals = TABLES[number], 1 if number in MODELS else 2
    parts = [_measured(collection, COLUMNS[name]) for name in table.columns]
    columns = [Column(name, of_name, 100, decimals) for name, of_name in zip(table.columns, parts, strict=True)]
    evaluated = _evaluated(collection, columns)

    def printed(row: Row, backbone: str | None) -> list[Number | None]:
        """Format a row's numbers of one backbone; None for backbones that are not in the paper."""
        wide = len(table.columns)
        if backbone is not None and backbone not in table.backbones:
            return [None] * wide
        at = 0 if backbone is None else table.backbones.index(backbone) * wide
        return [None if n is None else Number(f"{n:.{decimals}f}") for n in row.numbers[at : at + wide]]

    def matching(row: Row, backbone: str | None) -> list[ReportedModel]:
        if number in MODELS:
            return [model for model in evaluated if stands_for(model, row.name, rows)]
        of_row = [model for model in evaluated if plain(model.label) == plain(row.name)]
        return [m for m in of_row if backbone is None or plain(m.backbone or "") == plain(backbone)]

    def lines(row: Row, backbones: Sequence[str | None]) -> Iterator[Line]:
        """Yield the paper's row, then ours; several backbones are side by side."""
        of_paper = [n for backbone in backbones for n in printed(row, backbone)]
        if any(number is not None for number in of_paper):
            yield Line(row.name, False, row.section, tuple(of_paper))
        for models in zip_longest(*(matching(row, backbone) for backbone in backbones)):
            present = [model for model in models if model is not None]
            label = present[0].key if len(backbones) == 1 else row.name
            numbers = tuple(n for model in models for n in _numbers(collection, columns, model))
            yield Line(label, True, row.section, numbers, max(len(model.runs) for model in present))

    headings, printed_backbones = tuple(("", name) for name in table.columns), set(map(plain, table.backbones))
    extra = dict.fromkeys(model.backbone for model in evaluated if model.backbone is not None)
    backbones = [*table.backbones, *(backbone for backbone in extra if plain(backbone) not in printed_backbones)]
    sides: dict[str, Sequence[str | None]] = {f"Table {number}, {backbone}": [backbone] for backbone in backbones}
    if not table.backbones:
        sides = {f"Table {number}": [None]}
    elif number == "3":
        sides = {"Table 3": backbones}
        headings = tuple((b, column.removeprefix("FollowIR ")) for b in backbones for column in table.columns)
    for name, side in sides.items():
        of_side = tuple(line for row in table.rows for line in lines(row, side))
        yield Sheet(name, table.title, table.of, headings, of_side)


def _measured(collection: CombinedResults, parts: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the tasks that stand for those of the paper: under its own protocol, if they were evaluated so."""
    as_paper = tuple((f"{task}{AS_PAPER}", figure) for task, figure in parts)
    return as_paper if all(task in collection.results.tasks for task, _ in as_paper) else parts


def plain(name: str) -> str:
    """Normalize a name: case and punctuation do not count."""
    return re.sub(r"[^a-z0-9+]", "", name.lower())


# ------------------------------------------------------------------------------------------------ Markdown, text


def as_markdown(sheet: Sheet) -> str:
    """Format a table of our own."""
    wide = len(sheet.columns)
    rows = [[sheet.of, *sheet.titles], ["---"] + ["---:"] * wide]
    for section, lines in groupby(sheet.lines, key=lambda line: line.section):
        if section:
            rows.append([f"*{section}*"] + [""] * wide)
        for line in lines:
            label = f"{line.label} ({line.seeds} seeds)" if line.seeds > 1 else line.label
            rows.append([label, *map(_markdown, line.numbers)])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _markdown(number: Number | None) -> str:
    if number is None:
        return "—"
    difference = (number.difference or "").replace(MARK, f"\\{MARK}")
    return " ".join(filter(None, (number.value, number.interval, number.spread, difference)))


def as_text(sheet: Sheet) -> str:
    """Format means and differences for a terminal or a log."""
    lines = [[line.label, *(n.text if n else "n/a" for n in line.numbers)] for line in sheet.lines]
    header = [sheet.of, *sheet.titles]
    rule = ["-" * max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return "\n".join([sheet.name, *aligned([header, rule, *lines])])
