"""Embeddings and scores of pairs on disk, each array found by the texts that it was made of.

An evaluation computes them chunk by chunk, on whatever node, and looks here first: what another task, another run or a
killed run has left is not computed again. The directory is one that all nodes see. Nothing in it is ever changed; all of
it can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import numpy as np

VERSION = 1
"""Raise it when the same model makes something else of the same text: of a mistake in pooling, say, that is mended."""
_CHECKSUM_BYTES = 16


class Store:
    """The arrays of one model.

    Every array is a `.npy` file, followed by a checksum which numpy does not mind. It is renamed when it is whole.

    Args:
        root: the directory of the stores of all models.
        identity: of the model: changes with anything that changes what it computes.
    """

    def __init__(self, root: Path, identity: str) -> None:
        self.directory = root / hashlib.sha256(f"{VERSION}\0{identity}".encode()).hexdigest()[:16]

    def file(self, texts: Iterable[str | None]) -> Path:
        """Where the array of these texts, in this order, is or would be."""
        name = digest(texts)
        return self.directory / name[:2] / f"{name[2:]}.npy"

    @staticmethod
    def read(file: Path, rows: int) -> np.ndarray | None:
        """(rows, ...) float32; None if it is not there, damaged, or has values that are not finite."""
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
        """Write an array, durably and in one piece: two nodes may be at the same one."""
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(array, dtype=np.float32), allow_pickle=False)
        content = stream.getvalue()
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{secrets.token_hex(4)}.partial")
        with partial.open("wb") as target:
            target.write(content + _checksum(content))
            target.flush()
            os.fsync(target.fileno())
        partial.replace(file)


def digest(texts: Iterable[str | None]) -> str:
    """SHA-256 (first 32 hex digits) of texts, of their order and of where each ends; None is none of them."""
    sha = hashlib.sha256()
    for text in texts:
        encoded = None if text is None else text.encode()
        sha.update(b"-" if encoded is None else b"%d:" % len(encoded) + encoded)
    return sha.hexdigest()[:32]


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()
