"""Prices of completions: the list prices of prices.yaml, or those of a file that overrides them."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from infembed_ray.errors import InputError
from infembed_ray.llm.chat import Completion
from infembed_ray.storage.steps import resolve_input

FILE = Path(__file__).with_name("prices.yaml")
BATCH_PRICE = 0.5
"""Price of the Batch API as a share of the list price; it has no further discount for cached tokens."""
_SNAPSHOT_DATE = re.compile(r"-\d{4}-\d{2}-\d{2}$")


@dataclass(frozen=True)
class PriceTable:
    """List prices of models on one date."""

    as_of: str
    models: dict[str, tuple[float, ...]]
    """Model -> USD per million (prompt, completion) tokens, or (prompt, completion, cached prompt) tokens."""

    def price(self, model: str) -> tuple[float, ...] | None:
        """Return USD per million (prompt, completion) tokens, and of cached prompt tokens if known; None if unknown.

        A dated snapshot (`gpt-4o-mini-2024-07-18`) has the price of its undated name.
        """
        return self.models.get(model) or self.models.get(_SNAPSHOT_DATE.sub("", model))

    def usd(self, model: str, completion: Completion) -> float | None:
        """Return what the endpoint charged for a completion, or its list price in USD.

        None if the table lacks `model`, the requested name, or the endpoint did not count the tokens.
        """
        price = self.price(model)
        if completion.usd is not None or price is None or not completion.prompt_tokens:
            return completion.usd
        usd = (price[0] * completion.prompt_tokens + price[1] * completion.completion_tokens) / 1e6
        if completion.batched:
            return BATCH_PRICE * usd
        return usd - (price[0] - price[2]) * completion.cached_tokens / 1e6 if len(price) > 2 else usd


@cache
def load(overrides: str | None = None) -> PriceTable:
    """Return the bundled table, overridden by a YAML file (path or URI); InputError if it cannot be read or has another form.

    It has `as_of`, and under `models` a list [prompt, completion] or [prompt, completion, cached prompt] each.
    """
    ours = _read(FILE)
    if overrides is None:
        return ours
    try:
        theirs = _read(resolve_input(overrides, "prices"))
    except OSError as error:
        raise InputError(f"prices={overrides}: cannot be read ({error.strerror}); give a file") from error
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        line = "`gpt-4o-mini: [0.15, 0.60, 0.075]`, USD per million tokens of prompt, completion and, if known, cached prompt"
        remedy = f"write `as_of: DATE` and under `models:` lines like {line}"
        raise InputError.of("prices", overrides, "no price table", remedy) from error
    return PriceTable(theirs.as_of, ours.models | theirs.models)


def _read(file: Path) -> PriceTable:
    table = yaml.safe_load(file.read_text(encoding="utf-8"))
    models = {name: tuple(float(price) for price in prices) for name, prices in table["models"].items()}
    if not all(len(each) in (2, 3) and min(each) >= 0 and max(each) < float("inf") for each in models.values()):
        raise ValueError("not two or three prices of at least 0")
    return PriceTable(str(table["as_of"]), models)
