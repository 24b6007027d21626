"""Outputs of steps: a directory that is either published whole or not there.

A step's output lives at `OUTPUT/<identity>`, where the identity is a hash of the stage, its settings and the contents
of its inputs. Same inputs and settings: same path, nothing to do. The directory is written beside its final name and
renamed when its `manifest.json` is on disk, so nothing half-written is ever read as whole. `OUTPUT/latest` names the
newest published output; `resolve` follows it, so `OUTPUT` itself can be given wherever an input is expected.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from infembed_ray import __version__
from infembed_ray.config import Settings
from infembed_ray.errors import InputError

MANIFEST = "manifest.json"
LATEST = "latest"
STATES = "states"
_HISTORY = (MANIFEST, STATES)
_HASH_BLOCK = 1 << 20


def local_path(value: str, name: str) -> Path:
    """`value` as an absolute path of this machine: workers have other working directories. `name` is its setting.

    Raises:
        InputError: it is an object-store URI. A cluster shares outputs over a mounted file system for now.
    """
    if "://" in value and not value.startswith("file://"):
        raise InputError(f"{name}={value}: object stores are not supported yet; mount it, or give a shared directory")
    return Path(value.removeprefix("file://")).expanduser().absolute()


def existing(value: str, name: str) -> Path:
    """The file or directory a setting names, with `latest` followed; InputError if it is not there."""
    path = local_path(value, name)
    if not path.exists():
        raise InputError(f"{name}={value}: no such file or directory")
    return resolve(path)


def resolve(path: Path) -> Path:
    """The published output a directory stands for: itself, or the one its `latest` names."""
    pointer = path / LATEST
    if path.is_dir() and not (path / MANIFEST).exists() and pointer.is_file():
        return path / pointer.read_text(encoding="utf-8").strip()
    return path


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
    manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return manifest


@dataclass(frozen=True)
class Published:
    """A finished output: where it is and what its manifest says."""

    path: Path
    manifest: Mapping[str, Any]
    fresh: bool
    """True if this run made it, False if it was there already."""

    @property
    def account(self) -> str:
        """Where the output is and, if this run did nothing, why: one or two lines for the person who started it."""
        if self.fresh:
            return str(self.path)
        made = self.manifest["created"]
        return f"nothing to do: same inputs and settings, output finished on {made}\n{self.path}"


@dataclass
class Staging:
    """An output being written. The caller fills `path`, `counts` and `facts`; `Step.publish` does the rest."""

    path: Path
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
    """

    def __init__(
        self,
        stage: str,
        settings: Settings,
        output: str,
        inputs: Mapping[str, Path],
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.stage = stage
        self.root = local_path(output, "output")
        self._settings = settings
        self._inputs = {name: {"path": str(path), "fingerprint": fingerprint(path)} for name, path in inputs.items()}
        self._inputs |= {name: {"path": value, "fingerprint": value} for name, value in (names or {}).items()}
        contents = {name: value["fingerprint"] for name, value in sorted(self._inputs.items())}
        decides = {"stage": stage, "settings": settings.identity(), "inputs": contents}
        self.identity = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
        self.path = self.root / self.identity
        require_writable(self.root, "output")

    def finished(self) -> Published | None:
        """The output, if an earlier run published it; `latest` then names it again."""
        if not (self.path / MANIFEST).is_file():
            return None
        self._point()
        return Published(self.path, read_manifest(self.path, "output"), fresh=False)

    @contextlib.contextmanager
    def publish(self) -> Iterator[Staging]:
        """Write the output in the block's directory; it is published when the block ends without an exception.

        The directory of an interrupted run with the same identity is handed over as it is, so that a stage can
        resume from what it left there. Two runs of the same identity exclude each other by a lock.
        """
        partial = self.root / f".{self.identity}.partial"
        with self._lock():
            if (self.path / MANIFEST).is_file():
                raise InputError(
                    f"output={self.root}: another run has just finished this very output; run again to use it"
                )
            partial.mkdir(exist_ok=True)
            staging = Staging(partial)
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
            partial.rename(self.path)
            self._point()

    def published(self) -> Published:
        """What `publish` just made."""
        return Published(self.path, read_manifest(self.path, "output"), fresh=True)

    def _point(self) -> None:
        partial = self.root / f"{LATEST}.partial"
        partial.write_text(self.identity + "\n", encoding="utf-8")
        partial.replace(self.root / LATEST)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.root / f".{self.identity}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(f"output={self.root}: another run is writing this very output; wait for it") from error
            yield
        # The file stays: a lock that is removed can be held twice, once on the old file and once on a new one.


def require_writable(root: Path, name: str) -> None:
    """Make the directory that the setting `name` gives; InputError if nothing can be written there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{name}={root}: cannot be written ({error.strerror}); choose a writable directory") from error
