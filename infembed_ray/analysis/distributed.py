"""`infembed clean`: near-duplicates and contaminated records are removed from records of any size, by Ray Data.

The driver streams the records into blocks of the object store, which spills to disk. The steps of module `cleaning` run over
the blocks: n-grams are looked up, bands are shuffled to find candidates, and the shingles of candidates are shuffled to compare
them. The driver holds the ids of all records, and the row numbers of those that are removed or compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

from infembed_ray.analysis import cleaning, contamination
from infembed_ray.analysis.inputs import is_ours
from infembed_ray.config.analysis import CleanSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.progress import say, track
from infembed_ray.ray_cluster import connect
from infembed_ray.records import tables
from infembed_ray.records.tables import KEPT_FILE, Record
from infembed_ray.storage.dry_run import state
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import Published, Step, find_input

REMOVED_FILE = "removed.parquet"
REMOVED = pa.schema([*tables.RECORD, ("reason", pa.string()), ("detail", pa.string())])
"""`reason` is `near-duplicate` or `contaminated by LABEL`; `detail` is the id of the record that stays, or the shared words."""
NEAR_DUPLICATE = "near-duplicate"

ROWS_PER_BLOCK = 2048
GRAMS_AT_ONCE = 1 << 24
"""Most hashes of an evaluation set that a task holds, 8 bytes each; a larger set takes several passes."""
ROWS_PER_PARTITION = 1 << 16
"""Records whose bands are in one partition of a shuffle, on average: 50 MB."""
PAIRS_PER_PARTITION = 1 << 14


def run(settings: CleanSettings) -> Published:
    """Remove near-duplicates and contaminated records; publish the others as `records.parquet`.

    Also publishes `removed.parquet`, with the reason for each removed record. The order of the records stays. Of records that
    are near-duplicates of one another, directly or through others, the first one stays.

    Raises:
        InputError: an input cannot be read, the output cannot be written, or no record would be left.
    """
    files, step = prepare(settings)
    if done := step.finished():
        return done
    connect()
    with step.publish() as staging:
        with track("clean", None) as advance:
            blocks = ray.data.from_arrow_refs([ray.put(block) for block in _blocks(files["records"], advance)])
        removed = _contaminated(blocks, files, settings)
        if settings.near_duplicates is not None:
            removed |= _near_duplicates(blocks, removed, settings.near_duplicates)
        staging.counts = _write(staging.path, files["records"], removed)
        if not staging.counts["kept"]:
            raise InputError(
                f"records={settings.records}: no record would be left; check evaluations and near_duplicates"
            )
    kept = f"{staging.counts['kept']:,} of {sum(staging.counts.values()):,} records kept"
    say("; ".join([f"clean: {kept}", *(f"{n:,} {why}" for why, n in staging.counts.items() if why != "kept")]))
    return step.published()


def prepare(settings: CleanSettings) -> tuple[dict[str, Place], Step]:
    """Locate the files that the settings name, and identify the run.

    Raises:
        InputError: an input does not exist, or the output cannot be written.
    """
    named = {"records": settings.records, **{f"evaluations.{name}": f for name, f in settings.evaluations.items()}}
    places = check_all(*(partial(find_input, file, name) for name, file in named.items()))
    files = dict(zip(named, places, strict=True))
    return files, Step("clean", settings, settings.output, files)


def count(files: Mapping[str, Place]) -> Iterator[tuple[str, int, str]]:
    """Read all inputs once; yield (setting, number, what there is that number of).

    Raises:
        InputError: an input cannot be read, or has other columns.
    """
    for name, path in files.items():
        if name == "records":
            yield name, sum(1 for _ in tables.stream(path, Record, name)), f"records of {path}"
        else:
            yield name, sum(1 for _ in contamination.read(path, name)), f"texts of {path}"


def _blocks(path: Place, advance: Callable[..., None]) -> Iterator[pa.Table]:
    """Yield all records as tables of `cleaning.TEXTS`."""
    rows = enumerate(tables.stream(path, Record, "records"))
    while block := [{"row": row, **vars(record)} for row, record in islice(rows, ROWS_PER_BLOCK)]:
        advance(len(block), "records read")
        yield pa.Table.from_pylist(block, cleaning.TEXTS)


Removed = dict[int, tuple[str, Any]]
"""Row -> reason, and the row of the record that stays or the shared words."""


def _contaminated(blocks: ray.data.Dataset, files: Mapping[str, Place], settings: CleanSettings) -> Removed:
    """Find the records that share an n-gram with an evaluation set."""
    removed: Removed = {}
    for label in settings.evaluations:
        name = f"evaluations.{label}"
        for known in _ngrams(files[name], name, settings.ngram):
            found = _mapped(blocks, partial(cleaning.contaminated, length=settings.ngram), ray.put(known))
            for table in _tables(found):
                for row, shared in zip(table["row"].to_pylist(), table["shared"].to_pylist(), strict=True):
                    removed.setdefault(row, (f"contaminated by {label}", shared))
    return removed


def _ngrams(path: Place, name: str, length: int) -> Iterator[np.ndarray]:
    """Yield the n-grams of an evaluation set as ordered arrays of hashes."""
    waiting: list[np.ndarray] = []
    total = 0
    for text in contamination.read(path, name):
        waiting.append(cleaning.ngram_hashes(text, length))
        total += len(waiting[-1])
        if total >= GRAMS_AT_ONCE:
            yield np.unique(np.concatenate(waiting))
            waiting, total = [], 0
    if total:
        yield np.unique(np.concatenate(waiting))


def _near_duplicates(blocks: ray.data.Dataset, removed: Removed, threshold: float) -> Removed:
    """Find the near-duplicates among the records that are not removed yet."""
    left_out = ray.put(np.array(sorted(removed), dtype=np.int64))
    total = blocks.count()
    banded = _mapped(blocks, cleaning.bands, left_out).repartition(-(-total // ROWS_PER_PARTITION), keys=["band"])
    pairs = {same: np.empty(0, dtype=np.int64) for same in (False, True)}  # one * total + other
    for table in _tables(_mapped(banded, cleaning.candidates)):
        one, other, same = (table[name].to_numpy() for name in table.column_names)
        for kind, known in pairs.items():
            pairs[kind] = np.union1d(known, (one * total + other)[same == kind])
    equal, compared = (
        np.stack(np.divmod(codes, total), axis=1) for codes in (pairs[True], np.setdiff1d(pairs[False], pairs[True]))
    )
    rows, numbers = compared.T.ravel(), np.tile(np.arange(len(compared)), 2)
    order = np.argsort(rows, kind="stable")
    sides = _mapped(blocks, cleaning.sides, ray.put(rows[order]), ray.put(numbers[order]))
    sides = sides.repartition(max(1, -(-len(compared) // PAIRS_PER_PARTITION)), keys=["pair"])
    similar = [
        table["pair"].to_numpy() for table in _tables(_mapped(sides, partial(cleaning.similar, threshold=threshold)))
    ]
    alike = np.concatenate([equal, *(compared[pairs] for pairs in similar)])
    return {row: (NEAR_DUPLICATE, original) for row, original in cleaning.originals(alike.tolist()).items()}


def _mapped(blocks: ray.data.Dataset, function: Callable[..., pa.Table], *shared: ray.ObjectRef) -> ray.data.Dataset:
    """Apply a function to each block as a whole; its further arguments are in the object store."""
    return blocks.map_batches(
        lambda table: function(table, *ray.get(list(shared))), batch_size=None, batch_format="pyarrow"
    )


def _tables(blocks: ray.data.Dataset) -> Iterator[pa.Table]:
    tables: Iterator[pa.Table] = iter(blocks.iter_batches(batch_size=None, batch_format="pyarrow"))
    return tables


def _write(directory: Any, path: Place, removed: Removed) -> dict[str, int]:
    """Write the kept and the removed records; return their numbers, those of the removed ones by reason."""
    originals = {detail for reason, detail in removed.values() if reason == NEAR_DUPLICATE}
    ids: dict[int, str] = {}
    counts = {"kept": 0}
    with (
        pq.ParquetWriter(directory / KEPT_FILE, tables.RECORD) as kept,
        pq.ParquetWriter(directory / REMOVED_FILE, REMOVED) as dropped,
    ):
        rows = enumerate(_rows(path))
        while group := list(islice(rows, ROWS_PER_BLOCK)):
            stays = [row for number, row in group if number not in removed]
            goes = []
            for number, row in group:
                if number in originals:
                    ids[number] = row["id"]
                if number in removed:
                    reason, detail = removed[number]
                    goes.append({**row, "reason": reason, "detail": ids.get(detail, detail)})
                    counts[reason] = counts.get(reason, 0) + 1
            counts["kept"] += len(stays)
            kept.write_table(pa.Table.from_pylist(stays, tables.RECORD))
            dropped.write_table(pa.Table.from_pylist(goes, REMOVED))
    return counts


def _rows(path: Place) -> Iterator[dict[str, Any]]:
    """Yield the columns of all records, with the provenance of those that synthesis wrote."""
    file = path if path.is_file() else path / KEPT_FILE
    ours = tables.raw_rows(file, "records") if file.is_file() and is_ours(file) else None
    for record in tables.stream(path, Record, "records"):
        yield vars(record) | ({"provenance": next(ours)["provenance"]} if ours else {})


def describe(settings: CleanSettings) -> Iterator[str]:
    """Yield what a run would do, line by line; InputError as `prepare`."""
    files, step = prepare(settings)
    if not (yield from state(step)):
        yield from (f"{name}: {number:,} {what}" for name, number, what in count(files))
