"""A store of embeddings and scores, keyed by the texts that they were computed from, which tasks and runs share.

It is a directory that all nodes see, or a folder of an object store. Its files never change, and all of it can be deleted
at any time.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from infembed_ray.errors import InputError
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder, convert_errors
from infembed_ray.storage.places import Place, errors_at, read_binary

VERSION = 1
"""Raise it when the same model computes something else for the same text, for example after a fix of pooling."""
_CHECKSUM_BYTES = 16
_AHEAD = 8
"""Files that are read at the same time."""


class Store:
    """The arrays of one model, each a `.npy` file with a checksum at its end, which numpy ignores.

    Args:
        root: place of the stores of all models.
        identity: of the model; it changes with anything that changes the arrays.
    """

    def __init__(self, root: Place, identity: str) -> None:
        self.directory = root / hashlib.sha256(f"{VERSION}\0{identity}".encode()).hexdigest()[:16]

    def file(self, texts: Iterable[str | None]) -> Place:
        """Return the place for the array of these texts, in this order."""
        name = digest(texts)
        return self.directory / name[:2] / f"{name[2:]}.npy"

    @staticmethod
    def holds(file: Place, rows: int) -> bool:
        """Return whether an array is stored. An object of an object store is whole if it is there, and is not read."""
        if isinstance(file, Folder):
            with convert_errors(str(file), "embeddings"):
                return file.is_file()
        return Store.read(file, rows) is not None

    @staticmethod
    def read(file: Place, rows: int) -> np.ndarray | None:
        """Read an array, (rows, ...) float32; None if it is missing, damaged or not finite."""
        try:
            content = read_binary(file)
        except FileNotFoundError:
            return None
        content, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if _checksum(content) != checksum:
            return None
        array: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
        return array if len(array) == rows and np.isfinite(array).all() else None

    @staticmethod
    def read_all(files: Sequence[tuple[Place, int]]) -> Iterator[np.ndarray]:
        """Yield the arrays of (file, rows) in order; some files are read ahead.

        Raises:
            InputError: one is missing or damaged, or the object store failed.
        """
        with ThreadPoolExecutor(_AHEAD) as pool:
            reading: deque[Future[np.ndarray]] = deque()
            for file, rows in files:
                reading.append(pool.submit(_stored, file, rows))
                if len(reading) == _AHEAD:
                    yield reading.popleft().result()
            while reading:
                yield reading.popleft().result()

    @staticmethod
    def write(file: Place, array: np.ndarray) -> None:
        """Write an array atomically and durably; several nodes may write the same one."""
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(array, dtype=np.float32), allow_pickle=False)
        content = stream.getvalue()
        if isinstance(file, Folder):
            with convert_errors(str(file), "embeddings"), file.parent.open_output(file.name) as target:
                target.write(content + _checksum(content))
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with durable.replacing(file, shared=True) as target:
            target.write(content + _checksum(content))


def _stored(file: Place, rows: int) -> np.ndarray:
    with errors_at(file, "embeddings"):
        array = Store.read(file, rows)
    if array is None:
        raise InputError(f"embeddings={file}: missing or damaged since it was written; delete it and run again")
    return array


def digest(texts: Iterable[str | None]) -> str:
    """Hash texts with their order and boundaries: the first 32 hex digits of SHA-256. None differs from every text."""
    sha = hashlib.sha256()
    for text in texts:
        encoded = None if text is None else text.encode()
        sha.update(b"-" if encoded is None else b"%d:" % len(encoded) + encoded)
    return sha.hexdigest()[:32]


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()
