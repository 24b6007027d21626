"""Rankings of one query under one instruction, by exact search and as a text table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.tables import Passage

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
    vectors = encoder.encode_passages([passage.text for passage in passages])
    scores = encoder.encode_queries([query] * len(instructions), instructions) @ vectors.T
    return [
        [
            {"id": passages[i].id, "score": float(row[i]), "text": passages[i].text}
            for i in np.argsort(-row, kind="stable")[:top_k]
        ]
        for row in scores
    ]


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
