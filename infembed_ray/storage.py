"""Outputs of steps: a directory that is either published whole or not there.

A step's output lives at `OUTPUT/<identity>`, where the identity is a hash of the stage, its settings and the contents
of its inputs. Same inputs and settings: same path, nothing to do. The directory is written beside its final name and
renamed when its `manifest.json` is on disk, so nothing half-written is ever read as whole. `OUTPUT/latest` names the
newest published output; `resolve` follows it, so `OUTPUT` itself can be given wherever an input is expected.

In an object store nothing can be renamed. An output there is written in a scratch directory of this machine
(`object_store.scratch`) and then uploaded to `OUTPUT/<identity>`, `manifest.json` last, and `latest` after it: what has no
manifest is not whole. Inputs are downloaded to the scratch directory once, and again when they change.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from infembed_ray import __version__
from infembed_ray.config import Settings
from infembed_ray.errors import InputError
from infembed_ray.object_store import Folder, digest, is_uri, scratch, told

MANIFEST = "manifest.json"
LATEST = "latest"
STATES = "states"
_HISTORY = (MANIFEST, STATES)
_HASH_BLOCK = 1 << 20


def local_path(value: str, name: str) -> Path:
    """`value` as an absolute path of this machine: workers have other working directories. `name` is its setting.

    Raises:
        InputError: it is the URI of an object store, which this setting does not take.
    """
    if "://" in value and not value.startswith("file://"):
        known = "" if is_uri(value) else "; schemes of object stores are s3, gs and abfs"
        raise InputError(f"{name}={value}: must be a path of this machine; mount it, or give a shared directory{known}")
    return Path(value.removeprefix("file://")).expanduser().absolute()


def existing(value: str, name: str, parts: Collection[str] | None = None) -> Path:
    """The file or directory a setting names, with `latest` followed; of an object store, a copy on this machine.

    Args:
        value: of the setting.
        name: of the setting.
        parts: names in a directory of an object store; only these files and folders are copied. None: all.

    Raises:
        InputError: it is not there, or the object store does not give it.
    """
    if is_uri(value):
        return _downloaded(value, name, parts)
    path = local_path(value, name)
    if not path.exists():
        raise InputError(f"{name}={value}: no such file or directory")
    return resolve(path)


def located(uri: str, name: str) -> Folder:
    """The place in an object store that a setting names, with `latest` followed.

    Raises:
        InputError: the object store does not give it.
    """
    place = Folder.of(uri, name)
    with told(place.base, name):
        if place.read(MANIFEST) is None and (newest := place.read(LATEST)):
            place = place / newest.strip()
    return place


def _downloaded(uri: str, name: str, parts: Collection[str] | None) -> Path:
    """A copy of what is at `uri` now, below a directory that is named by its content."""
    place = located(uri, name)
    with told(place.base, name):
        entries = {file: entry for file, entry in place.entries().items() if file.split("/")[0] != STATES}
        if not entries:
            raise InputError(f"{name}={place}: no such object, and none below it")
        root = scratch() / "inputs" / hashlib.sha256(f"{place.uri}\0{digest(entries)}".encode()).hexdigest()[:16]
        root.mkdir(parents=True, exist_ok=True)
        copy = root / place.name
        with (root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
            for file, entry in entries.items():
                if parts is not None and file.split("/")[0] not in parts:
                    continue
                target = copy / file if file else copy
                if not target.is_file() or target.stat().st_size != entry.size:
                    place.download(file, target)
    return copy


def resolve(path: Path) -> Path:
    """The published output a directory stands for: itself, or the one its `latest` names."""
    pointer = path / LATEST
    if path.is_dir() and not (path / MANIFEST).exists() and pointer.is_file():
        return path / pointer.read_text(encoding="utf-8").strip()
    return path


def point(root: Path, identity: str) -> None:
    """Let `latest` of an output directory name one of its outputs, in one piece."""
    partial = root / f"{LATEST}.{secrets.token_hex(4)}.partial"
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(identity + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(root / LATEST)


def fingerprint(path: Path) -> str:
    """SHA-256 (first 16 hex digits) of a file's bytes, or of the names and bytes of a directory's files.

    Of a published output, what tells how it came about is left out: its manifest, the states a training resumes from.
    """
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.relative_to(path).parts[0] not in _HISTORY)
    else:
        files = [path]
    return fingerprint_files(files, relative_to=path)


def fingerprint_files(files: list[Path], relative_to: Path) -> str:
    """SHA-256 (first 16 hex digits) over the names (relative) and bytes of some files."""
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(relative_to).as_posix() if file != relative_to else ""
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(_HASH_BLOCK):
                digest.update(block)
    return digest.hexdigest()[:16]


def write_json(path: Path, value: Any) -> None:
    """Write JSON durably and in one piece: a reader sees the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2, ensure_ascii=False, sort_keys=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def read_manifest(path: Path, name: str) -> dict[str, Any]:
    """The manifest of a published output; InputError if the directory is no published output."""
    file = path / MANIFEST
    if not file.is_file():
        raise InputError(f"{name}={path}: not a published output (no {MANIFEST}); give the output of a finished step")
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise InputError(
            f"{name}={path}: {MANIFEST} is damaged ({error}); restore it, or delete this directory and make it again"
        ) from error
    return manifest


@dataclass(frozen=True)
class Published:
    """A finished output: where it is and what its manifest says.

    Attributes:
        path: on this machine. Of an output in an object store that an earlier run made, it may not be there; `existing`
            brings it.
        manifest: its own.
        fresh: True if this run made it, False if it was there already.
        uri: in the object store, if it is in one.
    """

    path: Path
    manifest: Mapping[str, Any]
    fresh: bool
    uri: str | None = None

    @property
    def account(self) -> str:
        """Where the output is and, if this run did nothing, why: one or two lines for the person who started it."""
        place = self.uri or str(self.path)
        if self.fresh:
            return place
        made = self.manifest["created"]
        return f"nothing to do: same inputs and settings, output finished on {made}\n{place}"


