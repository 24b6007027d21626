"""API keys: bearer tokens with scopes, rate limits and collections, stored as hashes and compared in constant time."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from infembed_ray.config.serving import collection_name
from infembed_ray.errors import InputError

log = logging.getLogger(__name__)

PREFIX = "ifr-"
"""Prefix of generated keys, so that scanners for leaked secrets recognise them."""
RECHECK_S = 1.0
"""Seconds between two checks whether the key file has changed: keys are added and revoked without a restart."""
HEADER = (
    "# API keys: SHA-256 of a key, its name, its scopes, its requests per second, its collections. To revoke a key, delete "
    "its line.\n"
)
SCOPES = ("read", "write", "admin")
"""What a key may do: read searches, embeds and reads documents; write puts and deletes documents; admin reads `/metrics`."""
_LINE = re.compile(
    r"(?P<digest>[0-9a-f]{64}) +(?P<name>\S+)(?: +(?P<scopes>[a-z,]+))?(?: +(?P<rate>\d+(?:\.\d+)?)/s)?"
    r"(?: +collections=(?P<collections>\S+))?"
)


@dataclass(frozen=True)
class ApiKey:
    """An accepted key.

    Attributes:
        digest: SHA-256 of the key.
        scopes: some of `SCOPES`.
        rate: most requests per second; None: no limit.
        collections: that it may use; None: all, also those of later releases.
    """

    digest: bytes
    scopes: frozenset[str] = frozenset(SCOPES)
    rate: float | None = None
    collections: frozenset[str] | None = None


class ApiKeys:
    """The API keys that are accepted. Without keys and without a file, the API needs no key. Only hashes are kept.

    Args:
        keys: in clear text; they have all scopes and no rate limit.
        file: key file with hashes, read again within `RECHECK_S` after it changes. If it becomes unreadable, the last
            good keys stay valid and the error is logged. If its last key is removed, all requests are rejected.
        replicas: processes that share the rate limits; each grants its part of them.

    Raises:
        InputError: the file does not exist, holds no key or has an invalid line.
    """

    def __init__(self, keys: Iterable[str] = (), file: str | Path | None = None, replicas: int = 1) -> None:
        self._fixed_keys = [ApiKey(_digest(key.encode())) for key in keys]
        self._file = None if file is None else Path(file)
        self._replicas = replicas
        self._buckets: dict[ApiKey, TokenBucket] = {}
        self._file_keys: list[ApiKey] = []
        self._checked_at = 0.0
        self._file_state: object = None
        if self._file is not None:
            self._file_state = self._state_of(self._file)
            self._file_keys = list(read_keys(self._file).values())
            if not self._file_keys:
                raise InputError(
                    f"api_keys_file={file}: holds no key; create one with `infembed serve key NAME {file}`"
                )

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
            raise InputError(
                f"api_keys_env={variable}: the variable is set but holds an empty key; "
                "set it to key1,key2,... or unset it"
            )
        return cls(keys, file, replicas)

    def __bool__(self) -> bool:
        """Return whether requests need a key. They still do after the last key of the file is revoked."""
        return bool(self._fixed_keys) or self._file is not None

    def find(self, authorization: bytes | None) -> ApiKey | None:
        """Return the valid key in an `Authorization` header; None if there is none. The time does not depend on the token."""
        self._reload()
        scheme, _, token = (authorization or b"").partition(b" ")
        presented = _digest(token.strip())
        found = None
        for key in (*self._fixed_keys, *self._file_keys):  # no early exit
            if hmac.compare_digest(presented, key.digest):
                found = key
        return found if scheme.lower() == b"bearer" else None

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
        state = self._state_of(self._file)
        if state == self._file_state:
            return
        self._file_state = state
        try:
            keys = read_keys(self._file)
        except InputError as error:
            log.error("%s; the %d keys read before stay valid", error, len(self._file_keys))
        else:
            self._file_keys = list(keys.values())
            log.warning(
                "api_keys_file=%s: changed; it now holds %d keys: %s", self._file, len(keys), ", ".join(keys) or "none"
            )

    @staticmethod
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


def read_keys(file: Path) -> dict[str, ApiKey]:
    """Read a key file; returns name -> key. A line without scopes has all of them, one without collections too.

    Raises:
        InputError: the file cannot be read or has an invalid line. The message does not show the line.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(
            f"api_keys_file={file}: cannot be read ({error.strerror}); create it with `infembed serve key NAME {file}`"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"api_keys_file={file}: is not a text file; create one with `infembed serve key NAME FILE`"
        ) from error
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"api_keys_file={file}: line {number}"
        key = _LINE.fullmatch(line.strip())
        if key is None:
            raise InputError(
                f"{where} is not `SHA-256 NAME [SCOPES] [RATE/s] [collections=NAMES]`; correct it, or add keys with "
                "`infembed serve key`"
            )
        if key["name"] in keys:
            raise InputError(f"{where}: the name {key['name']!r} appears twice; rename one of the two")
        scopes = _scopes(key["scopes"] or ",".join(SCOPES), f"{where}: scopes")
        rate = None if key["rate"] is None else _rate(float(key["rate"]), f"{where}: rate")
        collections = _collections(key["collections"], scopes, f"{where}: collections")
        keys[key["name"]] = ApiKey(
            bytes.fromhex(key["digest"]),
            frozenset(scopes),
            rate,
            None if collections is None else frozenset(collections),
        )
    return keys


