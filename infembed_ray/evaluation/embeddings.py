"""A store of embeddings and scores, keyed by the texts that they were computed from, which tasks and runs share.

It is a directory that all nodes see, or a folder of an object store. Its files appear whole and never change, and all of it
can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from infembed_ray.errors import InputError
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import Place, errors_at, read_binary

VERSION = 2
"""Raise it when the same model computes something else for the same text, for example after a fix of pooling."""
_AHEAD = 8
"""Files that are read at the same time."""


class Store:
    """The arrays of one model, each a `.npy` file.

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


def write(file: Place, array: np.ndarray) -> None:
    """Write an array, (rows, ...) float32, atomically and durably; several nodes may write the same one."""
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(array, dtype=np.float32), allow_pickle=False)
    with errors_at(file, "embeddings"):
        if isinstance(file, Folder):
            with file.parent.open_output(file.name) as target:
                target.write(stream.getvalue())
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with durable.replacing(file, shared=True) as target:
            target.write(stream.getvalue())


def read_all(files: Iterable[Place]) -> Iterator[np.ndarray]:
    """Yield arrays in order; some files are read ahead.

    Raises:
        InputError: one is missing or truncated, or the object store failed.
    """
    with ThreadPoolExecutor(_AHEAD) as pool:
        reading: deque[Future[np.ndarray]] = deque()
        for file in files:
            reading.append(pool.submit(_read, file))
            if len(reading) == _AHEAD:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()


def _read(file: Place) -> np.ndarray:
    with errors_at(file, "embeddings"):
        try:
            array: np.ndarray = np.load(io.BytesIO(read_binary(file)), allow_pickle=False)
        except (FileNotFoundError, ValueError, EOFError) as error:
            fault = "missing or damaged since it was written"
            raise InputError.of("embeddings", file, fault, "delete it and run again") from error
    return array


def digest(texts: Iterable[str | None]) -> str:
    """Hash texts with their order and boundaries: the first 32 hex digits of SHA-256. None differs from every text."""
    sha = hashlib.sha256()
    for text in texts:
        encoded = None if text is None else text.encode()
        sha.update(b"-" if encoded is None else b"%d:" % len(encoded) + encoded)
    return sha.hexdigest()[:32]
