"""Outputs of steps: directories `OUTPUT/<identity>`, published atomically and found again by the hash of inputs and settings.

A directory is renamed once its `manifest.json` is on disk. In an object store, which cannot rename, `manifest.json` is created
last, conditionally, and `OUTPUT/latest` is replaced after it: an output without a manifest is incomplete.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from infembed_ray import __version__, telemetry
from infembed_ray.config.base import Kind, Settings, with_texts
from infembed_ray.errors import InputError, check_all, in_one_line
from infembed_ray.progress import say
from infembed_ray.redaction import masked
from infembed_ray.storage import durable, places, provenance
from infembed_ray.storage.leases import lease, timestamp
from infembed_ray.storage.object_store import SCRATCH, Entry, Folder, convert_errors, is_uri, listing_digest, scratch
from infembed_ray.storage.places import Place, errors_at, expanded, has_pattern

MANIFEST = "manifest.json"
LATEST = "latest"
STATES = "states"
GIB = 2**30
STATE_SUFFIX = ".state.json"
"""Ending of the file with the state of an unfinished run."""
UPDATE_S = 10.0
"""Least time between two updates of the progress in a state."""
_HISTORY = (MANIFEST, STATES)
_HUB_NAME = re.compile(r"[\w-]+/[\w-]+")
_JOB_COPY = "runtime_resources"
"""Folder in which Ray keeps the copies of jobs' working directories; it deletes them."""
_PACKAGE = Path(__file__).parents[1]
_ORIGIN = ".uri"
"""File beside a copy of an input, with the URI that it was copied from."""


def open_place(value: str, name: str) -> Place:
    """Open the folder of an object store, or the directory, that the setting `name` names.

    The path is absolute: workers have other working directories.

    Raises:
        InputError: as `Folder.open`, or the value is a URI with another scheme.
    """
    if is_uri(value):
        return Folder.open(value, name)
    if "://" in value and not value.startswith("file://"):
        remedy = "mount it, or give a shared directory; schemes of object stores are s3, gs and abfs"
        raise InputError.of(name, value, "must be a path of this machine", remedy)
    return Path(value.removeprefix("file://")).expanduser().absolute()


def folder_of(settings: Any, name: str) -> Place:
    """Return the place that the setting `name` names, or if it is empty, the folder of this name in the output."""
    given = getattr(settings, name)
    return open_place(given, name) if given else open_place(settings.output, "output") / name


def find_input(value: str, name: str) -> Place:
    """Return the place of an input, without a copy: follow `latest`.

    Raises:
        InputError: there is no such input, no file matches the glob, or the object store does not return it.
    """
    place = open_place(value, name)
    with errors_at(place, name):
        place = resolve(place)
        if place.exists() or (has_pattern(place) and expanded(place)):
            return place
    if isinstance(place, Folder):
        raise InputError.of(name, place, "no object has this name or begins with it", "check the path")
    remedy = ""
    if _JOB_COPY in place.parts:
        left_out = "the upload of the job's working directory leaves out what .gitignore names"
        remedy = f"{left_out}; give an absolute path or a URI"
    elif _HUB_NAME.fullmatch(value):
        remedy = f"for a data set of the hub run `hf download {value} --repo-type dataset --local-dir DIR` and give DIR"
    raise InputError.of(name, value, "no such file or directory", remedy)


def resolve_input(value: str, name: str, without: Callable[[str], bool] | None = None) -> Path:
    """Return the local path of an input: follow `latest`, and download from an object store.

    Args:
        without: whether to leave out a file, by its name in the directory.

    Raises:
        InputError: there is no such input, or the object store does not return it.
    """
    place = find_input(value, name)
    return place if isinstance(place, Path) else _download(place, name, without)


