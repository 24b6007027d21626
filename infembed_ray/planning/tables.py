"""Plain-text tables and sizes of the planner's reports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from infembed_ray.planning.capacity import GIB
from infembed_ray.progress import aligned


def table(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Return a line of headings and one per row, in aligned columns. All rows have the same headings."""
    return aligned([list(rows[0]), *(list(row.values()) for row in rows)])


def as_json(made: Any) -> str:
    """Format the dataclass of a plan as JSON."""
    return json.dumps(asdict(made), indent=2)


def gib(nbytes: float) -> str:
    """Format bytes as GiB: one decimal from 1 GiB on, three below."""
    return f"{nbytes / GIB:,.{1 if nbytes >= GIB else 3}f}"


def usd(amount: float | None) -> str:
    """Format USD without decimals; `-` for an unknown amount."""
    return "-" if amount is None else f"{amount:,.0f}"
