"""A real Milvus Lite server for tests, over gRPC as a Milvus server is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def milvus_lite(directory: Path, port: int = 0) -> Iterator[str]:
    """Serve a data directory while the block runs; gives the beginning of the addresses of settings."""
    server_module = pytest.importorskip("milvus_lite.adapter.grpc.server", reason="pip install milvus-lite")
    server, database, port = server_module.start_server_in_thread(str(directory), port=port)
    try:
        yield f"milvus+http://127.0.0.1:{port}"
    finally:
        server.stop(grace=2).wait()
        database.close()
