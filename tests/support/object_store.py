"""A local S3-compatible server (moto) with one bucket."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import listing
from infembed_ray.storage.steps import STATES
from tests.support.ports import free_port
from tests.support.waiting import answers, wait_until

BUCKET = "bucket"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}


@contextmanager
def server() -> Iterator[dict[str, str]]:
    """Serve while the block runs; yield the environment variables that direct pyarrow to it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    environment = ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    os.environ.update(environment)
    fs.S3FileSystem(endpoint_override=f"{host}:{port}", scheme="http", allow_bucket_creation=True).create_dir(BUCKET)
    try:
        yield environment
    finally:
        for name in environment:
            del os.environ[name]
        moto.stop()


@contextmanager
def server_process(directory: Path, credentials: Mapping[str, str] = ENVIRONMENT) -> Iterator[dict[str, str]]:
    """Serve in a process of its own, which logs to a directory; yield the environment variables, set here as well."""
    port = free_port()
    with (directory / "moto.log").open("w") as stream:
        moto = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=stream, stderr=stream
        )
    environment = {**credentials, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            wait_until(lambda: answers(environment["AWS_ENDPOINT_URL"]))
            system(environment, allow_bucket_creation=True).create_dir(BUCKET)
            yield environment
        finally:
            moto.kill()
            moto.wait()


def system(environment: Mapping[str, str], **options: Any) -> fs.S3FileSystem:
    """Return pyarrow's own client of a server."""
    endpoint = environment["AWS_ENDPOINT_URL"].removeprefix("http://")
    return fs.S3FileSystem(endpoint_override=endpoint, scheme="http", **options)


def files_in(store: fs.S3FileSystem, folder: str, without: str | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield path and bytes of every file in a folder of the store, except below folders of the name `without`."""
    for info in store.get_file_info(fs.FileSelector(folder, recursive=True)):
        if info.type == fs.FileType.File and f"/{without}/" not in info.path:
            with store.open_input_stream(info.path) as stream:
                yield info.path, stream.read()


def published(store: fs.S3FileSystem, folder: str) -> dict[str, bytes]:
    """Return name -> bytes of the newest output in a folder, without training states; shards without their attempt's id."""
    with store.open_input_stream(f"{folder}/latest") as stream:
        root = f"{folder}/{stream.read().decode().strip()}"
    return {
        re.sub(r"(shard-\d+)-[0-9a-f]+/", r"\1/", path.removeprefix(f"{root}/")): content
        for path, content in files_in(store, root, without=STATES)  # states have hundreds of MB
    }


def upload(place: str | Path, folder: Folder) -> None:
    """Copy a file, or all files of a directory, to a store."""
    for name in listing(Path(place)):
        target = folder / name
        target.parent.upload(Path(place) / name, target.name)
