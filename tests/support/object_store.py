"""A local S3-compatible server (moto) with one bucket."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pyarrow import fs

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
