"""The steps that find near-duplicates and contaminated records, each a function of one Arrow table.

A near-duplicate has a Jaccard similarity of its word trigrams of at least a threshold with another record; its text is the
positive instruction, query and passage. Records that share a band of minimal hashes (module `shingles`) are candidates, and the
similarity of each pair of candidates is computed exactly. A record is contaminated if one of its texts equals a text of an
evaluation set or shares an n-gram with one.

Records are known by their row numbers, so the results do not depend on how rows are divided into tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice

import numpy as np
import pyarrow as pa

from infembed_ray.analysis.duplicates import shingles_of
from infembed_ray.analysis.inputs import KINDS
from infembed_ray.analysis.shingles import BANDS, ROWS, hashes, jaccard, normalised, odd, signatures

TEXTS = pa.schema([("row", pa.int64()), *((column, pa.string()) for columns in KINDS.values() for column in columns)])
"""A record's number and its texts."""
COMPARED = ("instruction_positive", "query_positive", "document_positive")
"""Columns that are compared to find near-duplicates."""
MOST_COMPARED = 32
"""In a bucket of records that share a band, each is compared with the first MOST_COMPARED different ones, so that a large bucket
costs linear time."""

_PAIRS = pa.schema([("one", pa.int64()), ("other", pa.int64()), ("equal", pa.bool_())])
_SIDES = pa.schema([("pair", pa.int64()), ("shingles", pa.list_(pa.uint64()))])
_SHARED = pa.schema([("row", pa.int64()), ("shared", pa.string())])


def shingles_of_rows(table: pa.Table) -> list[np.ndarray]:
    """Return the distinct shingles of each record of a table of TEXTS."""
    columns = [table[name].to_pylist() for name in COMPARED]
    return [shingles_of("\n".join(texts)) for texts in zip(*columns, strict=True)]


def bands(table: pa.Table, left_out: np.ndarray) -> pa.Table:
    """Return (band, row, digest) for each band of each record: equal bands of two records make them candidates.

    Args:
        left_out: rows to ignore, in order.
    """
    table = table.filter(pa.array(~_among(table["row"].to_numpy(), left_out)))
    shingles = shingles_of_rows(table)
    signed = signatures(shingles).reshape(-1, BANDS, ROWS) * odd(2, ROWS)
    digests = [int.from_bytes(blake2b(of_row.tobytes(), digest_size=8).digest(), "big") for of_row in shingles]
    return pa.table(
        {
            "band": (signed.sum(axis=2) + odd(3, BANDS)).ravel(),  # equal bands in different places are different
            "row": np.repeat(table["row"].to_numpy(), BANDS),
            "digest": np.repeat(np.array(digests, dtype=np.uint64), BANDS),
        }
    )


def candidates(table: pa.Table) -> pa.Table:
    """Return the pairs of rows to compare, the lower first, of a table that has all rows of its bands.

    `equal` pairs have the same shingles, and need no comparison.
    """
    band, row, digest = (table[name].to_numpy() for name in ("band", "row", "digest"))
    order = np.lexsort((row, band))
    band, row, digest = band[order], row[order], digest[order]
    starts = np.flatnonzero(np.r_[True, band[1:] != band[:-1]]) if len(band) else np.empty(0, dtype=np.int64)
    ends = np.r_[starts[1:], len(band)]
    found: set[tuple[int, int, bool]] = set()
    for start, end in zip(starts[ends - starts > 1].tolist(), ends[ends - starts > 1].tolist(), strict=True):
        different: dict[int, int] = {}
        for one, of_one in zip(row[start:end].tolist(), digest[start:end].tolist(), strict=True):
            if of_one in different:
                found.add((different[of_one], one, True))
                continue
            found.update((other, one, False) for other in islice(different.values(), MOST_COMPARED))
            different[of_one] = one
    columns = list(zip(*sorted(found), strict=True)) or [(), (), ()]
    return pa.table(columns, schema=_PAIRS)


def sides(table: pa.Table, rows: np.ndarray, pairs: np.ndarray) -> pa.Table:
    """Return (pair, shingles) for each side of a pair that is a record of a table of TEXTS.

    Args:
        rows: the sides of all pairs, in order.
        pairs: of each side, the number of its pair.
    """
    table = table.filter(pa.array(_among(table["row"].to_numpy(), rows)))
    shingles = shingles_of_rows(table)
    first, last = (np.searchsorted(rows, table["row"].to_numpy(), side) for side in ("left", "right"))
    found = [(pair, of_row) for of_row, a, b in zip(shingles, first, last, strict=True) for pair in pairs[a:b]]
    return pa.table([[pair for pair, _ in found], [of_row for _, of_row in found]], schema=_SIDES)


def similar(table: pa.Table, threshold: float) -> pa.Table:
    """Return the pairs of a table of sides, which has both sides of each, whose similarity is at least the threshold."""
    table = table.sort_by("pair")
    shingles = [np.asarray(of_row.values) for of_row in table["shingles"]]
    pairs = table["pair"].to_pylist()[::2]
    alike = [jaccard(*both) >= threshold for both in zip(shingles[::2], shingles[1::2], strict=True)]
    return pa.table({"pair": pa.array([pair for pair, is_so in zip(pairs, alike, strict=True) if is_so], pa.int64())})


def originals(pairs: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return duplicate -> original: the lowest row of each connected component of the pairs stays, all others are duplicates."""
    parents: dict[int, int] = {}

    def root(row: int) -> int:
        while (parent := parents.get(row, row)) != row:
            parents[row] = parents.get(parent, parent)
            row = parent
        return row

    for one, other in pairs:
        low, high = sorted((root(one), root(other)))
        parents[high] = low
    found = {row: root(row) for row in sorted(parents)}
    return {row: original for row, original in found.items() if row != original}


def contaminated(table: pa.Table, known: np.ndarray, length: int) -> pa.Table:
    """Return (row, shared): the records of a table of TEXTS that have a known n-gram, and the first such n-gram.

    Args:
        known: hashes of n-grams, in order, see `ngram_hashes`.
    """
    found: dict[int, str] = {}
    for name in TEXTS.names[1:]:
        for row, text in zip(table["row"].to_pylist(), table[name].to_pylist(), strict=True):
            words = normalised(text).split()
            places = np.flatnonzero(_among(hashes(words, length), known))
            if len(places) and row not in found:
                found[row] = " ".join(words[places[0] : places[0] + length])
    return pa.table([list(found), list(found.values())], schema=_SHARED)


def ngram_hashes(text: str, length: int) -> np.ndarray:
    """Return the hashes of a text's n-grams; of the whole text, if it is shorter."""
    return hashes(normalised(text).split(), length)


def _among(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return which values are in an ordered array."""
    if not len(known):
        return np.zeros(len(values), dtype=bool)
    return known[np.searchsorted(known, values).clip(max=len(known) - 1)] == values
