"""FAISS runs on one thread in these tests: graphs are reproducible, and threads do not spin on a busy machine."""

from collections.abc import Iterator
from uuid import uuid4

import faiss
import pytest

from infembed_ray.retrieval.milvus import Milvus, MilvusAddress
from tests.support.milvus import milvus_lite

faiss.omp_set_num_threads(1)


@pytest.fixture(scope="session")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The beginning of addresses at a Milvus Lite server."""
    with milvus_lite(tmp_path_factory.mktemp("milvus")) as address:
        yield address


@pytest.fixture
def engine(milvus: str) -> Milvus:
    """An alias of its own."""
    return Milvus(MilvusAddress.parse(f"{milvus}/test_{uuid4().hex[:8]}", "output"))