def _download(folder: Folder, name: str, without: Callable[[str], bool] | None) -> Path:
    """Download an input to a directory whose name depends on its content, except what is already there."""
    with convert_errors(folder.base, name):
        entries = {file: entry for file, entry in folder.entries().items() if file.split("/")[0] != STATES}
        root = scratch() / "inputs" / _hashed(f"{folder.uri}\0{listing_digest(entries)}")
        root.mkdir(parents=True, exist_ok=True)
        (root / _ORIGIN).write_text(folder.uri, encoding="utf-8")
        copy = root / folder.name
        with durable.exclusive_lock(root / "lock", wait=True):
            for file, entry in entries.items():
                target = copy / file if file else copy
                if (without and without(file)) or (target.is_file() and target.stat().st_size == entry.size):
                    continue
                folder.download(file, target)
                if (size := target.stat().st_size) != entry.size:
                    remedy = "run again, or restore it"
                    raise InputError.of(name, f"{folder}/{file}", f"has {size} of {entry.size} bytes", remedy)
    return copy


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def resolve(place: Place) -> Place:
    """Return the output that `latest` of a directory or folder names, or the place itself."""
    return place if (place / MANIFEST).is_file() else place / newest(place)


def newest(place: Place) -> str:
    """Return the identity of the output that `latest` of a directory or folder names; empty if there is none."""
    return (places.read_text(place / LATEST) or "").strip() if (place / LATEST).is_file() else ""


def set_latest(root: Place, identity: str) -> None:
    """Let `latest` of a directory or folder name one of its outputs, atomically."""
    opened = root.open_output(LATEST) if isinstance(root, Folder) else durable.replacing(root / LATEST, shared=True)
    with opened as stream:
        stream.write(f"{identity}\n".encode())


def fingerprint(path: Place) -> str:
    """Hash a file, or the names and bytes of a directory's files: the first 16 hex digits of SHA-256.

    The manifest and the training states of a published output are left out: they do not belong to the result. What is in
    an object store is not read: sizes and times of the objects stand for their bytes.
    """
    if has_pattern(path):
        return _hashed("\0".join(f"{file.name}\0{fingerprint(file)}" for file in expanded(path)))
    if isinstance(path, Folder):
        return listing_digest({name: e for name, e in path.entries().items() if name.split("/")[0] not in _HISTORY})
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.relative_to(path).parts[0] not in _HISTORY)
    else:
        files = [path]
    return places.fingerprint_files(files, relative_to=path)


