"""Places: files and directories of this machine or of an object store, which are read alike."""

import contextlib
import glob
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import pyarrow

from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder, convert_errors, is_uri, room

_BLOCK = 1 << 20

Place = Path | Folder
"""A file or directory of this machine, or of an object store. `/`, `name`, `suffix` and `is_file` work for both."""


def open_binary(file: Place) -> Any:
    """Open a file for reading at any position, in place: a pyarrow file."""
    if isinstance(file, Path):
        return pyarrow.OSFile(str(file))
    system, path = file.file_system()
    return system.open_input_file(path)


def read_binary(file: Place) -> bytes:
    """Read a whole file; FileNotFoundError if it does not exist."""
    with open_binary(file) as stream:
        return bytes(stream.read())


def read_text(file: Place) -> str | None:
    """Read the text of a whole file, without its byte order mark; None if it does not exist."""
    try:
        return read_binary(file).decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_json(file: Place) -> Any:
    """Read a small JSON file; None if it does not exist."""
    text = read_text(file)
    return None if text is None else json.loads(text)


def write_json(file: Place, value: Any, shared: bool = False) -> None:
    """Replace a small JSON file, atomically; `shared` as for `durable.replacing`."""
    if isinstance(file, Folder):
        file.parent.write(file.name, json.dumps(value))
        return
    with delivering(file) as path:
        durable.replace_json(path, value, shared)


def delete(file: Place) -> None:
    """Delete a file; it need not exist."""
    with contextlib.suppress(FileNotFoundError):
        file.parent.delete(file.name) if isinstance(file, Folder) else file.unlink()


def listing(place: Place) -> dict[str, int]:
    """Return the size of every file below a directory, by relative name; of a file its own size, with the name ""."""
    if isinstance(place, Folder):
        return {name: entry.size for name, entry in place.entries().items()}
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    return {"" if file == place else file.relative_to(place).as_posix(): file.stat().st_size for file in files}


def expanded(place: Place) -> list[Place]:
    """List the visible files of a place: the file itself, those below a directory, or those that match a glob, sorted."""
    if not has_pattern(place):
        if place.is_file():
            return [place]
        return [place / str(name) for name in sorted(map(PurePosixPath, listing(place))) if not hidden(name)]
    if isinstance(place, Path):
        return [file for found in sorted(glob.glob(str(place), recursive=True)) for file in expanded(Path(found))]
    root = place
    while has_pattern(root):
        root = root.parent
    return [file for file in expanded(root) if matches(str(file), str(place))]


def has_pattern(place: Place) -> bool:
    """Whether a place is a glob, such as `DIR/*.jsonl`, and no file or directory has this name."""
    return any(sign in str(place) for sign in "*?[") and not place.exists()


def matches(name: str, pattern: str) -> bool:
    """Whether a path matches a glob. `*` stays within a folder, `**` crosses folders."""
    if "**" in pattern:
        return fnmatchcase(name, pattern) or fnmatchcase(name, pattern.replace("**/", ""))
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def hidden(path: PurePath) -> bool:
    """Whether a file or one of its directories begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


@contextmanager
def delivering(place: Place) -> Iterator[Path]:
    """Give a path of this machine for a new file or directory, which is at `place` when the block ends.

    In a local directory the block writes in place: with `durable.replacing`, so that a file appears whole.
    """
    if isinstance(place, Path):
        if not place.parent.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            durable.sync_directory(place.parent.parent)
        yield place
        return
    with room("delivery") as directory:
        yield directory / place.name
        for name in listing(directory / place.name):
            target = place / name
            target.parent.upload(directory / place.name / name, target.name)


def clear(place: Place) -> None:
    """Delete all files below a directory; it need not exist."""
    if isinstance(place, Folder):
        place.clear()
    else:
        shutil.rmtree(place, ignore_errors=True)


def place_of(value: str) -> Place:
    """Return the path or the folder that `address` named."""
    base, _, query = value.partition("?")
    return Folder(base.rstrip("/"), query) if is_uri(value) else Path(value)


def address(place: Place) -> str:
    """Return the path or the URI of a place, for another process."""
    return place.uri if isinstance(place, Folder) else str(place)


def errors_at(place: Place, setting: str) -> AbstractContextManager[None]:
    """Convert errors of the block as `convert_errors`, if the place is in an object store."""
    return convert_errors(place.base, setting) if isinstance(place, Folder) else nullcontext()


def fingerprint_files(files: list[Path], relative_to: Path) -> str:
    """Hash the relative names and the bytes of files: the first 16 hex digits of SHA-256."""
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(relative_to).as_posix() if file != relative_to else ""
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()[:16]
