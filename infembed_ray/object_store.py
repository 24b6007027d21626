"""Object stores: folders at `s3://`, `gs://` and `abfs://` URIs, through pyarrow's clients.

Credentials and regions come from the environment, under the names that each cloud's own tools use (`AWS_ACCESS_KEY_ID`,
`AWS_PROFILE`, `AWS_REGION`, `GOOGLE_APPLICATION_CREDENTIALS`, ...). `AWS_ENDPOINT_URL` names another S3-compatible store,
and so does a URI: `s3://bucket/path?endpoint_override=minio:9000&scheme=http`.

A single object is written atomically, but a store cannot rename. A writer of several objects writes the one that marks
them complete last.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from pyarrow import ArrowException
from pyarrow import fs as filesystems

from infembed_ray.errors import InputError

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss")
SCRATCH = "INFEMBED_SCRATCH"
"""Environment variable: local directory for copies from object stores and from the hub."""
_CHUNK = 8 << 20
_QUERY = {
    "allow_bucket_creation",
    "allow_bucket_deletion",
    "blob_storage_authority",
    "client_id",
    "credential_kind",
    "dfs_storage_authority",
    "enable_tls",
    "endpoint_override",
    "project_id",
    "region",
    "retry_limit_seconds",
    "scheme",
    "tls_ca_dir_path",
    "tls_ca_file_path",
    "tls_verify_certificates",
}
"""Query parameters of pyarrow that are not secret. URIs appear in manifests and logs."""


def is_uri(value: str) -> bool:
    """Whether a value is a URI of an object store."""
    return value.split("://", 1)[0] in SCHEMES and "://" in value


def scratch() -> Path:
    """Return the directory for local copies: `INFEMBED_SCRATCH`, else one of this user in /tmp.

    Raises:
        InputError: another user owns it. Training states are loaded from it, and loading them can run code.
    """
    given = os.environ.get(SCRATCH)
    path = Path(given).expanduser().absolute() if given else Path(tempfile.gettempdir()) / f"infembed-{os.getuid()}"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not given and path.stat().st_uid != os.getuid():
        raise InputError(f"{path}: belongs to another user; set {SCRATCH} to a directory of your own")
    return path


@dataclass(frozen=True)
class Entry:
    """Size of an object in bytes, and the time it was written in nanoseconds since 1970."""

    size: int
    written: int


@dataclass(frozen=True)
class Folder:
    """The objects with one prefix, as files of a folder; or one object.

    Attributes:
        base: scheme, bucket and path: `s3://bucket/path`.
        query: query string of the URI, with the endpoint and its options.
    """

    base: str
    query: str = ""

    @classmethod
    def open(cls, uri: str, setting: str) -> Folder:
        """Open the folder that a setting names.

        Raises:
            InputError: the bucket does not exist, access is denied, the endpoint does not answer, or the URI holds
                credentials.
        """
        base, _, query = uri.partition("?")
        folder = cls(base.rstrip("/"), query)
        user, _, place = base.partition("://")[2].rpartition("@")  # abfs://container@account.dfs.core.windows.net
        if ":" in user:
            raise InputError(
                f"{setting}={place}: a URI must not hold credentials, because logs show it; set them in the environment"
            )
        if not {key for key, _ in parse_qsl(query, keep_blank_values=True)} <= _QUERY:
            raise InputError(
                f"{setting}={folder.base}: the query of a URI may hold only {', '.join(sorted(_QUERY))}; set credentials "
                "in the environment, because logs show the URI"
            )
        with convert_errors(folder.base, setting):
            system, path = folder._open()
            bucket = path.split("/", 1)[0]
            if system.get_file_info(bucket).type == filesystems.FileType.NotFound:
                raise InputError(f"{setting}={folder.base}: no bucket {bucket}; create it, or check the endpoint")
        return folder

    def __str__(self) -> str:
        return self.base

    @property
    def uri(self) -> str:
        """The URI with its query, for another process."""
        return f"{self.base}?{self.query}" if self.query else self.base

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.base.rsplit("/", 1)[-1]

    def __truediv__(self, name: str) -> Folder:
        return replace(self, base=f"{self.base}/{name}")

    def _open(self) -> tuple[Any, str]:
        system, path = filesystems.FileSystem.from_uri(self.uri)
        return system, path.strip("/")  # pyarrow may keep a slash at either end of an abfs path

    def entries(self) -> dict[str, Entry]:
        """List the objects below this folder by relative name; "" is the folder itself, if it is an object."""
        system, path = self._open()
        found = system.get_file_info(filesystems.FileSelector(path, recursive=True, allow_not_found=True))
        if not found:
            found = [system.get_file_info(path)]
        return {
            info.path[len(path) :].lstrip("/"): Entry(info.size, info.mtime_ns)
            for info in found
            if info.type == filesystems.FileType.File
        }

    def read(self, name: str) -> str | None:
        """Read the text of an object; None if it does not exist."""
        system, path = self._open()
        try:
            with system.open_input_stream(f"{path}/{name}") as stream:
                return str(stream.read().decode("utf-8"))
        except FileNotFoundError:
            return None

    def write(self, name: str, text: str) -> None:
        """Write a small object."""
        system, path = self._open()
        with system.open_output_stream(f"{path}/{name}") as stream:
            stream.write(text.encode("utf-8"))

    def upload(self, file: Path, name: str) -> None:
        """Copy a local file to the store."""
        system, path = self._open()
        filesystems.copy_files(
            str(file), f"{path}/{name}", filesystems.LocalFileSystem(), system, chunk_size=_CHUNK, use_threads=False
        )

    def download(self, name: str, file: Path) -> None:
        """Copy an object to a local file, atomically."""
        system, path = self._open()
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.partial")
        filesystems.copy_files(
            f"{path}/{name}" if name else path, str(partial), system, filesystems.LocalFileSystem(), chunk_size=_CHUNK
        )
        partial.replace(file)

    def open_input(self, name: str) -> Any:
        """Open an object as a random-access file; threads may read it at the same time."""
        system, path = self._open()
        return system.open_input_file(f"{path}/{name}")

    def delete(self, name: str) -> None:
        """Delete an object."""
        system, path = self._open()
        system.delete_file(f"{path}/{name}")


@contextmanager
def convert_errors(place: str, setting: str) -> Iterator[None]:
    """Convert errors of a store's client in the block to an InputError that names the setting."""
    try:
        yield
    except (OSError, ArrowException) as error:
        raise InputError(
            f"{setting}={place}: the object store failed ({' '.join(str(error).split())[:240]}); check the "
            "address, the credentials and region in the environment, and AWS_ENDPOINT_URL"
        ) from error


def listing_digest(entries: dict[str, Entry]) -> str:
    """Hash a listing to 16 hex digits, which change when an object is written, added or removed."""
    listing = json.dumps({name: [entry.size, entry.written] for name, entry in sorted(entries.items())})
    return hashlib.sha256(listing.encode()).hexdigest()[:16]
