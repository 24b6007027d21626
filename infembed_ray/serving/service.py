"""Documents and errors that the HTTP API, `routing.blue_green.Release` and the shards exchange. It depends on neither HTTP nor Ray."""

from collections.abc import Mapping
from typing import NamedTuple

from infembed_ray.serving.schema import Metadata


class Document(NamedTuple):
    """A passage of the index."""

    id: str
    text: str
    metadata: Mapping[str, Metadata] = {}
    """Field -> value; missing fields are null. Dates are ISO 8601 strings."""


class ReplicaLost(Exception):
    """The replica that would have answered is lost or has not started; retry soon."""


class Stuck(Exception):
    """The shards do not apply changes of documents; the text is the reason, in one line."""


class TooManyChanges(Exception):
    """As many documents differ from the index version as may; the arguments are how many do and how many may."""


class NotApplied(Exception):
    """A shard has not applied the changes up to `min_sequence` in time; the arguments are that, the shard and its sequence."""


class ShardState(NamedTuple):
    """The state of a shard's changes."""

    fault: str | None = None
    """Why the shard applies no changes, in one line; None: it applies them."""
    changed: int = 0
    """Documents that differ from its index version."""
