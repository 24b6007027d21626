"""API keys: bearer tokens from the environment, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable

from infembed_ray.errors import InputError


class ApiKeys:
    """The keys that open the API; without any it is open. Only their hashes are kept."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def from_environment(cls, variable: str | None) -> ApiKeys:
        """The comma-separated keys of an environment variable; none if it is None or unset.

        Raises:
            InputError: the variable is set but holds an empty key.
        """
        value = os.environ.get(variable) if variable else None
        if value is None:
            return cls()
        keys = [key.strip() for key in value.split(",")]
        if not all(keys):
            raise InputError(
                f"api_keys_env={variable}: the variable is set but holds an empty key; "
                "set it to key1,key2,... or unset it"
            )
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, authorization: str | None) -> bool:
        """Is this `Authorization` header a bearer token among the keys? Takes the same time for any wrong token."""
        scheme, _, token = (authorization or "").partition(" ")
        presented = _digest(token.strip())
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]  # all, always
        return scheme.lower() == "bearer" and any(matches)


def is_loopback(host: str) -> bool:
    """Does only this machine reach an address bound to `host`?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: it may resolve to anything


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
