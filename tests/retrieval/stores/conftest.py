from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from infembed_ray.retrieval.stores.milvus import Milvus
from infembed_ray.retrieval.stores.store import Address
from tests.support.milvus import milvus_lite


@pytest.fixture(scope="session")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The beginning of addresses at a Milvus Lite server."""
    with milvus_lite(tmp_path_factory.mktemp("milvus")) as address:
        yield address


@pytest.fixture
def engine(milvus: str) -> Milvus:
    """An alias of its own."""
    return Milvus(Address.parse(f"{milvus}/test_{uuid4().hex[:8]}", "output"))
