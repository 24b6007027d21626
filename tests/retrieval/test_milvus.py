"""The store against brute force, on a real Milvus Lite."""

import itertools
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.retrieval.answers import ScoreQuery
from infembed_ray.retrieval.milvus import Milvus, MilvusAddress, MilvusStore, StoreFault, is_address
from infembed_ray.retrieval.passages import schema
from infembed_ray.retrieval.shards import Hit
from infembed_ray.retrieval.updates.write_ahead_log import Change, ChangeError, Delete, Put, typed_metadata
from infembed_ray.retrieval.versions import IndexFacts
from tests.retrieval.oracle import DIMENSION, METADATA, Oracle, document
from tests.retrieval.test_filters import FILTERS, SCHEMA, answers, many_rows
from tests.retrieval.vectors import unit_vectors
from tests.support.milvus import milvus_lite
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

AWKWARD = ["1é", "\"quoted'", "back\\slash", "new\nline\r\t", "0", "in [1]", "😀\x00\u2028"]
IDS = st.sampled_from(AWKWARD)
YEARS = st.none() | st.integers(2018, 2022)
PUTS = st.builds(document, IDS, st.integers(0, 10_000), YEARS)
CHANGES = st.lists(PUTS | st.builds(Delete, IDS), min_size=1, max_size=6)
IDENTITY = "0123456789ab"
NUMBERS = itertools.count()


def manifest(passages: int, metadata: Mapping[str, FieldType] = METADATA, dimension: int = DIMENSION) -> dict[str, Any]:
    facts = IndexFacts(
        encoder="e",
        model="m",
        template="t",
        dimension=dimension,
        passages=passages,
        metadata=metadata,
        shards=[],
        lineage="l",
    )
    return {"created": f"2026-01-01T00:00:{next(NUMBERS) % 60:02d}", "index": facts.as_json()}


def insert(engine: Milvus, identity: str, documents: Sequence[Put]) -> None:
    rows = [
        {"id": d.id, "text": d.text, **{name: _typed(name, d.metadata.get(name)) for name in METADATA}}
        for d in documents
    ]
    if rows:
        engine.insert(identity, pa.Table.from_pylist(rows, schema(METADATA)), np.array([d.vector for d in documents]))


def _typed(name: str, value: Any) -> Any:
    return date.fromisoformat(value) if METADATA[name] == "date" and value is not None else value


def publish(
    engine: Milvus, documents: Sequence[Put], identity: str = IDENTITY, kind: str | None = "FLAT"
) -> MilvusStore:
    engine.begin(identity, METADATA, DIMENSION, kind)
    insert(engine, identity, documents)
    engine.finish(identity, manifest(len(documents)))
    return engine.open(identity)


def test_searches_under_puts_and_deletes_agree_with_brute_force(engine: Milvus) -> None:
    class Changed(RuleBasedStateMachine):
        """A collection under puts and deletes, beside the oracle."""

        @initialize(base=st.lists(PUTS, max_size=7, unique_by=lambda put: put.id))
        def publish(self, base: list[Put]) -> None:
            self.oracle, self.store, self.last = Oracle(base), publish(engine, base), 0

        @rule(changes=CHANGES)
        def change(self, changes: list[Change]) -> None:
            self.oracle.apply(changes)
            sequence = self.store.change(changes)
            assert sequence >= self.last
            self.last = sequence

        @rule(seed=st.integers(0, 10_000), k=st.integers(1, 9), since=YEARS)
        def search(self, seed: int, k: int, since: int | None) -> None:
            queries = unit_vectors(2, DIMENSION, seed)
            hits, sequence = self.store.search(queries, k, None if since is None else {"year": {"gte": since}})
            assert sequence >= self.last
            for query, of_query in zip(queries, hits, strict=True):
                self.oracle.check(of_query, query, k, len(self.oracle.states) - 1, since)

        @rule(ids=st.lists(IDS, min_size=1, unique=True), seed=st.integers(0, 10_000))
        def score(self, ids: list[str], seed: int) -> None:
            queries, state = unit_vectors(2, DIMENSION, seed), self.oracle.states[-1]
            expected = [
                np.float64(queries) @ np.float64(state[id].vector) if id in state else [np.nan] * 2 for id in ids
            ]
            np.testing.assert_allclose(self.store.scores(ScoreQuery(ids, queries)).T, expected, atol=1e-6)

        @rule(id=IDS)
        def get(self, id: str) -> None:
            expected = self.oracle.states[-1].get(id)
            assert self.store.get(id) == (expected and Hit(id, 0.0, expected.text, expected.metadata))

    run_state_machine_as_test(Changed, settings=settings(max_examples=10, stateful_step_count=15, deadline=None))


