"""A local S3-compatible server (moto) with one bucket."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyarrow import fs

BUCKET = "bucket"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}


class Faults:
    """Faults of a server, which a test switches on and off."""

    refuse_writes = False
    """Whether it answers 503 to every PUT and POST."""

    def wrap(self, application: Any) -> Any:
        """Return a WSGI application with these faults."""

        def faulty(environment: dict[str, Any], start_response: Any) -> Any:
            if self.refuse_writes and environment["REQUEST_METHOD"] in ("PUT", "POST"):
                environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
                start_response("503 Service Unavailable", [("Content-Length", "0")])
                return [b""]
            return application(environment, start_response)

        return faulty


@contextmanager
def server(faults: Faults | None = None) -> Iterator[dict[str, str]]:
    """Serve while the block runs; yield the environment variables that direct pyarrow to it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    if faults is not None:
        moto._server.app = faults.wrap(moto._server.app)
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
