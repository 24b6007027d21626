"""What a seed became: a kept record, a rejected row or a dead letter, and what its answers cost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from infembed_ray.records.tables import DEAD_LETTER, RECORD, REJECTED

Kind = Literal["kept", "rejected", "dead_letter"]

SCHEMAS: Mapping[Kind, pa.Schema] = {"kept": RECORD, "rejected": REJECTED, "dead_letter": DEAD_LETTER}
"""Columns of the rows of each kind."""


def kind_of(error: str) -> str:
    """Return the error of a dead letter without its details, for example `HTTP 400`."""
    return re.split("[:;(]", error, maxsplit=1)[0].strip()


@dataclass(frozen=True)
class Spend:
    """Answered calls and their cost."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float | None = 0.0
    """List price, or that of the Batch API; None if the price table lacks a model."""

    def __add__(self, other: Spend) -> Spend:
        return Spend(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            None if self.usd is None or other.usd is None else self.usd + other.usd,
        )


@dataclass(frozen=True)
class Outcome:
    """The result of one seed."""

    kind: Kind
    row: Mapping[str, Any]
    """Columns of `SCHEMAS[kind]`, without those that were not reached."""
    paid: Spend
    """In this run."""
    replayed: Spend
    """Answered by journals, so paid before this run."""
    complement: Mapping[str, Any] | None = None
    """Columns of `records.COMPLEMENT` for a kept record; None if `settings.complement` is off."""
    traceback: str | None = None
    """Of an unexpected exception, which made the row a dead letter."""
    from_journal: bool = False
    """Whether a journal answered the row's last request."""
