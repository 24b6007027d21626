"""Scans of Parquet files that are larger than what a page shows of them."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import Place

_ROWS_AT_ONCE = 1024
"""Rows of a batch of a scan, which reads 16 batches ahead: with pyarrow's own value it would read most of a file ahead."""


def open_dataset(file: Place) -> ds.Dataset:
    """Open a Parquet file for `scan`. Without `pre_buffer=False` a scan would read the whole file ahead."""
    system, path = file.file_system() if isinstance(file, Folder) else (None, file)
    return ds.dataset(path, format=ds.ParquetFileFormat(pre_buffer=False), filesystem=system)


def scan(
    data: ds.Dataset, columns: list[str] | dict[str, pc.Expression], rows: pc.Expression | None = None
) -> pa.Table:
    """Return columns, or expressions of them, of the rows that match; memory holds only some row groups at a time."""
    return data.to_table(columns, filter=rows, batch_size=_ROWS_AT_ONCE)
