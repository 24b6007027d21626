"""Index of a journal: the place of each completion at 16 bytes an entry, so that millions fit into every actor.

Recent entries are in a dict, the others in a few sorted arrays. It knows 8 bytes of a key, so a reader compares the key.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

RECENT = 4096
_OFFSET_BITS = 44
_OFFSET = (1 << _OFFSET_BITS) - 1

_Run = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]  # sorted keys; the place of each


class JournalIndex:
    """Maps a key (hex digits) to (number of the file, offset in bytes). Of equal keys, the first one added counts."""

    def __init__(self) -> None:
        self._recent: dict[int, int] = {}
        self._runs: list[_Run] = []  # oldest first

    def __len__(self) -> int:
        """Return the number of keys."""
        self._freeze()
        while len(self._runs) > 1:
            newer, older = self._runs.pop(), self._runs.pop()
            self._runs.append(_merged(older, newer))
        return len(self._runs[0][0]) if self._runs else 0

    def add(self, key: str, file: int, offset: int) -> None:
        """Add an entry. Files are numbered below 2^20; offsets are below 16 TB."""
        self._recent.setdefault(_short(key), file << _OFFSET_BITS | offset)
        if len(self._recent) >= RECENT:
            self._freeze()

    def find(self, key: str) -> tuple[int, int] | None:
        """Return the place of a key's entry, or None. Very rarely it is the entry of another key."""
        short = _short(key)
        for keys, places in self._runs:
            at = int(keys.searchsorted(np.uint64(short)))
            if at < len(keys) and int(keys[at]) == short:
                return _place(int(places[at]))
        place = self._recent.get(short)
        return None if place is None else _place(place)

    def _freeze(self) -> None:
        if not self._recent:
            return
        keys = np.fromiter(self._recent.keys(), np.uint64, len(self._recent))
        places = np.fromiter(self._recent.values(), np.uint64, len(self._recent))
        order = np.argsort(keys)
        self._recent = {}
        run = keys[order], places[order]
        while self._runs and len(self._runs[-1][0]) <= len(run[0]):
            run = _merged(self._runs.pop(), run)
        self._runs.append(run)


def _short(key: str) -> int:
    return int(key[:16], 16)


def _place(packed: int) -> tuple[int, int]:
    return packed >> _OFFSET_BITS, packed & _OFFSET


def _merged(older: _Run, newer: _Run) -> _Run:
    keys, first = np.unique(np.concatenate([older[0], newer[0]]), return_index=True)
    return keys, np.concatenate([older[1], newer[1]])[first]
