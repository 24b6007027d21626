"""API keys: bearer tokens whose hashes come from the environment and from a file, compared in constant time."""

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
"""Keys made here begin with it, so that scanners for leaked secrets know one when they see it."""
RECHECK_S = 1.0
"""The file is looked at again after so long: keys come and go without a restart."""
HEADER = "# API keys: SHA-256 of a key, and its name. To revoke a key, delete its line.\n"
_LINE = re.compile(r"(?P<digest>[0-9a-f]{64}) +(?P<name>\S+)")


class ApiKeys:
    """The keys that open the API; without a variable and a file of them it is open. Only their hashes are kept.

    Args:
        keys: in the clear.
        file: of hashes, read again within `RECHECK_S` after it changed. A file that cannot be read any more changes
            nothing: the last good keys stay, and the log says so. One without keys lets nobody in.

    Raises:
        InputError: the file is not there, holds no key or a line that is none.
    """

    def __init__(self, keys: Iterable[str] = (), file: str | Path | None = None) -> None:
        self._fixed = [_digest(key.encode()) for key in keys]
        self._file = None if file is None else Path(file)
        self._of_file: list[bytes] = []
        self._looked_at = 0.0
        self._seen: object = None
        if self._file is not None:
            self._seen = self._state(self._file)
            self._of_file = list(read_keys(self._file).values())
            if not self._of_file:
                raise InputError(f"api_keys_file={file}: holds no key; make one with `infembed key NAME {file}`")

    @classmethod
    def load(cls, variable: str | None, file: str | None = None) -> ApiKeys:
        """The comma-separated keys of an environment variable, if it is set, and those of a file, if there is one.

        Raises:
            InputError: the variable is set but holds an empty key; or what is wrong with the file.
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
        """Is a key asked for? It stays so when the last one is revoked."""
        return bool(self._fixed) or self._file is not None

    def accept(self, authorization: bytes | None) -> bool:
        """Is this `Authorization` header a bearer token among the keys? Takes the same time for any wrong token."""
        self._look_again()
        scheme, _, token = (authorization or b"").partition(b" ")
        presented = _digest(token.strip())
        matches = [hmac.compare_digest(presented, digest) for digest in (*self._fixed, *self._of_file)]  # all, always
        return scheme.lower() == b"bearer" and any(matches)

    def _look_again(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._looked_at < RECHECK_S:
            return
        self._looked_at = now
        state = self._state(self._file)
        if state == self._seen:
            return
        self._seen = state
        try:
            keys = read_keys(self._file)
        except InputError as error:
            log.error("%s; the %d keys of before stay", error, len(self._of_file))
        else:
            self._of_file = list(keys.values())
            log.warning("api_keys_file=%s: changed; %d keys: %s", self._file, len(keys), ", ".join(keys) or "none")

    @staticmethod
    def _state(file: Path) -> object:
        """Differs when the file was written or replaced."""
        try:
            stat = file.stat()
        except OSError as error:
            return error.errno
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read_keys(file: Path) -> dict[str, bytes]:
    """Name -> SHA-256 of the key, of a file that `new_key` writes.

    Raises:
        InputError: it cannot be read, or a line is no key; its content is not shown.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(
            f"api_keys_file={file}: cannot be read ({error.strerror}); make it with `infembed key NAME {file}`"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"api_keys_file={file}: is no text; make it with `infembed key NAME FILE`") from error
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
            raise InputError(f"api_keys_file={file}: line {number}: the name {key['name']!r} again; give it another")
        keys[key["name"]] = bytes.fromhex(key["digest"])
    return keys


def new_key(name: str, file: str | Path) -> str:
    """Make a key and add its hash to a file, which only its owner can read if it is made now.

    Returns:
        The key, which is kept nowhere: whoever loses it makes another one.

    Raises:
        InputError: the name is taken or none, or the file cannot be written or holds something else.
    """
    path = Path(file)
    if not re.fullmatch(r"[\w.@-]{1,100}", name):
        raise InputError(f"name={name!r}: must be 1 to 100 letters, digits, and any of . _ - @")
    key = PREFIX + secrets.token_urlsafe(32)
    try:
        # Appended at once, under a lock: a server that reads meanwhile sees whole lines, two commands each other's.
        with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+b", buffering=0) as keys:
            fcntl.flock(keys, fcntl.LOCK_EX)
            if name in read_keys(path):
                raise InputError(f"name={name!r}: {file} has a key of that name; delete its line, or choose another")
            before = keys.read()
            start = "" if before.endswith(b"\n") else "\n" if before else HEADER
            keys.write(f"{start}{_digest(key.encode()).hex()} {name}\n".encode())
            os.fsync(keys.fileno())
    except OSError as error:
        raise InputError(f"file={file}: cannot be written ({error.strerror}); name one that can") from error
    return key


def is_loopback(host: str) -> bool:
    """Does only this machine reach an address bound to `host`?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: it may resolve to anything


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