@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(written=FILTERS)
def test_a_filter_lets_through_what_plain_python_does(all_types: MilvusStore, written: dict[str, Any]) -> None:
    ((hits,), _) = all_types.search(unit_vectors(1, 2), 100, written)
    assert {hit.id: hit.metadata for hit in hits} == answers(written)


@pytest.fixture(scope="module")
def all_types(milvus: str) -> MilvusStore:
    """Passages with values of each type, half of them put after the build."""
    rows, vectors = many_rows(), unit_vectors(90, 2)
    typed = [{"id": row["id"], "text": "t", **typed_metadata("d", fields(row), SCHEMA)} for row in rows]
    engine = Milvus(MilvusAddress.parse(f"{milvus}/all_types", "output"))
    engine.begin(IDENTITY, SCHEMA, 2, "FLAT")
    engine.insert(IDENTITY, pa.Table.from_pylist(typed[:60], schema(SCHEMA)), vectors[:60])
    engine.finish(IDENTITY, manifest(60, SCHEMA, 2))
    store = engine.open(IDENTITY)
    store.change([Put(row["id"], "t", vectors[0], fields(row)) for row in rows[30:]])
    return store


def test_a_list_that_milvus_cannot_hold_is_refused_by_name(all_types: MilvusStore) -> None:
    with pytest.raises(ChangeError, match="'long': its tags has 80004 bytes, Milvus stores 65535"):
        all_types.change([Put("long", "t", unit_vectors(1, 2)[0], {"tags": ["é" * 40_000]})])


def fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {field: row[field] for field in SCHEMA}


def test_hits_with_equal_scores_are_ordered_by_id(engine: Milvus) -> None:
    vector = unit_vectors(1, DIMENSION)
    store = publish(engine, [Put(id, "t", vector[0], {}) for id in "cabd"])
    ((hits,), _) = store.search(vector, 4)
    assert [hit.id for hit in hits] == ["d", "c", "b", "a"]


def test_an_interrupted_build_is_not_served_and_starts_over(engine: Milvus) -> None:
    documents = [document(f"d{n}", n) for n in range(5)]
    engine.begin(IDENTITY, METADATA, DIMENSION, None)
    insert(engine, IDENTITY, documents[:3])
    assert engine.versions() == []
    with pytest.raises(StoreFault, match="no index there; build one with"):
        engine.current()
    store = publish(engine, documents)
    ((hits,), _) = store.search(unit_vectors(1, DIMENSION), 10)
    assert {hit.id for hit in hits} == {f"d{n}" for n in range(5)}
    assert engine.current().id == IDENTITY


def test_a_build_with_missing_passages_leaves_the_alias(engine: Milvus) -> None:
    publish(engine, [document("a", 1)])
    other = "b" * 12
    engine.begin(other, METADATA, DIMENSION, None)
    insert(engine, other, [document("a", 1)])
    with pytest.raises(StoreFault, match=r"holds 1 of 2 passages.*run the same command again"):
        engine.finish(other, manifest(2))
    assert [version.id for version in engine.versions()] == [IDENTITY]
    assert engine.current().id == IDENTITY


def test_the_alias_rolls_back_to_a_version_that_stays(engine: Milvus) -> None:
    other = "b" * 12
    first, second = publish(engine, [document("a", 1)]), publish(engine, [document("b", 2)], other)
    assert engine.current().id == other
    engine.use(IDENTITY)
    assert [(version.id, version.current) for version in engine.versions()] == [(IDENTITY, True), (other, False)]
    assert "recall_at_10" not in engine.current().manifest["index"]  # nothing has measured it
    assert first.get("a")  # open stores keep their version
    assert second.get("b")
    assert second.get("a") is None


