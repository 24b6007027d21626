"""API keys: bearer tokens, stored as hashes and compared in constant time."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from infembed_ray.errors import InputError

log = logging.getLogger(__name__)

PREFIX = "ifr-"
"""Prefix of generated keys, so that scanners for leaked secrets recognise them."""
RECHECK_S = 1.0
"""Seconds between two checks whether the key file has changed: keys are added and revoked without a restart."""
HEADER = "# API keys: SHA-256 of a key, and its name. To revoke a key, delete its line.\n"
_LINE = re.compile(r"(?P<digest>[0-9a-f]{64}) +(?P<name>\S+)")


class ApiKeys:
    """The API keys that are accepted. Without keys and without a file, the API needs no key. Only hashes are kept.

    Args:
        keys: in clear text.
        file: key file with hashes, read again within `RECHECK_S` after it changes. If it becomes unreadable, the last
            good keys stay valid and the error is logged. If its last key is removed, all requests are rejected.

    Raises:
        InputError: the file does not exist, holds no key or has an invalid line.
    """

    def __init__(self, keys: Iterable[str] = (), file: str | Path | None = None) -> None:
        self._fixed_keys = [_digest(key.encode()) for key in keys]
        self._file = None if file is None else Path(file)
        self._file_keys: list[bytes] = []
        self._checked_at = 0.0
        self._file_state: object = None
        if self._file is not None:
            self._file_state = self._state_of(self._file)
            self._file_keys = list(read_keys(self._file).values())
            if not self._file_keys:
                raise InputError(f"api_keys_file={file}: holds no key; create one with `infembed key NAME {file}`")

    @classmethod
    def load(cls, variable: str | None, file: str | None = None) -> ApiKeys:
        """Load the comma-separated keys of an environment variable, if it is set, and those of a file, if one is given.

        Raises:
            InputError: the variable is set but holds an empty key, or the file is invalid.
        """
        value = os.environ.get(variable) if variable else None
        if value is None:
            return cls(file=file)
        keys = [key.strip() for key in value.split(",")]
        if not all(keys):
            raise InputError(
                f"api_keys_env={variable}: the variable is set but holds an empty key; "
                "set it to key1,key2,... or unset it"
            )
        return cls(keys, file)

    def __bool__(self) -> bool:
        """Return whether requests need a key. They still do after the last key of the file is revoked."""
        return bool(self._fixed_keys) or self._file is not None

    def accept(self, authorization: bytes | None) -> bool:
        """Return whether an `Authorization` header holds a valid key. The time does not depend on the token."""
        self._reload()
        scheme, _, token = (authorization or b"").partition(b" ")
        presented = _digest(token.strip())
        matches = [
            hmac.compare_digest(presented, digest) for digest in (*self._fixed_keys, *self._file_keys)
        ]  # no early exit
        return scheme.lower() == b"bearer" and any(matches)

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


def read_keys(file: Path) -> dict[str, bytes]:
    """Read a key file; returns name -> SHA-256 of the key.

    Raises:
        InputError: the file cannot be read or has an invalid line. The message does not show the line.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(
            f"api_keys_file={file}: cannot be read ({error.strerror}); create it with `infembed key NAME {file}`"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"api_keys_file={file}: is not a text file; create one with `infembed key NAME FILE`"
        ) from error
    keys: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        key = _LINE.fullmatch(line.strip())
        if key is None:
            raise InputError(
                f"api_keys_file={file}: line {number} is not `SHA-256 NAME`; correct it, or add keys with `infembed key`"
            )
        if key["name"] in keys:
            raise InputError(
                f"api_keys_file={file}: line {number}: the name {key['name']!r} appears twice; rename one of the two"
            )
        keys[key["name"]] = bytes.fromhex(key["digest"])
    return keys


def new_key(name: str, file: str | Path) -> str:
    """Create a key and append its hash to a file. A new file is readable by its owner only.

    Returns:
        The key. It is stored nowhere; a lost key cannot be recovered.

    Raises:
        InputError: the name is taken or invalid, or the file cannot be written or is not a key file.
    """
    path = Path(file)
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
            keys.write(f"{start}{_digest(key.encode()).hex()} {name}\n".encode())
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
