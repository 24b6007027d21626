"""What the files of a state must hold."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

_BLOCK = 1 << 20


class Sum(NamedTuple):
    """What a file must hold: its size in bytes and the SHA-256 of them (hexadecimal)."""

    size: int
    sha256: str


def difference(path: Path, expected: Sum) -> str | None:
    """Why a file is not what it should be; None where it is."""
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != expected.size:
        return f"has {size} bytes instead of {expected.size}"
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return None if digest.hexdigest() == expected.sha256 else "has another checksum than when it was written"
