"""The tables of a report in any format: our own, and the paper's with our results below its rows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby, zip_longest

import numpy as np

from infembed_ray.config.base import nearest
from infembed_ray.errors import InputError
from infembed_ray.evaluation import tables
from infembed_ray.evaluation.paper.collection import BASE, PER_SEED, CombinedResults, ReportedModel
from infembed_ray.evaluation.paper.published import COLUMNS, TABLES, PaperTable, Row
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.scoring import Scores
from infembed_ray.evaluation.significance import Compared, Stratum, compare
from infembed_ray.evaluation.tables import MARK, WIDTH, Cell, Column
from infembed_ray.evaluation.tasks.catalogue import AS_PAPER

_DECIMALS = {"2": 1, "3": 2, "4": 2, "5": 1, "6": 2}
"""Decimals of each table in the paper."""
CONTROLLED = "condition"
"""Kind of the rows of a table of controls, whose sections are models."""
_CONTROL_NOTE = "Means x100 and 95% intervals over queries, under control instructions; the end of this page explains conditions and figures"
MODELS = ("2", "5")
"""Tables whose rows are models; rows of the other tables are rows of sweeps."""


@dataclass(frozen=True)
class Number:
    """A number of a table, as it is shown."""

    value: str
    low: str | None = None
    high: str | None = None
    stdev_over_seeds: str | None = None
    difference: str | None = None
    """Difference to the baseline, with its sign."""
    difference_low: str | None = None
    difference_high: str | None = None
    p: float | None = None
    p_holm: float | None = None
    significant: bool = False
    printed: str | None = None
    """The paper's print, if it is known to be wrong."""
    remark: str | None = None

    @classmethod
    def from_cell(cls, column: Column, cell: Cell, spread: float | None) -> Number:
        """Format one of our cells."""
        mean, delta = cell.compared.mean, cell.compared.difference
        return cls(
            value=column.number(mean.value),
            low=column.number(mean.low),
            high=column.number(mean.high),
            stdev_over_seeds=None if spread is None else column.number(spread),
            difference=None if delta is None else column.number(delta.value, sign=True),
            difference_low=None if delta is None else column.number(delta.low, sign=True),
            difference_high=None if delta is None else column.number(delta.high, sign=True),
            p=cell.compared.p,
            p_holm=cell.adjusted,
            significant=cell.significant,
        )


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
    """Heading of each column, which neighbours may share, and its own name."""
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
    def remarks(self) -> list[str]:
        """Corrections and doubts of the paper's numbers."""
        places: dict[tuple[str, str], list[str]] = {}
        for line in self.lines:
            for number, column in zip(line.numbers, self.columns, strict=True):
                if number is not None and number.remark is not None:
                    state = f"printed {number.printed}, read as {number.value}" if number.printed else "doubtful"
                    place = " ".join(filter(None, column))
                    places.setdefault((line.label, f"{state}: {number.remark}"), []).append(place)
        return [f"{row}, {', '.join(columns)}: {remark}" for (row, remark), columns in places.items()]


def ours(collection: CombinedResults) -> list[Sheet]:
    """Make one table per benchmark, with all models that were evaluated on it; a sweep's models are grouped by backbone."""
    sheets = []
    for benchmark, columns in tables.columns(collection.results).items():
        evaluated = _Evaluated(collection, columns)
        lines = [
            Line(model.shown, True, model.backbone or "", evaluated.numbers(model), len(model.runs))
            for backbone in dict.fromkeys(model.backbone for model in evaluated.models)
            for model in evaluated.models
            if model.backbone == backbone
        ]
        sheets.append(Sheet(benchmark, "", "model", _headings([column.title for column in columns]), tuple(lines)))
    return sheets


class _Evaluated:
    """The models that have any of some columns, and their numbers."""

    def __init__(self, collection: CombinedResults, columns: Sequence[Column]) -> None:
        self._columns = [(column, collection.cells(column)) for column in columns]
        self.models = [m for m in collection.models.values() if any(m.key in cell_of for _, cell_of in self._columns)]

    def numbers(self, model: ReportedModel | None) -> tuple[Number | None, ...]:
        return tuple(
            None
            if model is None or model.key not in cell_of
            else Number.from_cell(column, cell_of[model.key], model.spread(column))
            for column, cell_of in self._columns
        )


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
    for queries, labels in of_queries.items():
        values = np.array([[asked[label][figure][query] for label in labels] for query in queries])
        cells = compare([Stratum.from_values(values, [groups.get(query, query) for query in queries])])
        for label, cell in zip(labels, cells, strict=True):
            number_of[label] = Number.from_cell(column, Cell(Compared(cell.mean)), None)
    return number_of


