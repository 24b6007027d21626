"""Object stores: folders at `s3://`, `gs://` and `abfs://` URIs.

Bulk bytes go through pyarrow's clients, conditional writes of small control objects (manifests, leases) through obstore's.
Both read credentials and regions from the environment, under the names that each cloud's own tools use, and find the identity
of the machine or pod. A store cannot rename: a writer of several objects writes the one that marks them complete last.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from obstore import exceptions as failures
from obstore import store as clients
from pyarrow import ArrowException
from pyarrow import fs as filesystems

from infembed_ray.errors import InputError
from infembed_ray.redaction import holds_credentials, where_they_belong
from infembed_ray.storage import durable

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss")
SCRATCH = "INFEMBED_SCRATCH"
"""Environment variable: local directory for copies from object stores and from the hub."""
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}
"""Errors of a local file. Those of a store's client have no such number."""
_CHUNK = 8 << 20
_WRITES = 5
"""Attempts of a conditional write whose outcome is not known."""
_PAUSE_S = 0.2
REQUEST_TIMEOUT = timedelta(seconds=10)
RETRY_TIMEOUT = timedelta(seconds=20)
"""Limits of a control request. All attempts of a write begin within the second one, and each takes at most both together,
so a write ends before another process may take over its lease (`leases.SECONDS`)."""
_CLOUD_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")
_AZURE_HOSTS = ("blob_storage_authority", "dfs_storage_authority")


def is_uri(value: str) -> bool:
    """Whether a value is a URI of an object store."""
    return value.split("://", 1)[0] in SCHEMES and "://" in value


def scratch() -> Path:
    """Return the directory for local copies: `INFEMBED_SCRATCH`, else one of this user in /tmp.

    Raises:
        InputError: another user owns it. Training states are loaded from it, and loading them can run code.
    """
    path = _scratch_path()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not os.environ.get(SCRATCH) and path.stat().st_uid != os.getuid():
        raise InputError.of(str(path), None, "belongs to another user", f"set {SCRATCH} to a directory of your own")
    return path


@contextmanager
def room(prefix: str) -> Iterator[Path]:
    """Give a directory below `scratch` for the time of the block; delete those that killed processes of this node left.

    A process holds a lock in its directory. The directory gets its name once the lock is held.
    """
    prefix = f"{prefix}-{platform.node()}@"  # a scratch directory may be a shared one
    for left in scratch().glob(f"{prefix}*"):
        with suppress(OSError), durable.exclusive_lock(left / "lock"):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix="new-", dir=scratch()))
    with durable.exclusive_lock(made / "lock"):
        directory = made.rename(made.with_name(made.name.replace("new-", prefix, 1)))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _scratch_path() -> Path:
    given = os.environ.get(SCRATCH)
    return Path(given).expanduser().absolute() if given else Path(tempfile.gettempdir()) / f"infembed-{os.getuid()}"


@dataclass(frozen=True)
class Entry:
    """Size of an object in bytes, and the time it was written in nanoseconds since 1970."""

    size: int
    written: int


