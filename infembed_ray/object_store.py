"""Object stores: `s3://`, `gs://` and `abfs://` folders, by the clients that pyarrow brings.

Credentials and regions come from the environment, as each cloud's own tools read them (`AWS_ACCESS_KEY_ID`,
`AWS_PROFILE`, `AWS_REGION`, `GOOGLE_APPLICATION_CREDENTIALS`, ...). A store that is compatible with S3 is named by
`AWS_ENDPOINT_URL`, or by the URI: `s3://bucket/path?endpoint_override=minio:9000&scheme=http`.

An object appears whole or not at all, but nothing can be renamed: whoever writes several objects that belong together
writes the one that says so last.
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
"""Environment variable: the directory of this machine for copies of what is in object stores and on the hub."""
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
"""What pyarrow takes in a query and is no secret. A URI is written to manifests and logs."""


def is_uri(value: str) -> bool:
    """Does a setting name a place in an object store?"""
    return value.split("://", 1)[0] in SCHEMES and "://" in value


def scratch() -> Path:
    """Where copies of what is elsewhere are made: `INFEMBED_SCRATCH`, else a directory of this user's in /tmp.

    Raises:
        InputError: it is another user's. Training states are read from it, and whoever can write them runs code here.
    """
    asked = os.environ.get(SCRATCH)
    path = Path(asked).expanduser().absolute() if asked else Path(tempfile.gettempdir()) / f"infembed-{os.getuid()}"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not asked and path.stat().st_uid != os.getuid():
        raise InputError(f"{path}: belongs to another user; set {SCRATCH} to a directory of your own")
    return path


@dataclass(frozen=True)
class Entry:
    """What a store says of an object: its size in bytes and when it was written, in nanoseconds since 1970."""

    size: int
    written: int


@dataclass(frozen=True)
class Folder:
    """All objects whose names begin alike, as files of a folder; or one object.

    Attributes:
        base: scheme, bucket and path: `s3://bucket/path`.
        query: of the URI, how the store is reached.
    """

    base: str
    query: str = ""

    @classmethod
    def of(cls, uri: str, setting: str) -> Folder:
        """The place that a setting names.

        Raises:
            InputError: no such bucket, no access, an endpoint that does not answer, or credentials in the URI.
        """
        base, _, query = uri.partition("?")
        folder = cls(base.rstrip("/"), query)
        user, _, place = base.partition("://")[2].rpartition("@")  # abfs://container@account.dfs.core.windows.net
        if ":" in user:
            raise InputError(f"{setting}={place}: credentials in a URI end in logs; set them in the environment")
        if not {key for key, _ in parse_qsl(query, keep_blank_values=True)} <= _QUERY:
            raise InputError(
                f"{setting}={folder.base}: its query may hold {', '.join(sorted(_QUERY))}; credentials are set in the "
                "environment, because a URI ends in logs"
            )
        with told(folder.base, setting):
            system, path = folder._open()
            bucket = path.split("/", 1)[0]
            if system.get_file_info(bucket).type == filesystems.FileType.NotFound:
                raise InputError(f"{setting}={folder.base}: no bucket {bucket}; make it, or check the endpoint")
        return folder

    def __str__(self) -> str:
        return self.base

    @property
    def uri(self) -> str:
        """With all that is needed to reach it, for another process."""
        return f"{self.base}?{self.query}" if self.query else self.base

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.base.rsplit("/", 1)[-1]

    def __truediv__(self, name: str) -> Folder:
        return replace(self, base=f"{self.base}/{name}")

    def _open(self) -> tuple[Any, str]:
        system, path = filesystems.FileSystem.from_uri(self.uri)
        return system, path.strip("/")  # an abfs URI may give it with a slash at either end

    def entries(self) -> dict[str, Entry]:
        """Names below this folder, with slashes, and what they are; "" is the place itself, if it is an object."""
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
        """The text of an object; None where there is none."""
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
        """Copy a file of this machine to the store."""
        system, path = self._open()
        filesystems.copy_files(
            str(file), f"{path}/{name}", filesystems.LocalFileSystem(), system, chunk_size=_CHUNK, use_threads=False
        )

    def download(self, name: str, file: Path) -> None:
        """Copy an object to this machine, where it appears whole or not at all."""
        system, path = self._open()
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.partial")
        filesystems.copy_files(
            f"{path}/{name}" if name else path, str(partial), system, filesystems.LocalFileSystem(), chunk_size=_CHUNK
        )
        partial.replace(file)

    def delete(self, name: str) -> None:
        """Delete an object."""
        system, path = self._open()
        system.delete_file(f"{path}/{name}")


@contextmanager
def told(place: str, setting: str) -> Iterator[None]:
    """Turn what a store's client raises in the block into one line that names the setting."""
    try:
        yield
    except (OSError, ArrowException) as error:
        raise InputError(
            f"{setting}={place}: the object store does not give it ({' '.join(str(error).split())[:240]}); check the "
            "address, the credentials and region in the environment, and AWS_ENDPOINT_URL"
        ) from error


def digest(entries: dict[str, Entry]) -> str:
    """16 hex digits that change when an object is written, added or removed."""
    listing = json.dumps({name: [entry.size, entry.written] for name, entry in sorted(entries.items())})
    return hashlib.sha256(listing.encode()).hexdigest()[:16]