def papers(collection: CombinedResults, rows: Mapping[str, str]) -> list[Sheet]:
    """Make Tables 2 to 6 of the paper, with our results below their rows; Table 6 is one table per backbone.

    Args:
        collection: our results.
        rows: label or key of a model -> its row in Tables 2 and 5, if the names differ.

    Raises:
        InputError: a model or a row is unknown.
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
    """Whether a row of Tables 2 and 5 is about the model: by `rows`, by its label, or by the baseline that it is."""
    given = rows.get(model.key, rows.get(model.label))
    if given is not None:
        return given == row
    if model.backbone is not None:
        return model.label == BASE and plain(model.backbone) == plain(row)
    names = [model.label, *(name for name, entry in baselines.entries().items() if entry.rows and _is(model, entry))]
    return plain(row) in map(plain, names)


def _is(model: ReportedModel, entry: baselines.Baseline) -> bool:
    """Whether the model is this baseline, with the same weights, prompts, pooling and lengths."""
    about, settings = model.about, entry.settings.model_dump(mode="json", exclude_defaults=True)
    compared = type(entry.settings).model_fields.keys() - {"dtype", "api", *PER_SEED}
    return about["model"][0] == settings.get("model") and all(about.get(n) == settings.get(n) for n in compared)


def _paper_sheets(number: str, collection: CombinedResults, rows: Mapping[str, str]) -> Iterator[Sheet]:
    table = TABLES[number]
    measured = [_measured(collection, COLUMNS[name]) for name in table.columns]
    evaluated = _Evaluated(
        collection,
        [Column(name, parts, 100, _DECIMALS[number]) for name, parts in zip(table.columns, measured, strict=True)],
    )

    def matching(row: Row, backbone: str | None) -> list[ReportedModel]:
        if number in MODELS:
            return [model for model in evaluated.models if stands_for(model, row.name, rows)]
        of_row = [model for model in evaluated.models if plain(model.label) == plain(row.name)]
        return [m for m in of_row if backbone is None or plain(m.backbone or "") == plain(backbone)]

    def lines(row: Row, backbones: Sequence[str | None]) -> Iterator[Line]:
        """Yield the paper's row, then ours; several backbones are side by side."""
        printed = [n for backbone in backbones for n in _of_paper(table, row, backbone, _DECIMALS[number])]
        if any(number is not None for number in printed):
            yield Line(row.name, False, row.section, tuple(printed))
        for models in zip_longest(*(matching(row, backbone) for backbone in backbones)):
            present = [model for model in models if model is not None]
            label = present[0].key if len(backbones) == 1 else row.name
            numbers = tuple(n for model in models for n in evaluated.numbers(model))
            yield Line(label, True, row.section, numbers, max(len(model.runs) for model in present))

    printed_backbones = {plain(backbone) for backbone in table.backbones}
    extra = dict.fromkeys(model.backbone for model in evaluated.models if model.backbone is not None)
    backbones = [*table.backbones, *(backbone for backbone in extra if plain(backbone) not in printed_backbones)]
    parts: list[tuple[str, Sequence[str | None]]] = [
        (f"Table {number}, {backbone}", [backbone]) for backbone in backbones
    ]
    headings = _headings(table.columns)
    if not table.backbones:
        parts = [(f"Table {number}", [None])]
    elif number == "3":
        parts = [("Table 3", backbones)]
        headings = tuple((b, column.removeprefix("FollowIR ")) for b in backbones for column in table.columns)
    for name, of_part in parts:
        yield Sheet(
            name, table.title, table.of, headings, tuple(line for row in table.rows for line in lines(row, of_part))
        )


