"""The interface of an external engine, and its address in the settings `output` and `index`.

An engine holds the versions of an index, each in a collection of its own, and an alias that names the current one
(blue/green). A collection that has no manifest is unfinished: no alias names it, and the next build starts it over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.retrieval.index import IndexFacts
from infembed_ray.retrieval.shards import Hit
from infembed_ray.retrieval.stores.address import is_address
from infembed_ray.retrieval.updates.write_ahead_log import Change

TOKEN_ENV = "INFEMBED_STORE_TOKEN"
"""Environment variable with the token, where no setting names another."""


class StoreFault(InputError):
    """The engine cannot be used or does not answer; the message names the setting, the address and the remedy."""


@dataclass(frozen=True)
class Address:
    """Where an engine is: `milvus+http[s]://HOST:PORT/[DATABASE/]ALIAS`.

    Attributes:
        setting: name of the setting, for error messages.
        url: of the server.
        alias: of the current version, and prefix of the names of all versions.
        token_env: environment variable with the token; None: no token.
    """

    setting: str
    url: str
    database: str
    alias: str
    token_env: str | None

    @classmethod
    def parse(cls, value: str, setting: str, token_env: str | None = TOKEN_ENV) -> Address:
        """Parse the value of a setting.

        Raises:
            InputError: it is no address, or it holds credentials.
        """
        parts = urlsplit(value)
        if "@" in parts.netloc:
            raise InputError(
                f"{setting}={parts.scheme}://...@{parts.netloc.rpartition('@')[2]}{parts.path}: an address must not hold "
                f"credentials, because logs show it; set {token_env or TOKEN_ENV}=user:password in the environment"
            )
        *database, alias = parts.path.strip("/").split("/")
        if not (is_address(value) and parts.netloc and alias.isidentifier() and alias.isascii()) or len(database) > 1:
            raise InputError(
                f"{setting}={value}: must be milvus+http://HOST:PORT/ALIAS, or .../DATABASE/ALIAS; an alias has letters, "
                "digits and underscores"
            )
        return cls(setting, f"{parts.scheme.partition('+')[2]}://{parts.netloc}", "".join(database), alias, token_env)

    def __str__(self) -> str:
        return f"milvus+{self.url}/{f'{self.database}/' if self.database else ''}{self.alias}"


@dataclass(frozen=True)
class StoredVersion:
    """A finished version in an engine.

    Attributes:
        id: identity of its build.
        manifest: as `manifest.json` of a published index.
        current: whether the alias names it.
    """

    id: str
    manifest: Mapping[str, Any]
    current: bool


class Store(Protocol):
    """One version of an index, open for searches and changes. Any threads can search while one changes."""

    facts: IndexFacts

    def search(
        self, vectors: np.ndarray, k: int, filter: Mapping[str, Any] | None = None, fresh: bool = False
    ) -> tuple[list[list[Hit]], int]:
        """Find the passages of each query with the largest inner products, by (score, id), descending.

        Of passages with equal scores at the k-th place, the engine chooses.

        Args:
            vectors: (n, d) float32 unit vectors.
            k: most hits per query.
            filter: metadata filter, as in JSON; see `retrieval.filters`.
            fresh: see all changes until now, also if that takes longer.

        Returns:
            The hits, and the sequence of the changes that they reflect.

        Raises:
            FilterError: the filter does not fit the metadata.
            StoreFault: the engine does not answer.
        """

    def get(self, id: str) -> Hit | None:
        """The passage of an id, with score 0; None if there is none."""

    def change(self, changes: Sequence[Change]) -> int:
        """Apply changes; they are durable on return. The last change to an id wins.

        Returns:
            The sequence from which searches see them: Unix time in milliseconds.

        Raises:
            ChangeError: a change does not fit the index; none is made.
            StoreFault: the engine does not answer; some of the changes may be made.
        """

    def ready(self) -> bool:
        """Whether searches would be answered; loads the collection if a restart of the engine has released it."""


class Engine(Protocol):
    """The versions of an index in an external engine."""

    address: Address
    one_writer: bool
    """Whether the engine takes one writer at a time."""

    def versions(self) -> list[StoredVersion]:
        """The finished versions, the oldest first."""

    def current(self) -> StoredVersion:
        """The version that the alias names; raises StoreFault if there is none."""

    def begin(self, identity: str, metadata: Mapping[str, FieldType], dimension: int, index_type: str | None) -> None:
        """Create the collection of a version; drop what an interrupted build left of it.

        Args:
            metadata: columns besides id and text.
            index_type: as the engine spells it; None: the engine chooses.

        Raises:
            InputError: the alias is taken, or the engine refuses the columns, the dimension or the index type.
        """

    def insert(self, identity: str, passages: pa.Table, vectors: np.ndarray) -> None:
        """Insert passages (`retrieval.passages.schema`) and their (n, d) float32 unit vectors.

        Raises:
            InputError: a passage is too long for the engine.
        """

    def finish(self, identity: str, manifest: Mapping[str, Any]) -> None:
        """Wait for the index, verify the number of passages, write the manifest, and let the alias name the version.

        Raises:
            StoreFault: passages are missing or doubled; the alias is unchanged.
        """

    def use(self, identity: str) -> None:
        """Let the alias name a finished version."""

    def open(self, identity: str) -> Store:
        """Open a finished version; raises StoreFault if there is none."""