@dataclass(frozen=True)
class Version:
    """One version of an object, for compare-and-swap: S3 and Azure use the tag, GCS the version.

    Attributes:
        written: time of the write by the store's clock, in seconds since 1970; None if the version comes from a write.
    """

    e_tag: str | None
    version: str | None
    written: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Folder:
    """The objects with one prefix, as files of a folder; or one object.

    Attributes:
        base: scheme, bucket and path, quoted as in a URI: `s3://bucket/path`.
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
        if holds_credentials(uri):
            raise InputError.of(setting, uri, where_they_belong(uri))
        with convert_errors(folder.base, setting):
            system, path = folder.file_system()
            bucket = path.split("/", 1)[0]
            if system.get_file_info(bucket).type == filesystems.FileType.NotFound:
                raise InputError.of(setting, folder.base, f"no bucket {bucket}", "create it, or check the endpoint")
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
        return unquote(self.base.rsplit("/", 1)[-1])

    @property
    def suffix(self) -> str:
        """The suffix of the name, as of a `Path`."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Folder:
        """The folder that holds this one."""
        return replace(self, base=self.base.rsplit("/", 1)[0])

    def __truediv__(self, name: str) -> Folder:
        return replace(self, base=f"{self.base}/{quote(name, safe='/=:@+,;~*')}") if name else self

    def is_file(self) -> bool:
        """Whether this is one object, as of a `Path`."""
        system, path = self.file_system()
        return bool(system.get_file_info(path).type == filesystems.FileType.File)

    def file_system(self) -> tuple[Any, str]:
        """Return pyarrow's file system of the store, and the path of this folder in it."""
        system, path = filesystems.FileSystem.from_uri(self.uri)
        if system.type_name == "abfs" and (secret := _azure_secret()):
            options = dict(parse_qsl(self.query))
            hosts = {name: options[name] for name in _AZURE_HOSTS if name in options}
            schemes = dict.fromkeys(("blob_storage_scheme", "dfs_storage_scheme"), _azure_scheme(options))
            system = filesystems.AzureFileSystem(_azure_account(self.base), **secret, **hosts, **schemes)
        return system, path.strip("/")  # pyarrow may keep a slash at either end of an abfs path

    def exists(self) -> bool:
        """Whether this is an object, or the beginning of the name of one."""
        system, path = self.file_system()
        return bool(system.get_file_info(path).type != filesystems.FileType.NotFound)

    def entries(self) -> dict[str, Entry]:
        """List the objects below this folder by relative name; "" is the folder itself, if it is an object."""
        system, path = self.file_system()
        below = system.get_file_info(filesystems.FileSelector(path, recursive=True, allow_not_found=True))
        return {
            info.path[len(path) :].lstrip("/"): Entry(info.size, info.mtime_ns)
            for info in below or [system.get_file_info(path)]
            if info.type == filesystems.FileType.File
        }

    def folders(self) -> list[str]:
        """List the names of the folders directly in this one."""
        system, path = self.file_system()
        below = system.get_file_info(filesystems.FileSelector(path, allow_not_found=True))
        return [info.base_name for info in below if info.type == filesystems.FileType.Directory]

    def write(self, name: str, text: str) -> None:
        """Write a small object."""
        with self.open_output(name) as stream:
            stream.write(text.encode("utf-8"))

    def read_versioned(self, name: str) -> tuple[bytes, Version] | None:
        """Read a small object with its version; None if it does not exist."""
        client, key = self._control(name)
        try:
            answer = client.get(key)
            data, meta = bytes(answer.bytes()), answer.meta
        except FileNotFoundError:
            return None
        return data, Version(meta["e_tag"], meta["version"], meta["last_modified"].timestamp())

    def read_range(self, name: str, start: int, length: int | None) -> bytes | None:
        """Read up to `length` bytes (None: all) of an object from `start` on, by one request; None if it does not exist."""
        client, key = self._control(name)
        wanted = {"offset": start} if length is None else (start, start + length)
        try:
            return bytes(client.get(key, options={"range": wanted}).bytes())
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes, expected: Version | None = None) -> Version | None:
        """Write a small object atomically, if its present version is `expected` (compare-and-swap); None expects no object.

        Args:
            data: bytes that no other writer writes, such as a random id: a writer whose reply was lost finds its own object.

        Returns:
            The new version, or None: the object exists, has another version now, or is deleted.
        """
        client, key = self._control(name)
        tokens = {} if expected is None else {"e_tag": expected.e_tag, "version": expected.version}
        mode = {token: value for token, value in tokens.items() if value is not None} or "create"
        deadline = time.monotonic() + RETRY_TIMEOUT.total_seconds()
        for attempt in range(1, _WRITES + 1):
            try:
                made = client.put(key, data, mode=mode)
                return Version(made["e_tag"], made["version"])
            except (failures.AlreadyExistsError, failures.PreconditionError, failures.GenericError):
                # A refusal may be the answer to a repetition of this very write, and S3's 409 is no refusal.
                content, version = self.read_versioned(name) or (None, None)
                if content == data:
                    return version
                if version != expected:
                    return None
                if attempt == _WRITES or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S * attempt)
        raise AssertionError("unreachable")

    def _control(self, name: str) -> tuple[Any, str]:
        """Return the obstore client of the bucket, and the key of an object."""
        system, path = self.file_system()
        bucket, _, key = path.partition("/")
        region = system.region if isinstance(system, filesystems.S3FileSystem) else ""  # pyarrow asks the bucket
        environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_CLOUD_VARIABLES)))
        return _control_client(self.base, self.query, bucket, region, environment), f"{key}/{name}".strip("/")

    def open_output(self, name: str) -> Any:
        """Open a new object for writing: a pyarrow stream. The object appears when the stream is closed."""
        system, path = self.file_system()
        return system.open_output_stream(f"{path}/{name}")

    def upload(self, file: Path, name: str) -> None:
        """Copy a local file to the store."""
        system, path = self.file_system()
        options = {"chunk_size": _CHUNK, "use_threads": False}
        filesystems.copy_files(str(file), f"{path}/{name}", filesystems.LocalFileSystem(), system, **options)

    def download(self, name: str, file: Path) -> None:
        """Copy an object to a local file, atomically."""
        system, path = self.file_system()
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.partial")
        source, local = f"{path}/{name}" if name else path, filesystems.LocalFileSystem()
        filesystems.copy_files(source, str(partial), system, local, chunk_size=_CHUNK)
        partial.replace(file)

    def delete(self, name: str) -> None:
        """Delete an object."""
        system, path = self.file_system()
        system.delete_file(f"{path}/{name}")

    def clear(self) -> None:
        """Delete all objects below this folder."""
        for name in self.entries():
            self.delete(name)


