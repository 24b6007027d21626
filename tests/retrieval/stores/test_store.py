from __future__ import annotations

import pytest

from infembed_ray.errors import InputError
from infembed_ray.retrieval.stores.address import is_address
from infembed_ray.retrieval.stores.store import Address


@pytest.mark.parametrize(
    ("value", "url", "database", "alias"),
    [
        ("milvus+http://localhost:19530/passages", "http://localhost:19530", "", "passages"),
        ("milvus+https://in01.example.com/team/docs_2", "https://in01.example.com", "team", "docs_2"),
    ],
)
def test_an_address_names_server_database_and_alias(value: str, url: str, database: str, alias: str) -> None:
    address = Address.parse(value, "output")
    assert (address.url, address.database, address.alias) == (url, database, alias)
    assert str(address) == value
    assert is_address(value)


@pytest.mark.parametrize("value", ["/data/index", "s3://bucket/index", "milvus://host/a", "milvus+http"])
def test_other_places_are_no_addresses(value: str) -> None:
    assert not is_address(value)


@pytest.mark.parametrize(
    "value", ["milvus+http://host:1", "milvus+http:///passages", "milvus+http://host/a-b", "milvus+http://host/a/b/c"]
)
def test_an_incomplete_address_is_refused(value: str) -> None:
    with pytest.raises(InputError, match=r"index=.*: must be milvus\+http://HOST:PORT/ALIAS"):
        Address.parse(value, "index")


def test_an_address_with_credentials_is_refused_without_showing_them() -> None:
    with pytest.raises(InputError, match=r"put them into MY_TOKEN \(user:password") as refused:
        Address.parse("milvus+http://root:secret@host:19530/passages", "index", "MY_TOKEN")
    assert "secret" not in str(refused.value)
