"""A store of embeddings and scores on disk, keyed by the texts that they were computed from.

An evaluation looks here before it computes a chunk, so tasks, runs and resumed runs share their work. All nodes see the
directory. Its files never change, and all of it can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from infembed_ray import durable

VERSION = 1
"""Raise it when the same model computes something else for the same text, for example after a fix of pooling."""
_CHECKSUM_BYTES = 16


class Store:
    """The arrays of one model, each a `.npy` file with a checksum at its end, which numpy ignores.

    Args:
        root: directory of the stores of all models.
        identity: of the model; it changes with anything that changes the arrays.
    """

    def __init__(self, root: Path, identity: str) -> None:
        self.directory = root / hashlib.sha256(f"{VERSION}\0{identity}".encode()).hexdigest()[:16]

    def file(self, texts: Iterable[str | None]) -> Path:
        """Return the path for the array of these texts, in this order."""
        name = digest(texts)
        return self.directory / name[:2] / f"{name[2:]}.npy"

    @staticmethod
    def read(file: Path, rows: int) -> np.ndarray | None:
        """Read an array, (rows, ...) float32; None if it is missing, damaged or not finite."""
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        content, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if _checksum(content) != checksum:
            return None
        array: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
        return array if len(array) == rows and np.isfinite(array).all() else None

    @staticmethod
    def write(file: Path, array: np.ndarray) -> None:
        """Write an array atomically and durably; several nodes may write the same one."""
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(array, dtype=np.float32), allow_pickle=False)
        content = stream.getvalue()
        file.parent.mkdir(parents=True, exist_ok=True)
        with durable.replacing(file, shared=True) as target:
            target.write(content + _checksum(content))


def digest(texts: Iterable[str | None]) -> str:
    """Hash texts with their order and boundaries: the first 32 hex digits of SHA-256. None differs from every text."""
    sha = hashlib.sha256()
    for text in texts:
        encoded = None if text is None else text.encode()
        sha.update(b"-" if encoded is None else b"%d:" % len(encoded) + encoded)
    return sha.hexdigest()[:32]


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()