def read_manifest(path: Place, name: str) -> dict[str, Any]:
    """Read the manifest of a published output that the setting `name` names, on this machine or in an object store.

    Raises:
        InputError: the directory is not a published output, or its manifest is damaged.
    """
    with errors_at(path, name):
        text = places.read_text(path / MANIFEST)
    if text is None:
        raise InputError.of(name, path, f"not a published output (no {MANIFEST})", "give the output of a finished step")
    try:
        manifest: dict[str, Any] = json.loads(text)
        if not isinstance(manifest, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        remedy = "restore it, or delete this directory and run the step again"
        raise InputError.of(name, path, f"{MANIFEST} is damaged ({error})", remedy) from error
    return manifest


@contextlib.contextmanager
def recorded(place: Place, stage: str, run: str) -> Iterator[None]:
    """Name this run in figures and log lines, and record its state while the block runs.

    `OUTPUT/.<identity>.state.json` holds the command, the newest line of progress, and the error that ended the run, for
    `infembed runs`; a finished run deletes it. A state that cannot be written is left out: the run matters more.

    Args:
        place: of the outputs of the stage.
        run: identity of the output.
    """
    file = place / f".{run}{STATE_SUFFIX}"
    program = sys.argv[0]
    words = ["python", program] if program.endswith(".py") else [Path(program).name]
    state: dict[str, Any] = {
        "stage": stage,
        "run": run,
        "command": masked(shlex.join([*words, *sys.argv[1:]])),
        "host": socket.gethostname(),
    }
    state |= {"pid": os.getpid(), "began": timestamp(), "updated": timestamp(), "progress": "", "error": None}
    written = time.monotonic()

    def write(**changes: str) -> None:
        nonlocal written
        written = time.monotonic()
        state.update(changes, updated=timestamp())
        with contextlib.suppress(Exception):  # stores raise errors of three libraries
            places.write_json(file, state)

    def progress(line: str) -> None:
        state["progress"] = masked(line)
        if time.monotonic() - written >= UPDATE_S:
            write()

    write()
    with telemetry.running(stage, run, progress):
        try:
            yield
        except BaseException as error:
            write(error=in_one_line(error, stage))
            raise
    with contextlib.suppress(Exception):
        places.delete(file)


@contextlib.contextmanager
def alone(place: Place, stage: str) -> Iterator[Callable[[], None]]:
    """Record the state of a stage that runs others, and hold its lease, by which `infembed runs` knows that it is alive.

    Yields:
        A function that ends both before the block ends.

    Raises:
        InputError: another process runs this stage with this output.
    """
    require_access(place, "output")
    with contextlib.ExitStack() as held:
        with errors_at(place, "output"):
            held.enter_context(lease(place, stage, "output", place))
        held.enter_context(recorded(place, stage, stage))
        yield held.close


@dataclass(frozen=True)
class Published:
    """A finished output.

    Attributes:
        path: on this machine. Of an output in an object store, it has at most what the driver wrote, and nothing if an earlier
            run made it. The weights of a training and the shards of an index are only at `address`.
        manifest: the content of its `manifest.json`.
        fresh: whether this run made it.
        uri: in the object store with its query, if it is in one.
        gates: `off`, the gates that the settings switch off, and `figures`, what the others compared.
    """

    path: Path
    manifest: Mapping[str, Any]
    fresh: bool
    uri: str | None = None
    gates: Mapping[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The URI, or else the path: where all of the output is. Settings and readers take it as an input."""
        return self.uri or str(self.path)

    @property
    def summary(self) -> str:
        """Where the output is and, if this run did nothing, why and whether other code made it: a few lines."""
        if self.fresh:
            return self.address
        done = f"nothing to do: same inputs and settings, output finished on {self.manifest['created']}"
        return "\n".join([done, *provenance.warnings(self.manifest), self.address])


@dataclass
class Staging:
    """An output in progress. The caller fills `path`, `counts` and `facts`."""

    path: Path
    remote: Folder | None = None
    """Its final place, if that is in an object store. Files that workers write there during the run stay."""
    resumed: set[str] = field(default_factory=lambda: {STATES})
    """Top-level names below `remote` whose files of an interrupted attempt stay, because the stage resumes from them."""
    counts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Other entries of the manifest, such as cost, metrics or the encoder's fingerprint."""


class Step:
    """One run of a stage with given settings on given inputs.

    Args:
        stage: the verb, for example `train`.
        settings: of the stage; `settings.identity()` is part of the step's identity.
        output: the directory, or the URI of the folder in an object store, under which the stage's outputs are published.
        inputs: input name -> path. The contents are part of the identity, the paths are not.
        names: input name -> identity, for inputs that are not files of this machine (hub names).

    Attributes:
        contents: input name -> fingerprint of its content.
        place: of all outputs: the directory, or the folder in an object store.

    Raises:
        InputError: `output` cannot be written.
    """

    def __init__(
        self,
        stage: str,
        settings: Settings,
        output: str,
        inputs: Mapping[str, Place],
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.stage, self._settings = stage, settings
        self.place = place = open_place(output, "output")
        require_access(place, "output")
        self._inputs = {
            name: {"path": _origin(path), "fingerprint": fingerprint(path)} for name, path in inputs.items()
        }
        self._inputs |= {name: {"path": value, "fingerprint": value} for name, value in (names or {}).items()}
        self.contents = {name: value["fingerprint"] for name, value in sorted(self._inputs.items())}
        decides = {"stage": stage, "settings": settings.identity(), "inputs": self.contents}
        self.identity = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
        self.remote = place / self.identity if isinstance(place, Folder) else None
        self.root = scratch() / "outputs" / _hashed(place.uri) if isinstance(place, Folder) else place
        self.path = self.root / self.identity

    @property
    def partial(self) -> Path:
        """Directory of this machine in which a run writes; an interrupted one leaves it."""
        return self.root / f".{self.identity}.partial"

    def finished(self) -> Published | None:
        """Return the output if an earlier run published it, and let `latest` name it again; else make its place.

        Raises:
            InputError: the place cannot be written.
        """
        done = self.found()
        if done:
            self.become_latest()
        else:
            for root in {self.root, self.place}:
                require_writable(root, "output")
        return done

    def become_latest(self) -> None:
        """Let `latest` name this output, which is published."""
        with errors_at(self.place, "output"):
            set_latest(self.place, self.identity)

    def found(self) -> Published | None:
        """Return the output if an earlier run published it; change nothing."""
        place = self.remote or self.path
        with errors_at(self.place, "output"):
            if not (place / MANIFEST).is_file():
                return None
        return self._published(place, fresh=False)

    @contextlib.contextmanager
    def publish(self, latest: bool = True) -> Iterator[Staging]:
        """Publish what the block writes to `Staging.path`, if it ends without an exception.

        An interrupted run with the same identity leaves its directory, from which the stage can resume. A lease keeps two
        runs of one identity apart. Should it fail to, because the store did not answer for long, only one run creates the
        manifest; the other one publishes nothing. Without `latest`, `become_latest` is left to the caller.

        Raises:
            InputError: another run writes this output, or has just published it; or the object store failed.
        """
        before: dict[str, Entry] = {}
        with contextlib.ExitStack() as held:
            # The directory of this machine has a lease of its own, also where the output is in an object store.
            still_held = held.enter_context(lease(self.root, self.identity, "output", self.place))
            if self.remote is not None:
                shutil.rmtree(self.path, ignore_errors=True)  # a copy; only the store knows whether it is finished
                with errors_at(self.place, "output"):
                    still_held = held.enter_context(lease(self.place, self.identity, "output", self.place))
                    before = self.remote.entries()
            held.enter_context(recorded(self.place, self.stage, self.identity))
            if self.found():
                fault = "another run has just finished this output"
                raise InputError.of("output", self.place, fault, "run again to use it")
            own = self.root / f".{self.identity}{STATE_SUFFIX}"
            others = [file for file in self.root.glob(f".*{STATE_SUFFIX}") if file != own]
            if others and not self.partial.exists():
                other = others[0].name.removesuffix(STATE_SUFFIX).strip(".")
                say(f"{self.stage}: starts from the beginning: the unfinished run {other} has other settings or inputs")
            staging = Staging(self.partial, self.remote)
            staging.path.mkdir(exist_ok=True)
            start = time.monotonic()
            yield staging
            durable.replace_json(staging.path / MANIFEST, self.manifest(staging, time.monotonic() - start))
            with errors_at(self.place, "output"):
                if self.remote is not None:
                    _upload(staging, self.remote, before, still_held)
                still_held()
                manifest = (staging.path / MANIFEST).read_bytes()
                if self.remote is not None and self.remote.put(MANIFEST, manifest) is None:
                    fault = "another run has published this output"
                    remedy = f"that of this run stays in {staging.path}. Run again to use the published one"
                    raise InputError.of("output", self.remote, fault, remedy)
                durable.publish_directory(staging.path, self.path)
                if latest:
                    set_latest(self.place, self.identity)

    def published(self) -> Published:
        """Return the output that `publish` made."""
        return self._published(self.path, fresh=True)

    def _published(self, place: Place, fresh: bool) -> Published:
        uri = None if self.remote is None else self.remote.uri
        return Published(self.path, read_manifest(place, "output"), fresh, uri)

    def manifest(self, staging: Staging, seconds: float) -> dict[str, Any]:
        """Return the manifest of an output."""
        return {
            "stage": self.stage,
            "identity": self.identity,
            "run": secrets.token_hex(8),  # no other writer has these bytes
            "code_version": __version__,
            "created": timestamp(),
            "seconds": round(seconds, 3),
            "inputs": self._inputs,
            "settings": self._settings.model_dump(mode="json"),
            "counts": staging.counts,
            "provenance": provenance.collect(),
            **staging.facts,
        }


def _upload(staging: Staging, remote: Folder, before: Mapping[str, Entry], still_held: Callable[[], None]) -> None:
    """Upload an output without its manifest, and delete what an interrupted attempt left besides.

    Args:
        before: what was there when the run began.
        still_held: check of the lease, without which another run may have published here.
    """
    files = {file.relative_to(staging.path).as_posix(): file for file in output_files(staging.path)}
    del files[MANIFEST]
    for name, file in files.items():
        still_held()
        remote.upload(file, name)
    for name, entry in remote.entries().items():
        if name not in files and before.get(name) == entry and name.split("/")[0] not in staging.resumed:
            still_held()
            remote.delete(name)


def _origin(path: Place) -> str:
    """Return the path of an input, or the URI that it is read or was copied from; that of a file of this package within the package."""
    if isinstance(path, Folder):
        return path.uri
    if path.is_relative_to(_PACKAGE):
        return path.relative_to(_PACKAGE.parent).as_posix()
    for root in path.parents:
        if (root / _ORIGIN).is_file():
            base, _, query = (root / _ORIGIN).read_text(encoding="utf-8").partition("?")
            return "/".join([base, *path.relative_to(root).parts[1:]]) + (f"?{query}" if query else "")
    return str(path)


def output_files(directory: Path) -> list[Path]:
    """List the files of an output without its training states and partial files."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".partial")
    return sorted(path for path in files if path.relative_to(directory).parts[0] != STATES)


def require_writable(root: Place, name: str) -> None:
    """Make the directory that the setting `name` names, and write and delete a file or an object there.

    Raises:
        InputError: that fails, or the store ignores conditions.
    """
    probe = root / f".probe-{secrets.token_hex(4)}"  # another machine may probe at the same time
    if isinstance(probe, Path):
        require_access(root, name)
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            fault = f"cannot be written ({error.strerror})"
            raise InputError.of(name, root, fault, "choose a writable directory") from error
        return
    with errors_at(root, name):
        folder = probe.parent
        first = folder.put(probe.name, b"1")
        ignored = folder.put(probe.name, b"2") is not None
        if first is not None and not ignored:
            folder.put(probe.name, b"3", first)
            ignored = folder.put(probe.name, b"4", first) is not None
        folder.delete(probe.name)
    if ignored:
        fault = "this store ignores conditional writes (If-None-Match, If-Match), which keep two runs apart"
        raise InputError.of(name, root, fault, "upgrade it, or give a directory")


def existing(path: Path) -> Path:
    """Return a path itself, or the nearest of its parents that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def require_access(root: Place, name: str) -> None:
    """Raise InputError if a directory cannot be made or written; write nothing. Only `require_writable` tests a store."""
    if isinstance(root, Folder):
        return
    if _JOB_COPY in root.parts:
        fault, remedy = "is in the job's working directory, a copy that Ray deletes", "give an absolute path or a URI"
        raise InputError.of(name, root, fault, remedy)
    place = existing(root)
    reason = "" if place.is_dir() else f"{place} is a file"
    if reason or not os.access(place, os.W_OK | os.X_OK):
        reason = reason or f"{place} is not writable"
        raise InputError.of(name, root, f"cannot be written ({reason})", "choose a writable directory")


def require_inputs(settings: Settings) -> None:
    """Check that the files and directories of this machine that settings name exist.

    Every stage checks its inputs thoroughly. This check comes first, because the stages import torch and Ray, which takes
    seconds, and up to a minute on a busy machine.

    Raises:
        InputError: some files or directories do not exist.
    """
    checks: list[Callable[[], Any]] = []

    def collect(name: str, kind: Kind, value: str) -> str:
        if "://" not in value and kind.names_path(value):
            checks.append(partial(resolve_input, value, name))
        return value

    with_texts(settings, collect)
    check_all(*checks)


def output_state(step: Step, *reused: Place) -> Generator[str, None, bool]:
    """Say in a dry run where the output will be, and whether it exists.

    Args:
        reused: what an interrupted run leaves besides `step.partial`.

    Returns:
        Whether an earlier run published it, so that nothing is left to check.
    """
    place = step.remote.base if step.remote else step.path
    if done := step.found():
        yield f"output {place}: finished on {done.manifest['created']}, so there is nothing to do"
    elif any(place.exists() for place in (step.partial, *reused)) or (step.remote and step.remote.exists()):
        yield f"output {place}: an interrupted run is there, and this run resumes it"
    else:
        yield f"output {place}: new"
    return done is not None


def require_space(step: Step, needed: float, *reused: Path, of_workers: bool = False) -> str:
    """Return how much disk a run needs besides what an interrupted one left; InputError if there is less.

    Args:
        of_workers: they write the output; if it is in an object store, to the disks of their own nodes.
    """
    if of_workers and step.remote is not None:
        return f"disk: about {gib(needed)} at most in {SCRATCH} of the node of a worker 0, less on other nodes"
    left = (file for place in (step.partial, *reused) for file in place.rglob("*") if file.is_file())
    more = max(0.0, needed - sum(file.stat().st_size for file in left))
    free = shutil.disk_usage(existing(step.root)).free
    if more > free:
        fault = f"the run needs about {gib(more)}, but {gib(free)} are free there"
        raise InputError.of("output", step.root, fault, "free some, or choose another disk")
    return f"disk: about {gib(more)} at most, {gib(free)} are free"


def gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size < 10 * GIB else f"{size / GIB:,.0f} GiB"