def _measured(collection: CombinedResults, parts: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the tasks that stand for those of the paper: under its own protocol, if they were evaluated so."""
    as_paper = tuple((f"{task}{AS_PAPER}", figure) for task, figure in parts)
    return as_paper if all(task in collection.results.tasks for task, _ in as_paper) else parts


def _of_paper(table: PaperTable, row: Row, backbone: str | None, decimals: int) -> list[Number | None]:
    """Return a row's numbers for one backbone; None for backbones that are not in the paper."""
    wide = len(table.columns)
    if backbone is not None and backbone not in table.backbones:
        return [None] * wide
    at = 0 if backbone is None else table.backbones.index(backbone) * wide
    return [
        None if n.value is None else Number(f"{n.value:.{decimals}f}", printed=n.printed, remark=n.remark)
        for n in row.numbers[at : at + wide]
    ]


def _headings(titles: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Give columns with the same first word a common heading: `Robust04 MAP` and `Robust04 p-MRR` under `Robust04`."""
    parted = [title.partition(" ")[::2] for title in titles]
    shared = [above for above, _ in parted]
    return tuple(
        (above, own) if own and shared.count(above) > 1 else ("", title)
        for (above, own), title in zip(parted, titles, strict=True)
    )


def plain(name: str) -> str:
    """Normalize a name: case and punctuation do not count."""
    return re.sub(r"[^a-z0-9+]", "", name.lower())


# ------------------------------------------------------------------------------------------------ Markdown, text, CSV


def as_markdown(sheet: Sheet) -> str:
    """Format a table, ours in bold beside the paper's, with remarks on errors in the paper's print."""
    above = [over for over, _ in sheet.columns]
    header = [sheet.of, *(" ".join(filter(None, (over, name))) for over, name in sheet.columns)]
    rows = [header, ["---"] + ["---:"] * len(above)]
    for section, lines in groupby(sheet.lines, key=lambda line: line.section):
        if section:
            rows.append([f"*{section}*"] + [""] * len(above))
        for line in lines:
            label = (f"**{line.label}**" if line.ours and sheet.mixed else line.label) + _seeds(line)
            rows.append([label, *(_markdown(number) for number in line.numbers)])
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    remarks = [f"- † {remark}" for remark in sheet.remarks]
    return "\n".join([*table, *(["", *remarks] if remarks else [])])


def as_text(sheet: Sheet) -> str:
    """Format means and differences for a terminal or a log, in tables of at most `WIDTH` characters per line."""
    header = [sheet.of, *(" ".join(filter(None, column)) for column in sheet.columns)]
    rows = [header, *([line.label, *map(_as_text, line.numbers)] for line in sheet.lines)]
    first, *others = [[cell.ljust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    parts = [[first]]
    for column in others:  # each part begins with the labels
        if len(parts[-1]) > 1 and sum(len(c[0]) + 2 for c in parts[-1]) + len(column[0]) > WIDTH:
            parts.append([first])
        parts[-1].append(column)
    blocks = []
    for part in parts:
        lines = ["  ".join(row).rstrip() for row in zip(*part, strict=True)]
        rule = "  ".join("-" * len(column[0]) for column in part)
        blocks.append("\n".join([sheet.name, lines[0], rule, *lines[1:]]))
    return "\n\n".join(blocks)


def as_csv(sheets: Iterable[Sheet]) -> str:
    """Format all tables as one, with one line per number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "section", "row", "source", "seeds", "column", *(field.name for field in fields(Number))])
    for sheet in sheets:
        for line in sheet.lines:
            source = "ours" if line.ours else "paper"
            for number, column in zip(line.numbers, sheet.columns, strict=True):
                if number is not None:
                    place = (sheet.name, line.section, line.label, source, line.seeds if line.ours else "")
                    values = asdict(number) | {
                        "significant": None if number.p is None else str(number.significant).lower()
                    }
                    writer.writerow([*place, " ".join(filter(None, column)), *values.values()])
    return text.getvalue()


def _markdown(number: Number | None) -> str:
    if number is None:
        return "—"
    parts = [number.value + ("†" if number.remark else "")]
    if number.low is not None:
        parts.append(f"[{number.low}, {number.high}]")
    if number.stdev_over_seeds is not None:
        parts.append(f"± {number.stdev_over_seeds}")
    if number.difference is not None:
        parts.append(number.difference + ("\\*" if number.significant else ""))
    return " ".join(parts)


def _as_text(number: Number | None) -> str:
    if number is None:
        return "n/a"
    return " ".join(filter(None, (number.value, number.difference))) + (MARK if number.significant else "")


def _seeds(line: Line) -> str:
    return f" ({line.seeds} seeds)" if line.seeds > 1 else ""
