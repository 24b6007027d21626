"""API keys: bearer tokens with scopes, rate limits and collections, stored as hashes and compared in constant time."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import time
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from infembed_ray.config.serving import collection_name
from infembed_ray.errors import InputError

log = logging.getLogger(__name__)

PREFIX = "ifr-"
"""Prefix of generated keys, so that scanners for leaked secrets recognise them."""
RECHECK_S = 1.0
"""Seconds between two checks whether the key file has changed: keys are added and revoked without a restart."""
ALLOWED: ContextVar[frozenset[str] | None] = ContextVar("ALLOWED", default=None)
"""Collections that the key of the current request may use; None: all. The middleware sets it for every request."""
Scope = Literal["read", "write", "admin"]
"""What a key may do: read searches, embeds and reads documents; write puts and deletes documents; admin reads `/metrics`."""


class ApiKey(BaseModel):
    """An accepted key, and a line of a key file: the digest of the key in hex, and what it may do.

    `rate` is the maximum of requests per second (None: no limit). `collections` need not be served yet (None: all).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(pattern=r"^[\w.@-]{1,100}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: frozenset[Scope] = Field(frozenset(get_args(Scope)), min_length=1)
    rate: float | None = Field(None, gt=0, allow_inf_nan=False)
    collections: frozenset[Annotated[str, AfterValidator(collection_name)]] | None = None

    @model_validator(mode="after")
    def _admin_reads_all(self) -> ApiKey:
        if "admin" in self.scopes and self.collections is not None:
            fault = "the scope admin reads the metrics of all collections; leave out that scope, or collections"
            raise ValueError(fault)
        return self


class ApiKeys:
    """The API keys that are accepted. Without keys and without a file, the API needs no key. Only hashes are kept.

    Args:
        keys: in clear text; they have all scopes and no rate limit.
        file: key file with hashes, read again within `RECHECK_S` after it changes. While it is unreadable, the last
            good keys stay valid. If its last key is removed, all requests are rejected.
        replicas: processes that share the rate limits; each grants its part of them.

    Raises:
        InputError: the file does not exist, holds no key or has an invalid line.
    """

    def __init__(self, keys: Iterable[str] = (), file: str | Path | None = None, replicas: int = 1) -> None:
        self._fixed_keys = [ApiKey(name="environment", sha256=_digest(key.encode())) for key in keys]
        self._file = None if file is None else Path(file)
        self._replicas = replicas
        self._buckets: dict[ApiKey, TokenBucket] = {}
        self._file_keys: list[ApiKey] = []
        self._checked_at = 0.0
        self._file_state: object = None
        if self._file is not None:
            self._file_state = _state_of(self._file)
            self._file_keys = list(read_keys(self._file).values())
            if not self._file_keys:
                raise InputError.of("api_keys_file", file, "holds no key", _CREATE)

    @classmethod
    def load(cls, variable: str | None, file: str | None = None, replicas: int = 1) -> ApiKeys:
        """Load the comma-separated keys of an environment variable, if it is set, and those of a file, if one is given.

        Raises:
            InputError: the variable is set but holds an empty key, or the file is invalid.
        """
        value = os.environ.get(variable) if variable else None
        if value is None:
            return cls(file=file, replicas=replicas)
        keys = [key.strip() for key in value.split(",")]
        if not all(keys):
            remedy = "set it to key1,key2,... or unset it"
            raise InputError.of("api_keys_env", variable, "the variable is set but holds an empty key", remedy)
        return cls(keys, file, replicas)

    def __bool__(self) -> bool:
        """Return whether requests need a key. They still do after the last key of the file is revoked."""
        return bool(self._fixed_keys) or self._file is not None

    def find(self, authorization: bytes | None) -> ApiKey | None:
        """Return the valid key in an `Authorization` header; None if there is none. The time does not depend on the token."""
        self._reload()
        scheme, _, token = (authorization or b"").partition(b" ")
        presented = _digest(token.strip())
        match = None
        for key in (*self._fixed_keys, *self._file_keys):  # no early exit
            if hmac.compare_digest(presented, key.sha256):
                match = key
        return match if scheme.lower() == b"bearer" else None

    def wait_s(self, key: ApiKey) -> float:
        """Count a request of a key; return 0, or the seconds until its rate limit allows one, which then does not count."""
        if key.rate is None:
            return 0.0
        if key not in self._buckets:
            self._buckets[key] = TokenBucket(key.rate / self._replicas)
        return self._buckets[key].take()

    def _reload(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._checked_at < RECHECK_S:
            return
        self._checked_at = now
        state = _state_of(self._file)
        if state == self._file_state:
            return
        self._file_state = state
        try:
            keys = read_keys(self._file)
        except InputError as error:
            log.error("%s; the %d keys read before stay valid", error, len(self._file_keys))
        else:
            self._file_keys = list(keys.values())
            names = ", ".join(keys) or "none"
            log.warning("api_keys_file=%s: changed; it now holds %d keys: %s", self._file, len(keys), names)


def _state_of(file: Path) -> object:
    """Return a value that changes when the file is written or replaced."""
    try:
        stat = file.stat()
    except OSError as error:
        return error.errno
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


class TokenBucket:
    """Token bucket: `rate` requests per second, in bursts of up to one second's requests and at least one."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._capacity = max(1.0, rate)
        self._tokens, self._filled_at = self._capacity, time.monotonic()

    def take(self) -> float:
        """Take a token and return 0; if there is none, return the seconds until there is."""
        now = time.monotonic()
        self._tokens = min(self._capacity, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens < 1:
            return (1 - self._tokens) / self._rate
        self._tokens -= 1
        return 0.0


_CREATE = "create one with `infembed serve key NAME FILE`"


def read_keys(file: Path) -> dict[str, ApiKey]:
    """Read a key file; returns name -> key.

    Raises:
        InputError: the file cannot be read, has an invalid line, or a name twice. The message does not show the line.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError.of("api_keys_file", file, f"cannot be read ({error.strerror})", _CREATE) from error
    except UnicodeDecodeError as error:
        raise InputError.of("api_keys_file", file, "is not a text file", _CREATE) from error
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            key = ApiKey.model_validate_json(line)
        except ValidationError as error:
            fault = f"line {number}: {_fault(error)}"
            remedy = "correct the line, or delete it to revoke its key"
            raise InputError.of("api_keys_file", file, fault, remedy) from None
        if key.name in keys:
            fault = f"line {number}: the name {key.name!r} appears twice"
            raise InputError.of("api_keys_file", file, fault, "rename one of the two")
        keys[key.name] = key
    return keys


def _fault(error: ValidationError) -> str:
    """Return the first fault without the value, which may be secret."""
    first = error.errors(include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")]))


def new_key(
    name: str, file: str | Path, scopes: str = "read", rate: float | None = None, collections: str | None = None
) -> str:
    """Create a key, append its hash to a file and return the key, which is stored nowhere.

    A new file is readable by its owner only. The arguments are fields of `ApiKey`; scopes and collections are separated by
    commas.

    Raises:
        InputError: the name is taken, an argument is invalid, or the file cannot be written or is not a key file.
    """
    path, key = Path(file), PREFIX + secrets.token_urlsafe(32)
    given: dict[str, Any] = {"name": name, "sha256": _digest(key.encode()), "scopes": scopes.split(","), "rate": rate}
    try:
        entry = ApiKey(**given, collections=None if collections is None else collections.split(","))
    except ValidationError as error:
        raise InputError(_fault(error)) from None
    try:
        # One append under a lock: a server never reads half a line, and two commands see each other's keys.
        with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+b", buffering=0) as keys:
            fcntl.flock(keys, fcntl.LOCK_EX)
            if name in read_keys(path):
                fault = f"{file} already has a key of that name"
                raise InputError.of("name", name, fault, "delete its line, or choose another name")
            before = keys.read()
            start = "" if not before or before.endswith(b"\n") else "\n"
            keys.write(f"{start}{entry.model_dump_json(exclude_none=True)}\n".encode())
            os.fsync(keys.fileno())
    except OSError as error:
        raise InputError.of("file", file, f"cannot be written ({error.strerror})", "name a writable file") from error
    return key


def is_loopback(host: str) -> bool:
    """Return whether an address bound to `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name can resolve to any address


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
