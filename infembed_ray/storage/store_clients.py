"""Clients of object stores: pyarrow's for bulk bytes, obstore's for conditional writes.

Both read credentials and regions from the environment, under the names that each cloud's own tools use, and find the identity of
the machine or pod. A URI names another S3-compatible store: `s3://bucket/path?endpoint_override=minio:9000&scheme=http`.
"""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from obstore import store as clients
from pyarrow import fs as filesystems

from infembed_ray.errors import InputError

REQUEST_TIMEOUT = timedelta(seconds=10)
RETRY_TIMEOUT = timedelta(seconds=20)
"""Limits of a control request. All attempts of a write begin within the second one, and each takes at most both together,
so a write ends before another process may take over its lease (`leases.SECONDS`)."""

_CLOUD_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")


def file_system(base: str, query: str) -> tuple[Any, str]:
    """Return pyarrow's file system of a store, and the path of a folder in it."""
    system, path = filesystems.FileSystem.from_uri(f"{base}?{query}" if query else base)
    if system.type_name == "abfs" and (secret := _azure_secret()):
        options = dict(parse_qsl(query))
        hosts = {name: options[name] for name in ("blob_storage_authority", "dfs_storage_authority") if name in options}
        schemes = dict.fromkeys(("blob_storage_scheme", "dfs_storage_scheme"), _azure_scheme(options))
        system = filesystems.AzureFileSystem(_azure_account(base), **secret, **hosts, **schemes)
    return system, path.strip("/")  # pyarrow may keep a slash at either end of an abfs path


def control_client(base: str, query: str, bucket: str, region: str) -> Any:
    """Return obstore's client of a bucket with the options of a URI; another environment gets another client."""
    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_CLOUD_VARIABLES)))
    return _control_client(base, query, bucket, region, environment)


@lru_cache(maxsize=16)
def _control_client(base: str, query: str, bucket: str, region: str, environment: tuple[tuple[str, str], ...]) -> Any:
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
    if scheme == "s3":
        settings = {"endpoint": endpoint, "region": region}
        return clients.S3Store(bucket, config=_given(settings), credential_provider=_aws_profile(), **common)
    if scheme in ("gs", "gcs"):
        anonymous = place.startswith("anonymous@")
        settings = {"base_url": endpoint, "skip_signature": "true" if anonymous else ""}
        return clients.GCSStore(bucket, config=_given(settings), **common)
    account = _azure_account(base)
    authority = options.get("blob_storage_authority", "")
    if authority and not authority.startswith("."):
        endpoint = f"{_azure_scheme(options)}://{authority}/{account}"
    settings = {"account_name": account, "endpoint": endpoint, "client_id": options.get("client_id", "")}
    return clients.AzureStore(bucket, config=_given(settings), **common)


def _given(settings: dict[str, str]) -> Any:
    return {name: value for name, value in settings.items() if value}


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
        raise InputError.of(
            "AWS_PROFILE",
            None,
            "credentials in AWS's files need boto3",
            "pip install 'infembed-ray[aws]', or set AWS_ACCESS_KEY_ID",
        ) from error
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
    found = {option: os.environ[name] for option, name in names.items() if os.environ.get(name)}
    return dict(list(found.items())[:1])
