import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from infembed_ray.retrieval.answers import Behind, ScoreQuery, ShardAnswer, ShardQuery, merge, nearest
from infembed_ray.retrieval.filters import FilterError, typed
from infembed_ray.retrieval.shards import Hit, Shard, shard_of
from infembed_ray.retrieval.updates import live_shard
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.updates.write_ahead_log import Change, ChangeLog, Delete, Put
from tests.retrieval.oracle import (
    DIMENSION,
    METADATA,
    Oracle,
    cut_document,
    document,
    open_live,
    score,
    write_shards,
)
from tests.retrieval.test_filters import FILTERS, SCHEMA, answers, many_rows
from tests.retrieval.vectors import unit_vectors
from tests.support.shards import write_shard

IDS = st.sampled_from([f"{n}é" for n in range(12)])
YEARS = st.none() | st.integers(2018, 2022)
PUTS = st.builds(document, IDS, st.integers(0, 10_000), YEARS)
CUT_PUTS = st.builds(cut_document, IDS, st.integers(0, 10_000), YEARS)


class LiveIndex(RuleBasedStateMachine):
    """Shards under puts and deletes, beside the oracle; whole passages, or passages in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize(data=st.data(), chunked=st.booleans(), shards=st.integers(1, 3))
    def publish(self, data: st.DataObject, chunked: bool, shards: int) -> None:
        self.puts, self.chunked = CUT_PUTS if chunked else PUTS, chunked
        base = data.draw(st.lists(self.puts, max_size=10, unique_by=lambda put: put.id))
        self.oracle = Oracle(base)
        self.facts = write_shards(self.root / "v1", base, shards, chunked=chunked)
        self.log = ChangeLog(self.root / "changes", METADATA, DIMENSION, shards, chunked)
        self.open()

    @rule()
    def open(self) -> None:
        self.shards = open_live(self.root / "v1", self.facts, self.root / "changes", chunked=self.chunked)

    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        changes = data.draw(st.lists(self.puts | st.builds(Delete, IDS), min_size=1, max_size=6))
        self.oracle.apply(changes)
        assert self.log.append(changes) == len(self.oracle.states) - 1

    @rule()
    def refresh(self) -> None:
        for shard in self.shards:
            new = shard.sequence < len(self.oracle.states) - 1
            assert shard.refresh() == new
            assert shard.sequence == len(self.oracle.states) - 1

    @rule(seed=st.integers(0, 10_000), k=st.integers(1, 15), since=YEARS)
    def search(self, seed: int, k: int, since: int | None) -> None:
        self.refresh()
        queries = unit_vectors(2, DIMENSION, seed)
        query_of_all = ShardQuery(queries, k, None if since is None else {"year": {"gte": since}})
        answers = [shard.search_many([query_of_all])[0] for shard in self.shards]
        for row, query in enumerate(queries):
            hits = merge(answers, row, k)
            self.oracle.check(hits, query, k, answers[0].sequence, since)

    @rule(ids=st.lists(IDS, unique=True), seed=st.integers(0, 10_000))
    def score(self, ids: list[str], seed: int) -> None:
        self.refresh()
        queries, state = unit_vectors(2, DIMENSION, seed), self.oracle.states[-1]
        for number, shard in enumerate(self.shards):
            scores = shard.scores(ScoreQuery(ids, queries))
            assert (scores.shape, scores.dtype) == ((2, len(ids)), np.float32)
            for id, scores_of in zip(ids, scores.T, strict=True):
                there = id in state and shard_of(id, len(self.shards)) == number
                expected = [score(state[id], query) for query in queries] if there else [np.nan] * 2
                np.testing.assert_allclose(scores_of, expected, atol=1e-6)

    @rule(id=IDS)
    def get(self, id: str) -> None:
        self.refresh()
        expected = self.oracle.states[-1].get(id)
        hits = [shard.get(id) for shard in self.shards]
        assert [hit for hit in hits if hit] == (
            [Hit(id, 0.0, expected.text, expected.metadata)] if expected else []  # in one shard at most
        )

    @invariant()
    def counts(self) -> None:
        base, state = self.oracle.states[0], self.oracle.states[self.shards[0].sequence]
        assert sum(len(shard) for shard in self.shards) == len(state)
        differ = [id for id in base.keys() | state.keys() if base.get(id) is not state.get(id)]
        assert sum(shard.changed for shard in self.shards) == len(differ)


@pytest.mark.integration
def test_searches_under_puts_and_deletes_agree_with_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_shard, "_DEAD_ROWS", 6)
    monkeypatch.setattr(live_shard, "_MAX_CHUNKS", 3)
    run_state_machine_as_test(LiveIndex, settings=settings(max_examples=25, stateful_step_count=15, deadline=None))


def one_shard(root: Path, base: list[Put], lexical: bool = False) -> LiveShard:
    facts = write_shards(root / "v1", base, 1, lexical=lexical)
    return open_live(root / "v1", facts, root / "changes")[0]


def log_of(root: Path) -> ChangeLog:
    return ChangeLog(root / "changes", METADATA, DIMENSION)


def ids_of(shard: LiveShard, k: int = 100, **filter: Any) -> list[str]:
    (answer,) = shard.search_many([ShardQuery(unit_vectors(1, DIMENSION), k, filter or None)])
    assert not isinstance(answer, Exception)
    return [hit.id for hit in answer.hits[0]]


@pytest.mark.integration
def test_searches_while_changes_are_applied_answer_one_state_each(tmp_path: Path) -> None:
    base = [document(f"d{n}", n, 2018 + n % 5) for n in range(60)]
    oracle, log = Oracle(base), ChangeLog(tmp_path / "changes", METADATA, DIMENSION, 2)
    shards = open_live(tmp_path / "v1", write_shards(tmp_path / "v1", base, 2), tmp_path / "changes")
    queries = unit_vectors(4, DIMENSION, seed=1)
    answers: list[tuple[int, int, tuple[int, list[Hit]]]] = []
    faults: list[BaseException] = []
    done = threading.Event()

    def guarded(work: Any) -> threading.Thread:
        def loop() -> None:
            try:
                while not done.is_set():
                    work()
            except BaseException as error:
                faults.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    def refresh() -> None:
        for shard in shards:
            shard.refresh()

    def search() -> None:
        since = int(np.random.default_rng().integers(2017, 2023))
        filter = {"year": {"gte": since}} if since > 2017 else None
        asked = [ShardQuery(queries[:2], 8, filter), ShardQuery(queries[2:], 8, filter)]
        by_shard = [shard.search_many(asked) for shard in shards]
        if all(answer.sequence == by_shard[0][0].sequence for shard in by_shard for answer in shard):
            for n, parts in enumerate(zip(*by_shard, strict=True)):
                for row in range(2):
                    answers.append(
                        (
                            parts[0].sequence,
                            since,
                            (2 * n + row, nearest([hit for part in parts for hit in part.hits[row]], 8)),
                        )
                    )

    threads = [guarded(refresh), guarded(refresh), *(guarded(search) for _ in range(3))]
    rng = np.random.default_rng(0)
    try:
        for step in range(80):
            changes: list[Change] = []
            for n in rng.integers(0, 80, 5).tolist():
                gone = rng.random() < 0.4
                changes.append(Delete(f"d{n}") if gone else document(f"d{n}", 1000 * step + n, 2018 + n % 5))
            oracle.apply(changes)
            log.append(changes)
            time.sleep(0.002)
        while not faults and any(shard.sequence < 80 for shard in shards):
            time.sleep(0.001)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    search()
    assert not faults
    assert answers[-1][0] == 80
    assert len({sequence for sequence, _, _ in answers}) > 1
    for sequence, since, (row, hits) in answers[-1000:]:
        oracle.check(hits, queries[row], 8, sequence, since if since > 2017 else None)


@pytest.mark.integration
@pytest.mark.parametrize("factory", ["HNSW32", "IVF16,SQ8"])
def test_graphs_and_lists_return_no_tombstone_and_keep_their_recall(tmp_path: Path, factory: str) -> None:
    base = [document(f"d{n}", n, 2000 + n % 40) for n in range(800)]
    oracle = Oracle(base)
    facts = write_shards(tmp_path / "v1", base, 1, factory)
    (shard,) = open_live(tmp_path / "v1", facts, tmp_path / "changes")
    changes: list[Change] = [Delete(f"d{n}") for n in range(0, 800, 3)]
    changes += [document(f"d{n}", 5000 + n, 2000) for n in range(0, 800, 4)]
    oracle.apply(changes)
    log_of(tmp_path).append(changes)
    shard.refresh()
    queries = unit_vectors(40, DIMENSION, seed=3)
    asked = ["d1", "d3", "d4", "d799"]  # of the base, deleted, put, of the base
    expected = [queries @ oracle.states[1][id].vector if id != "d3" else np.full(40, np.nan) for id in asked]
    np.testing.assert_allclose(shard.scores(ScoreQuery(asked, queries)), np.stack(expected, axis=1), atol=1e-6)
    for since in (None, 2020, 2038, 2039):
        filter = None if since is None else {"year": {"gte": since}}
        (answer,) = shard.search_many([ShardQuery(queries, 10, filter)])
        assert not isinstance(answer, Exception)
        state = [put for put in oracle.states[1].values() if since is None or put.metadata["year"] >= since]
        exact = queries.astype(np.float64) @ np.stack([put.vector for put in state]).astype(np.float64).T
        ids = [put.id for put in state]
        recall = []
        for row, hits in enumerate(answer.hits):
            best = {ids[place] for place in np.argsort(-exact[row])[:10]}
            assert len(hits) == 10
            for hit in hits:
                np.testing.assert_allclose(hit.score, exact[row, ids.index(hit.id)], atol=1e-5)
            recall.append(len(best & {hit.id for hit in hits}) / 10)
        assert np.mean(recall) >= 0.95


@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(written=FILTERS)
@pytest.mark.integration
def test_a_filter_lets_through_what_plain_python_does(all_types: LiveShard, written: dict[str, Any]) -> None:
    (answer,) = all_types.search_many([ShardQuery(unit_vectors(1, 2), 100, written)])
    assert not isinstance(answer, Exception)
    assert {hit.id: hit.metadata for hit in answer.hits[0]} == answers(written)


@pytest.fixture(scope="module")
def all_types(tmp_path_factory: pytest.TempPathFactory) -> LiveShard:
    """Passages with values of each type, two thirds of them put after the build."""
    rows, vectors, root = many_rows(), unit_vectors(90, 2), tmp_path_factory.mktemp("all_types")
    columns = {f: [None if row[f] is None else typed(row[f], kind) for row in rows[:60]] for f, kind in SCHEMA.items()}
    facts = write_shard(
        root / "shard-00000", [row["id"] for row in rows[:60]], ["t"] * 60, vectors[:60], columns, SCHEMA
    )
    log = ChangeLog(root / "changes", SCHEMA, 2)
    log.append([Put(row["id"], "t", vectors[0], {f: row[f] for f in SCHEMA}) for row in rows[30:]])
    return LiveShard(Shard.open(root, facts), log, 0, 0)


def test_equal_scores_come_by_id_descending_from_base_and_changes_alike(tmp_path: Path) -> None:
    same = document("x", 7).vector
    shard = one_shard(tmp_path, [Put(id, "base", same) for id in "bdf"])
    log_of(tmp_path).append([Put(id, "new", same) for id in "acegd"])
    shard.refresh()
    assert ids_of(shard) == list("gfedcba")
    assert ids_of(shard, k=3) == list("gfe")
    assert shard.get("d") == Hit("d", 0.0, "new", {"year": None, "day": None})


def test_requests_are_answered_together_as_they_are_alone(tmp_path: Path) -> None:
    shard = one_shard(tmp_path, [document(f"d{n}", n, 2018 + n % 5) for n in range(30)], lexical=True)
    log_of(tmp_path).append([document(f"d{n}", 100 + n, 2018 + n % 5) for n in range(20, 40)])
    shard.refresh()
    queries = [
        ShardQuery(unit_vectors(n, DIMENSION, seed), k, filter)
        for seed, (n, k, filter) in enumerate(
            [
                (1, 5, None),
                (3, 5, None),
                (2, 7, {"year": 2020}),
                (1, 7, {"year": {"eq": 2020}}),
                (0, 5, None),
                (1, 99, {}),
            ]
        )
    ]
    queries += [ShardQuery(unit_vectors(1, DIMENSION, 9 + n), 3, texts=[f"d1 of {n}"], depth=5) for n in range(2)]
    calls: list[int] = []
    search_rows = shard.base.search_rows
    shard.base.search_rows = lambda vectors, k, keep: (calls.append(len(vectors)), search_rows(vectors, k, keep))[1]  # type: ignore[assignment, method-assign, func-returns-value]
    answers = shard.search_many(queries)
    assert calls == [4, 3, 1, 2]  # same k, filter and channels: one call
    for query, answer in zip(queries, answers, strict=True):
        (alone,) = shard.search_many([query])
        assert not isinstance(alone, Exception)
        assert not isinstance(answer, Exception)
        assert len(answer.hits) == len(query.vectors)
        for hits, expected in zip(answer.hits, alone.hits, strict=True):
            assert [(hit.id, hit.text) for hit in hits] == [(hit.id, hit.text) for hit in expected]
            np.testing.assert_allclose([hit.score for hit in hits], [hit.score for hit in expected], atol=1e-6)
        assert (answer.lexical is None) == (query.texts is None)
        np.testing.assert_allclose(answer.lexical or [], alone.lexical or [], rtol=1e-6)
        assert answer.sequence == 1


def test_a_request_waits_for_its_sequence_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = one_shard(tmp_path, [document("a", 1)])
    query = unit_vectors(1, DIMENSION)
    early, late = shard.search_many([ShardQuery(query, 5), ShardQuery(query, 5, min_sequence=1)])
    assert isinstance(early, ShardAnswer)
    assert isinstance(late, Behind)
    assert late.args == (0,)
    log_of(tmp_path).append([document("b", 2)])
    (answer,) = shard.search_many([ShardQuery(query, 5, min_sequence=1)])  # reads the log itself
    assert isinstance(answer, ShardAnswer)
    assert ({hit.id for hit in answer.hits[0]}, answer.sequence) == (set("ab"), 1)
    log_of(tmp_path).append([document("c", 3)])
    (log_of(tmp_path).directory / f"{2:012d}.arrow").write_bytes(b"damaged")
    (answer,) = shard.search_many([ShardQuery(query, 5, min_sequence=2)])
    assert isinstance(answer, Behind)


def test_an_invalid_request_fails_alone(tmp_path: Path) -> None:
    shard = one_shard(tmp_path, [document("a", 1, 2020)])
    query = unit_vectors(1, DIMENSION)
    *wrong, right = shard.search_many(
        [
            ShardQuery(query, 5, {"yaer": 2020}),
            ShardQuery(query, 0),
            ShardQuery(query[:, :2], 5),
            ShardQuery(query[0], 5),
            ShardQuery(query * np.nan, 5),
            ShardQuery(query, 5),
        ]
    )
    assert isinstance(wrong[0], FilterError)
    assert [str(error) for error in wrong[1:]] == [
        "k=0: must be at least 1",
        "query vectors must be (n, 6) finite numbers, got shape (1, 2)",
        "query vectors must be (n, 6) finite numbers, got shape (6,)",
        "query vectors must be (n, 6) finite numbers, got shape (1, 6)",
    ]
    assert not isinstance(right, Exception)
    assert right.hits[0][0].id == "a"


def test_the_content_is_all_documents_by_id_with_their_vectors(tmp_path: Path) -> None:
    base = [document(f"d{n}", n, n) for n in range(10)]
    shard = one_shard(tmp_path, base)
    oracle = Oracle(base)
    changes = [
        Delete("d3"),
        document("d5", 50, 5),
        document("é", 60),
        document("B", 61),
        Delete("B"),
        document("A", 62),
    ]
    oracle.apply(changes)
    log_of(tmp_path).append(changes)
    shard.refresh()
    expected = sorted(oracle.states[-1].items(), key=lambda item: item[0].encode())
    for rows_at_once in (3, 100):
        parts = list(shard.content(rows_at_once))
        ids = [id for passages, _ in parts for id in passages.column("id").to_pylist()]
        texts = [text for passages, _ in parts for text in passages.column("text").to_pylist()]
        assert (ids, texts) == ([id for id, _ in expected], [put.text for _, put in expected])
        vectors = np.concatenate([vectors for _, vectors in parts])
        np.testing.assert_array_equal(vectors, np.stack([put.vector for _, put in expected]))
        assert max(len(passages) for passages, _ in parts) <= rows_at_once


def test_a_search_copies_only_the_texts_it_returns(tmp_path: Path) -> None:
    shard = one_shard(tmp_path, [])
    for n in range(20):
        log_of(tmp_path).append([document(f"d{n}", n, text="x" * 200_000)])
        shard.refresh()
    copied = pa.proxy_memory_pool(pa.system_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(copied)
    try:
        (answer,) = shard.search_many([ShardQuery(unit_vectors(1, DIMENSION), 1)])
    finally:
        pa.set_memory_pool(before)
    assert not isinstance(answer, Exception)
    assert [len(hits[0].text) for hits in answer.hits] == [200_000]
    assert 0 < copied.max_memory() < 1_000_000
