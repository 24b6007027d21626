"""What completions cost at the list prices of prices.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from infembed_ray.synthesis.chat import Completion

FILE = Path(__file__).with_name("prices.yaml")
_SNAPSHOT_DATE = re.compile(r"-\d{4}-\d{2}-\d{2}$")


@dataclass(frozen=True)
class PriceTable:
    """List prices of models on one date."""

    as_of: str
    models: dict[str, tuple[float, float]]
    """Model -> USD per million (prompt, completion) tokens."""

    def usd(self, model: str, completion: Completion) -> float | None:
        """The price of one completion in USD; None where the table does not know `model`, as it was asked for.

        A dated snapshot (`gpt-4o-mini-2024-07-18`) costs what its undated name does.
        """
        price = self.models.get(model) or self.models.get(_SNAPSHOT_DATE.sub("", model))
        if price is None:
            return None
        return (price[0] * completion.prompt_tokens + price[1] * completion.completion_tokens) / 1e6


@cache
def load() -> PriceTable:
    """The table that comes with the package."""
    table = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    models = {name: (float(prompt), float(completion)) for name, (prompt, completion) in table["models"].items()}
    return PriceTable(str(table["as_of"]), models)
