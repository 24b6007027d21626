"""One query under two instructions: the two rankings side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 120


@dataclass(frozen=True)
class Ranking:
    """What the API answered.

    Attributes:
        query, instruction: as asked.
        wanted: id of the passage that answers the query under this instruction.
        hits: best first, each with `id`, `score` and `text`.
    """

    query: str
    instruction: str
    wanted: str
    hits: Sequence[dict[str, Any]]

    @property
    def obeyed(self) -> bool:
        """Is the wanted passage first?"""
        return bool(self.hits) and self.hits[0]["id"] == self.wanted


def side_by_side(rankings: Sequence[Ranking]) -> str:
    """The rankings as a text table, one column each; the passage an instruction asks for is marked."""
    table = Table(show_lines=True, width=WIDTH)
    table.add_column("#", width=2)
    for ranking in rankings:
        table.add_column(ranking.instruction, ratio=1)
    for rank in range(max(len(r.hits) for r in rankings)):
        table.add_row(str(rank + 1), *(_cell(r, rank) for r in rankings))
    console = Console(width=WIDTH, no_color=True, markup=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()


def _cell(ranking: Ranking, rank: int) -> str:
    if rank >= len(ranking.hits):
        return ""
    hit = ranking.hits[rank]
    mark = "  <- what was asked for" if hit["id"] == ranking.wanted else ""
    return f"{hit['score']:.3f}  {hit['id']}{mark}\n{hit['text'][:150]}..."