@dataclass
class Staging:
    """An output being written. The caller fills `path`, `counts` and `facts`; `Step.publish` does the rest."""

    path: Path
    remote: Folder | None = None
    """Where it is going, if that is an object store."""
    counts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """What else the manifest should say (cost, figures, the encoder's fingerprint)."""


class Step:
    """One run of a stage with given settings on given inputs.

    Args:
        stage: the verb, for example `train`.
        settings: the stage's settings; `settings.identity()` decides the path.
        output: the directory under which outputs of this stage are published.
        inputs: input name -> path. Their contents decide the path, not their names.
        names: input name -> identity, for inputs that are no path of this machine (hub names).
        uris: may `output` be in an object store? Where all that is written is written by the caller of `publish`.

    Attributes:
        contents: input name -> what its content is known by.
    """

    def __init__(
        self,
        stage: str,
        settings: Settings,
        output: str,
        inputs: Mapping[str, Path],
        names: Mapping[str, str] | None = None,
        uris: bool = False,
    ) -> None:
        self.stage = stage
        remote = Folder.of(output, "output") if uris and is_uri(output) else None
        self.root = local_path(output, "output") if remote is None else _scratch_of(remote)
        self._settings = settings
        self._inputs = {name: {"path": str(path), "fingerprint": fingerprint(path)} for name, path in inputs.items()}
        self._inputs |= {name: {"path": value, "fingerprint": value} for name, value in (names or {}).items()}
        self.contents = {name: value["fingerprint"] for name, value in sorted(self._inputs.items())}
        decides = {"stage": stage, "settings": settings.identity(), "inputs": self.contents}
        self.identity = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
        self.path = self.root / self.identity
        require_writable(self.root, "output")
        self._remote_root = remote
        self.remote = None if remote is None else remote / self.identity
        self._uri = None if self.remote is None else self.remote.base
        if remote is not None:
            with told(remote.base, "output"):
                probe = f".probe-{secrets.token_hex(4)}"  # another machine may be at it
                remote.write(probe, "")
                remote.delete(probe)

    def finished(self) -> Published | None:
        """The output, if an earlier run published it; `latest` then names it again."""
        if self.remote is None:
            manifest = read_manifest(self.path, "output") if (self.path / MANIFEST).is_file() else None
        else:
            with told(self.remote.base, "output"):
                text = self.remote.read(MANIFEST)
            manifest = None if text is None else json.loads(text)
        if manifest is None:
            return None
        self._point()
        return Published(self.path, manifest, fresh=False, uri=self._uri)

    @contextlib.contextmanager
    def publish(self) -> Iterator[Staging]:
        """Write the output in the block's directory; it is published when the block ends without an exception.

        The directory of an interrupted run with the same identity is handed over as it is, so that a stage can
        resume from what it left there. Two runs of the same identity exclude each other by a lock; in an object store
        only if they are started on the same machine, because it has no locks.
        """
        partial = self.root / f".{self.identity}.partial"
        with self._lock():
            if self.remote is not None:
                shutil.rmtree(self.path, ignore_errors=True)  # a copy; the store says whether it is finished
            elif (self.path / MANIFEST).is_file():
                raise InputError(
                    f"output={self.root}: another run has just finished this very output; run again to use it"
                )
            partial.mkdir(exist_ok=True)
            staging = Staging(partial, self.remote)
            start = time.monotonic()
            yield staging
            manifest = {
                "stage": self.stage,
                "identity": self.identity,
                "code_version": __version__,
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - start, 3),
                "inputs": self._inputs,
                "settings": self._settings.model_dump(mode="json"),
                "counts": staging.counts,
                **staging.facts,
            }
            write_json(partial / MANIFEST, manifest)
            if self.remote is not None:
                with told(self.remote.base, "output"):
                    _upload(partial, self.remote)
            partial.rename(self.path)
            self._point()

    def published(self) -> Published:
        """What `publish` just made."""
        return Published(self.path, read_manifest(self.path, "output"), fresh=True, uri=self._uri)

    def _point(self) -> None:
        if self._remote_root is not None:
            with told(self._remote_root.base, "output"):
                self._remote_root.write(LATEST, self.identity + "\n")
            return
        point(self.root, self.identity)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.root / f".{self.identity}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(f"output={self.root}: another run is writing this very output; wait for it") from error
            yield
        # The file stays: a lock that is removed can be held twice, once on the old file and once on a new one.


def _scratch_of(remote: Folder) -> Path:
    """Where outputs that go to an object store are written on this machine."""
    return scratch() / "outputs" / hashlib.sha256(remote.uri.encode()).hexdigest()[:16]


def _upload(directory: Path, remote: Folder) -> None:
    """Upload an output, its manifest last. States have their own way there."""
    files = {file.relative_to(directory).as_posix(): file for file in output_files(directory)}
    for name, file in files.items():
        if name != MANIFEST:
            remote.upload(file, name)
    for name in remote.entries():  # of an attempt before
        if name not in files and name.split("/")[0] != STATES:
            remote.delete(name)
    remote.upload(directory / MANIFEST, MANIFEST)


def output_files(directory: Path) -> list[Path]:
    """The files of an output but its states and what is half-written."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".partial")
    return sorted(path for path in files if path.relative_to(directory).parts[0] != STATES)


def require_writable(root: Path, name: str) -> None:
    """Make the directory that the setting `name` gives; InputError if nothing can be written there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{secrets.token_hex(4)}"  # another machine may be at it
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{name}={root}: cannot be written ({error.strerror}); choose a writable directory") from error
