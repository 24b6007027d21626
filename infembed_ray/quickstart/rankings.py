"""Rankings of one query under one instruction, by exact search and as a text table; and the report, one HTML file."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.table import Table

from infembed_ray.evaluation import tables
from infembed_ray.evaluation.results import Results
from infembed_ray.evaluation.search import exact_search
from infembed_ray.evaluation.significance import Compared
from infembed_ray.evaluation.tasks import infir
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.tables import Passage
from infembed_ray.reporting import page
from infembed_ray.reporting.charts import Scale

_SHOWN = 80
"""Characters per passage in the text table."""
_RANKS = 3
"""Passages per column of the text table."""
WIDTH = 100
"""Characters per line of a table for a terminal."""


@dataclass(frozen=True)
class Ranking:
    """The best passages for a query under an instruction.

    Attributes:
        instruction: the instruction; None for none.
        wanted: id of the passage that the instruction asks for.
        hits: results, best first, each with `id`, `score` and `text`.
    """

    query: str
    instruction: str | None
    wanted: str
    hits: Sequence[dict[str, Any]]

    def rank(self, passage: str) -> int | None:
        """Return the rank of a passage, from 1; None if it is not among the hits."""
        return next((rank for rank, hit in enumerate(self.hits, start=1) if hit["id"] == passage), None)

    @property
    def obeyed(self) -> bool:
        """Whether the wanted passage is first."""
        return self.rank(self.wanted) == 1


def exact_hits(
    encoder: InstructionEncoder, query: str, instructions: Sequence[str | None], passages: Sequence[Passage], top_k: int
) -> list[list[dict[str, Any]]]:
    """Search all passages by brute force; return one list of hits per instruction, as `/v1/search` does."""
    texts = {passage.id: passage.text for passage in passages}
    queries = encoder.encode_queries([query] * len(instructions), instructions)
    rankings = exact_search(queries, encoder.encode_passages(list(texts.values())), list(texts), top_k)
    return [[{"id": id, "score": score, "text": texts[id]} for id, score in hits.items()] for hits in rankings]


def side_by_side(rankings: Sequence[Ranking]) -> str:
    """Format the beginnings of rankings as a text table of `WIDTH` characters, one column each; `>` marks the wanted passage."""
    table = Table(show_lines=True, width=WIDTH)
    table.add_column("#", width=1)
    for ranking in rankings:
        table.add_column(ranking.instruction or "no instruction", ratio=1)
    for rank in range(min(_RANKS, max(len(r.hits) for r in rankings))):
        table.add_row(str(rank + 1), *(_cell(r, rank) for r in rankings))
    console = Console(width=WIDTH, no_color=True, markup=False)
    with console.capture() as capture:
        console.print(table)
    return f"{capture.get().rstrip()}\n> marks the passage that the instruction asks for."


def _cell(ranking: Ranking, rank: int) -> str:
    if rank >= len(ranking.hits):
        return ""
    hit = ranking.hits[rank]
    mark = "> " if hit["id"] == ranking.wanted else ""
    return f"{mark}{hit['score']:.3f} {hit['id']}\n{shorten(hit['text'], _SHOWN, placeholder='...')}"


def write_report(
    path: Path,
    funnel: Mapping[str, int],
    results: Results,
    rankings: Mapping[str, Sequence[Ranking]],
    details: Mapping[str, Path],
) -> Path:
    """Write the report.

    Args:
        funnel: synthesis counts: seeds, kept, rejected, dead_letter, calls, replayed.
        results: results of the models on held-out records; the first model is the baseline.
        rankings: model -> the example query without an instruction, then under each of its instructions.
        details: subject of a stage's own report -> its file.
    """
    html = page.render(
        "infembed_ray.quickstart",
        "report.html",
        funnel=funnel,
        models=list(results.models),
        figures=list(_figures(results)),
        number=tables.Number.from_cell,
        first={model: _first(results, model) for model in results.models},
        note=tables.note(repr(next(iter(results.models)))),
        rankings=rankings,
        details={what: os.path.relpath(file, path.parent) for what, file in details.items()},
    )
    path.write_text(html, encoding="utf-8")
    return path


def _figures(results: Results) -> Iterator[tuple[tables.Column, Scale, list[Compared | None]]]:
    """Yield each measure, its axis, and its cell for each model; None for a mean over no requests."""
    for column in tables.columns(results)[infir.TASK]:
        cells = tables.cells(results, column)
        low = min([0.0, *(cell.mean.low for cell in cells.values())])
        yield column, Scale(math.floor(10 * low) / 10, 1.0), [cells.get(model) for model in results.models]


def _first(results: Results, model: str) -> tuple[int, int]:
    """Count the held-out requests whose right passage is ranked first (nDCG@10 is 1), and all requests."""
    values = [
        value
        for figure, of_figure in results.scores[model][infir.TASK].items()
        if figure.startswith("nDCG@10")
        for value in of_figure.values()
    ]
    return sum(value == 1 for value in values), len(values)