def test_a_restarted_server_is_ready_again(tmp_path: Path) -> None:
    port = free_port()
    with milvus_lite(tmp_path, port) as address:
        store = publish(Milvus(MilvusAddress.parse(f"{address}/a", "index"), 5), [document("a", 1)])
    with pytest.raises(StoreFault, match=r"no Milvus server answers there \(.*\); start it"):
        Milvus(MilvusAddress.parse(f"{address}/a", "index"), 1)
    with milvus_lite(tmp_path, port):
        wait_until(lambda: ready(store), 30)
        ((hits,), _) = store.search(unit_vectors(1, DIMENSION), 1)
        assert [hit.id for hit in hits] == ["a"]


def ready(store: MilvusStore) -> bool:
    try:
        return store.ready()
    except StoreFault:  # gRPC waits between two attempts to connect
        return False


def test_what_milvus_cannot_hold_is_refused_by_name(engine: Milvus) -> None:
    with pytest.raises(InputError, match=r"metadata\.pub date: .* columns\.<that name>=pub date"):
        engine.begin(IDENTITY, {"pub date": "string"}, DIMENSION, None)
    long = document("long", 1, text="é" * 40_000)
    store = publish(engine, [])
    with pytest.raises(InputError, match="'long': its text has 80000 bytes, Milvus stores 65535; split"):
        insert(engine, IDENTITY, [long])
    with pytest.raises(ChangeError, match="'long': its text has 80000 bytes"):
        store.change([document("a", 1), long])
    assert store.get("a") is None
    with pytest.raises(ChangeError, match="'broken': its vector must be finite and of shape \\(6,\\)"):
        store.change([document("a", 1), Put("broken", "t", np.full(DIMENSION, np.nan, np.float32), {})])
    assert store.get("a") is None
    with pytest.raises(ChangeError, match="'color' is no column"):
        store.change([Put("a", "t", unit_vectors(1, DIMENSION)[0], {"color": 1})])


def test_an_alias_of_another_application_is_kept(engine: Milvus, milvus: str) -> None:
    publish(engine, [document("a", 1)])
    taken = Milvus(MilvusAddress.parse(f"{milvus}/{engine.address.alias}_{IDENTITY}", "output"))
    with pytest.raises(
        StoreFault, match="names a collection there that `infembed index` did not build; choose another"
    ):
        taken.begin(IDENTITY, METADATA, DIMENSION, None)


@pytest.mark.parametrize(
    ("value", "url", "database", "alias"),
    [
        ("milvus+http://localhost:19530/passages", "http://localhost:19530", "", "passages"),
        ("milvus+https://in01.example.com/team/docs_2", "https://in01.example.com", "team", "docs_2"),
    ],
)
def test_an_address_names_server_database_and_alias(value: str, url: str, database: str, alias: str) -> None:
    address = MilvusAddress.parse(value, "output")
    assert (address.url, address.database, address.alias) == (url, database, alias)
    assert str(address) == value
    assert is_address(value)
    assert not any(map(is_address, ("/data/index", "s3://bucket/index", "milvus://host/a", "milvus+http")))


@pytest.mark.parametrize(
    "value", ["milvus+http://host:1", "milvus+http:///passages", "milvus+http://host/a-b", "milvus+http://host/a/b/c"]
)
def test_an_incomplete_address_is_refused(value: str) -> None:
    with pytest.raises(InputError) as refused:
        MilvusAddress.parse(value, "index")
    assert [(fault.setting, fault.value) for fault in refused.value.faults] == [("index", value)]


def test_an_address_with_credentials_is_refused_without_showing_them() -> None:
    with pytest.raises(InputError, match="INFEMBED_STORE_TOKEN") as refused:
        MilvusAddress.parse("milvus+http://root:secret@host:19530/passages", "index")
    assert "secret" not in str(refused.value)