def _scopes(text: str, where: str) -> list[str]:
    scopes = text.split(",")
    if unknown := [scope for scope in scopes if scope not in SCOPES]:
        raise InputError(f"{where}: {unknown[0]!r} is no scope; give some of {','.join(SCOPES)}")
    return scopes


def _rate(value: float, where: str) -> float:
    if not 0 < value < math.inf:
        raise InputError(f"{where}={value:g}: must be above 0 requests per second; leave it out for no limit")
    return value


def _collections(text: str | None, scopes: Collection[str], where: str) -> list[str] | None:
    """Return the names of collections; None for None, which means all."""
    if text is None:
        return None
    if "admin" in scopes:
        raise InputError(
            f"{where}={text}: a key with the scope admin reads the metrics of all collections; leave out that scope, or the "
            "collections"
        )
    try:
        return [collection_name(name) for name in text.split(",")]
    except ValueError as error:
        raise InputError(f"{where}={text}: {error}") from None


def new_key(
    name: str, file: str | Path, scopes: str = "read", rate: float | None = None, collections: str | None = None
) -> str:
    """Create a key and append its hash to a file. A new file is readable by its owner only.

    Args:
        scopes: some of `SCOPES`, comma-separated.
        rate: most requests per second; None: no limit.
        collections: that the key may use, comma-separated; they need not be served yet. None: all.

    Returns:
        The key. It is stored nowhere; a lost key cannot be recovered.

    Raises:
        InputError: the name is taken, an argument is invalid, or the file cannot be written or is not a key file.
    """
    path = Path(file)
    given = _scopes(scopes, f"scopes={scopes}")
    facts = [name, ",".join(given)]
    if rate is not None:
        facts.append(f"{_rate(round(rate, 6), 'rate'):.6f}".rstrip("0").rstrip(".") + "/s")
    if names := _collections(collections, given, "collections"):
        facts.append(f"collections={','.join(names)}")
    if not re.fullmatch(r"[\w.@-]{1,100}", name):
        raise InputError(f"name={name!r}: must be 1 to 100 letters, digits or any of . _ - @")
    key = PREFIX + secrets.token_urlsafe(32)
    try:
        # One append under a lock: a server never reads half a line, and two commands see each other's keys.
        with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+b", buffering=0) as keys:
            fcntl.flock(keys, fcntl.LOCK_EX)
            if name in read_keys(path):
                raise InputError(
                    f"name={name!r}: {file} already has a key of that name; delete its line, or choose another name"
                )
            before = keys.read()
            start = "" if before.endswith(b"\n") else "\n" if before else HEADER
            keys.write(f"{start}{_digest(key.encode()).hex()} {' '.join(facts)}\n".encode())
            os.fsync(keys.fileno())
    except OSError as error:
        raise InputError(f"file={file}: cannot be written ({error.strerror}); name a writable file") from error
    return key


def is_loopback(host: str) -> bool:
    """Return whether an address bound to `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name can resolve to any address


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
