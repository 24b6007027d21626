"""Leases: one writer at a time. In a local directory a lease is a file lock; in an object store it is the object `.NAME.lease`.

Its owner renews the object by compare-and-swap at a third of its duration. Another process takes over one that was not renewed
for its duration, by two times of the store's clock, so skew between machines has no effect.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from obstore.exceptions import BaseError
from pyarrow import ArrowException

from infembed_ray.errors import Fault, InputError
from infembed_ray.progress import in_thread, say
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder, Version
from infembed_ray.storage.places import Place

SECONDS = 60.0
"""Duration of a lease. It exceeds the time that a write of the manifest may take with all its retries."""
_ROUNDING_S = 2.0
"""Stores give times in whole seconds."""
_POLL_S = 1.0


@contextlib.contextmanager
def lease(place: Place, name: str, setting: str, value: Any) -> Iterator[Callable[[], None]]:
    """Hold the lease on a name below a directory or a folder of an object store.

    A store's lease that another process holds is observed until that process renews it or the lease expires.

    Args:
        setting: named by errors, with its `value`.

    Yields:
        A check, to be called before the result is published; it raises InputError if the lease is lost.

    Raises:
        InputError: another process holds the lease; the message names it.
    """
    if isinstance(place, Folder):
        held = _StoreLease(place, f".{name}.lease", setting, value)
        held.acquire()
        try:
            with in_thread(held.keep, f"lease .{name}.lease"):
                yield held.renew
        finally:
            held.release()
        return
    place.mkdir(parents=True, exist_ok=True)
    path = place / f".{name}.lock"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(durable.exclusive_lock(path))
        except BlockingIOError as error:
            raise InputError(_busy(setting, value, path.read_text(encoding="utf-8"))) from error
        path.write_text(json.dumps(_owner()), encoding="utf-8")
        yield lambda: None


def is_held(place: Place, name: str) -> bool:
    """Return whether a process holds the lease on a name. One of a store counts until it expires, by this machine's clock."""
    if isinstance(place, Folder):
        _, held = place.read_versioned(f".{name}.lease") or (None, None)
        return held is not None and time.time() - (held.written or 0.0) < SECONDS
    if not (path := place / f".{name}.lock").exists():
        return False
    try:
        with durable.exclusive_lock(path):
            return False
    except BlockingIOError:
        return True


def timestamp() -> str:
    """Return the time of now for a file, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _owner() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": timestamp(), "id": secrets.token_hex(8)}


def _busy(setting: str, value: Any, text: str | bytes) -> Fault:
    """Return the fault that names the owner of a lease."""
    try:
        owner = json.loads(text)
        by = f"process {owner['pid']} on {owner['host']} has been writing this output since {owner['since']}"
    except (ValueError, KeyError, TypeError):  # the owner has just begun
        by = "another process is writing this output"
    return Fault(setting, value, by, "wait for it, or stop it")


class _StoreLease:
    """A lease in an object store."""

    def __init__(self, folder: Folder, name: str, setting: str, value: Any) -> None:
        self._folder, self._name, self._setting, self._value = folder, name, setting, value
        self._owner = _owner() | {"seconds": SECONDS}
        self._renewals = 0
        self._version: Version | None = None
        self._renewing = threading.Lock()

    def _body(self) -> bytes:
        """The lease's next content. The count makes each content, and with it the object's tag, another one."""
        self._renewals += 1
        return json.dumps(self._owner | {"renewals": self._renewals}).encode()

    def acquire(self) -> None:
        """Create the lease, or take over that of a dead process.

        Raises:
            InputError: another process holds the lease, and has renewed it.
        """
        first: Version | None = None
        deadline = 0.0
        while (version := self._folder.put(self._name, self._body())) is None:
            if (lease := self._folder.read_versioned(self._name)) is None:
                continue  # just released
            text, held = lease
            if first is None:
                first, left = held, self._seconds_left(text, held)
                deadline = time.monotonic() + left
                if left > 0:
                    wait = f"this run goes on in at most {left:.0f} s if that process is dead"
                    say(str(replace(_busy(self._setting, self._value, text), remedy=wait)))
            elif held != first:
                raise InputError(_busy(self._setting, self._value, text))
            if time.monotonic() < deadline:
                time.sleep(min(_POLL_S, SECONDS / 10))
            elif (version := self._folder.put(self._name, self._body(), held)) is not None:
                break
        self._version = version

    def _seconds_left(self, text: bytes, held: Version) -> float:
        """Return the time until a lease expires, by the store's clock."""
        probe = f"{self._name}.{secrets.token_hex(4)}"
        self._folder.put(probe, b"")
        _, written = self._folder.read_versioned(probe) or (None, held)
        self._folder.delete(probe)
        age = (written.written or 0.0) - (held.written or 0.0)
        return float(json.loads(text)["seconds"]) + _ROUNDING_S - age

    def renew(self) -> None:
        """Renew the lease. A late renewal is valid too: it succeeds only if no other process has taken the lease over.

        Raises:
            InputError: another process has taken the lease over.
        """
        with self._renewing:
            if self._version is not None:
                self._version = self._folder.put(self._name, self._body(), self._version) or self._own()
            if self._version is None:
                fault = f"another process took the lease over, which this one could not renew for {SECONDS:g} s"
                remedy = "nothing is published; wait for the other process, then run again"
                raise InputError.of(self._setting, self._value, fault, remedy)

    def _own(self) -> Version | None:
        """Return the version in the store if it is of this process: a renewal that was given up may arrive later."""
        text, version = self._folder.read_versioned(self._name) or (b"{}", None)
        return version if json.loads(text).get("id") == self._owner["id"] else None

    def keep(self, ended: threading.Event) -> None:
        """Renew the lease until the event is set."""
        while not ended.wait(SECONDS / 3):
            try:
                self.renew()
            except InputError as error:  # lost: the check before publishing raises this again
                say(str(error))
                return
            except (OSError, ArrowException, BaseError):
                continue  # the store does not answer; the lease may still be ours when it does

    def release(self) -> None:
        """Delete the lease if it is still ours. A lease that cannot be deleted expires."""
        with contextlib.suppress(OSError, ArrowException, BaseError, InputError):
            self.renew()  # no other process can take it over between this and the deletion
            self._folder.delete(self._name)
