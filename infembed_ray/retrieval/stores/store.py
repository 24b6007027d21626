"""An external engine: its address in the settings `output` and `index`, and the versions that it holds.

An engine holds the versions of an index, each in a collection of its own, and an alias that names the current one
(blue/green). A collection that has no manifest is unfinished: no alias names it, and the next build starts it over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from infembed_ray.errors import InputError
from infembed_ray.redaction import holds_credentials, where_they_belong
from infembed_ray.retrieval.stores.address import is_address

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
        """Parse the value of a setting; InputError if it is no address, or it holds credentials."""
        parts = urlsplit(value)
        if holds_credentials(value):
            raise InputError(
                f"{setting}={value}: {where_they_belong(value, f'{token_env or TOKEN_ENV} (user:password or an API key)')}"
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