@contextmanager
def convert_errors(place: str, setting: str) -> Iterator[None]:
    """Convert errors of a store's client, and of the scratch disk, in the block to an InputError that names the setting."""
    try:
        yield
    except (OSError, ArrowException, failures.BaseError) as error:
        reason = str(error).partition("Debug source:")[0]
        reason = " ".join((reason.partition("non-2xx status code: ")[2] or reason).split())
        if isinstance(error, OSError) and error.errno in _DISK:
            fault = f"a file of this machine cannot be used ({reason[:240]})"
            remedy = f"{SCRATCH} is {_scratch_path()}: free space there, or set it to another writable directory"
        else:
            fault = f"the object store failed ({reason[:240]})"
            remedy = "check the address, the credentials and region in the environment, and AWS_ENDPOINT_URL"
        raise InputError.of(setting, place, fault, remedy) from error


def listing_digest(entries: dict[str, Entry]) -> str:
    """Hash a listing to 16 hex digits, which change when an object is written, added or removed."""
    listing = json.dumps({name: [entry.size, entry.written] for name, entry in sorted(entries.items())})
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


@lru_cache(maxsize=16)
def _control_client(base: str, query: str, bucket: str, region: str, environment: tuple[tuple[str, str], ...]) -> Any:
    """Return obstore's client of a bucket with the options of a URI; another environment gets another client."""
    options = dict(parse_qsl(query))
    client_options: dict[str, Any] = {"allow_http": True, "timeout": REQUEST_TIMEOUT}
    if options.get("tls_verify_certificates", "true").lower() in ("false", "0"):
        client_options["allow_invalid_certificates"] = True
    if authorities := options.get("tls_ca_file_path"):
        client_options["root_certificate"] = Path(authorities).read_bytes()
    common: dict[str, Any] = {"client_options": client_options, "retry_config": {"retry_timeout": RETRY_TIMEOUT}}
    scheme, _, place = base.partition("://")
    protocol = options.get("scheme", "https")
    endpoint = options.get("endpoint_override", "")
    if endpoint and "://" not in endpoint:
        endpoint = f"{protocol}://{endpoint}"
    store: Any
    if scheme == "s3":
        store, settings = clients.S3Store, {"endpoint": endpoint, "region": region}
        common["credential_provider"] = _aws_profile()
    elif scheme in ("gs", "gcs"):
        anonymous = "true" if place.startswith("anonymous@") else ""
        store, settings = clients.GCSStore, {"base_url": endpoint, "skip_signature": anonymous}
    else:
        account, authority = _azure_account(base), options.get("blob_storage_authority", "")
        if authority and not authority.startswith("."):
            endpoint = f"{_azure_scheme(options)}://{authority}/{account}"
        settings = {"account_name": account, "endpoint": endpoint, "client_id": options.get("client_id", "")}
        store = clients.AzureStore
    return store(bucket, config={name: value for name, value in settings.items() if value}, **common)


def _aws_profile() -> Any:
    """Return boto3's credentials where AWS's files may hold them; None where obstore finds them itself.

    Raises:
        InputError: there is such a file, but boto3 is not installed.
    """
    files = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
    held = any(Path(os.environ.get(name, default)).expanduser().is_file() for name, default in files)
    if "AWS_ACCESS_KEY_ID" in os.environ or not (held or "AWS_PROFILE" in os.environ):
        return None
    try:
        provider = importlib.import_module("obstore.auth.boto3")
    except ImportError as error:
        fault, remedy = "credentials in AWS's files need boto3", "pip install boto3, or set AWS_ACCESS_KEY_ID"
        raise InputError.of("AWS_PROFILE", None, fault, remedy) from error
    try:
        return provider.Boto3CredentialProvider()
    except ValueError:  # no credentials there
        return None


def _azure_account(base: str) -> str:
    """Return the account in `abfs://container@account.host/path` or `abfs://account.host/container/path`."""
    host = base.partition("://")[2].rpartition("@")[2].partition("/")[0]
    return host.partition(".")[0] if "." in host else os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")


def _azure_scheme(options: dict[str, str]) -> str:
    return "http" if options.get("enable_tls") == "false" else "https"


def _azure_secret() -> dict[str, str]:
    """Return the key or token of a storage account, which obstore finds itself and pyarrow does not."""
    names = {"account_key": "AZURE_STORAGE_ACCOUNT_KEY", "sas_token": "AZURE_STORAGE_SAS_TOKEN"}
    return next(({option: os.environ[name]} for option, name in names.items() if os.environ.get(name)), {})
