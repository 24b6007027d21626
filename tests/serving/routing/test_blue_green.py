"""A release over real shards in this process, with an encoder that draws vectors from the texts."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest

from infembed_ray.config.serving import RerankSettings, ServeSettings
from infembed_ray.retrieval.shards import Build, Shard, shard_of
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog, LogFault
from infembed_ray.serving import explaining, schema
from infembed_ray.serving.encoder.batching import Embedded, QueueFull
from infembed_ray.serving.http.app import create_app
from infembed_ray.serving.http.auth import ApiKeys
from infembed_ray.serving.release import CollectionSpec, EncoderArguments, IndexArguments
from infembed_ray.serving.routing import blue_green, encoder_calls, fan_out, micro_batching, retries
from infembed_ray.serving.routing.blue_green import Release
from infembed_ray.serving.routing.encoder_calls import EncoderCalls, EncoderInputs
from infembed_ray.serving.routing.reranking import RerankStage
from infembed_ray.serving.service import (
    Document,
    Query,
    ReadOnly,
    ReplicaLost,
    Search,
    Service,
    ShardState,
    Stuck,
    TooManyChanges,
)
from tests.support.shards import write_shard

DIMENSION = 8
PASSAGES = {f"p{i}": f"text {i}" for i in range(60)}
SHARDS = 3


def vector(text: str) -> np.ndarray:
    drawn = np.random.default_rng(list(text.encode())).standard_normal(DIMENSION).astype(np.float32)
    return drawn / np.linalg.norm(drawn)


class Encoder:
    """Encoder deployment that records its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.timeouts: list[float] = []
        self.held: asyncio.Event | None = None

    async def __call__(self, method: str, *arguments: Any) -> Any:
        if method == "ready":
            return True
        items, timeout_s = arguments
        self.calls.append(len(items))
        self.timeouts.append(timeout_s)
        await (self.held.wait() if self.held else asyncio.sleep(0.001))
        answers = []
        for item in items:
            texts = (
                list(item.inputs) if isinstance(item, EncoderInputs) else [f"{q.instruction} {q.text}" for q in item]
            )
            answers.append(Embedded(np.stack([vector(text) for text in texts]), len(texts)))
        return pickle.loads(pickle.dumps(answers))


class OneShard:
    """Deployment of one shard; raises the errors in `failing`, one per call."""

    def __init__(self, live: LiveShard) -> None:
        self.live = live
        self.failing: list[Exception] = []
        self.silent = False

    async def __call__(self, method: str, *arguments: Any) -> Any:
        if self.silent:
            await asyncio.sleep(60)
        if self.failing:
            raise self.failing.pop()
        fault = None
        try:
            self.live.refresh()
        except LogFault as error:
            fault = str(error)
        if method == "state":
            return ShardState(fault, self.live.changed)
        if method == "contents_many":
            return pickle.loads(pickle.dumps([self.live.contents(keys) for keys in arguments[0]]))
        if method == "scores_many":
            return pickle.loads(pickle.dumps([self.live.scores(query) for query in arguments[0]]))
        if method == "search_many":
            return pickle.loads(pickle.dumps(self.live.search_many(*arguments)))
        if method == "document":
            found = self.live.get(*arguments)
            return found and Document(found.id, found.text, found.metadata)
        return True


class World:
    def __init__(self, root: Path, writable: bool = True) -> None:
        log = ChangeLog(root / "changes", {"year": "integer"}, DIMENSION, SHARDS)
        self.encoder, self.shards = Encoder(), []
        for number in range(SHARDS):
            ids = [id for id in PASSAGES if shard_of(id, SHARDS) == number]
            texts = [PASSAGES[id] for id in ids]
            vectors = np.stack([vector(text) for text in texts])
            years = {"year": [int(id[1:]) for id in ids]}
            build = Build(lexical=True)
            facts = write_shard(root / f"shard-{number}", ids, texts, vectors, years, {"year": "integer"}, build)
            self.shards.append(OneShard(LiveShard(Shard.open(root, facts), log, number, 0)))
        card = schema.Model(
            id="m", created=1, dimension=DIMENSION, encoder="e", index_version="v1", passages=len(PASSAGES),
            vocabulary=9, metadata={"year": "integer"}, writable=writable, lexical=True,
        )  # fmt: skip
        settings = ServeSettings(index="")
        self.spec = CollectionSpec(
            encoder=EncoderArguments(model="m", fingerprint="e", settings=settings),
            index=IndexArguments(index=str(root), version="v1", settings=settings),
            shards=("s0", "s1", "s2"),
            changes=str(root / "changes"),
            card=card,
        )

    def calls(self, encoder: Encoder | None = None, **options: Any) -> EncoderCalls:
        return EncoderCalls(encoder or self.encoder, **options)

    def release(self, calls: EncoderCalls, timeout_s: float = 20, **options: Any) -> Release:
        return Release(self.spec, calls, self.shards, self.encoder, timeout_s=timeout_s, **options)

    def play(
        self,
        scenario: Callable[[Release], Coroutine[Any, Any, None]],
        timeout_s: float = 20,
        query_cache_bytes: int = 0,
        **options: Any,
    ) -> None:
        async def run() -> None:
            calls = self.calls(query_cache_bytes=query_cache_bytes)
            await scenario(self.release(calls, timeout_s, **options))

        asyncio.run(run())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def best(query: str, k: int, allowed: Callable[[str], bool] = lambda id: True) -> list[str]:
    """Brute force."""
    scores = {id: float(vector(text) @ vector(query)) for id, text in PASSAGES.items() if allowed(id)}
    return sorted(scores, key=lambda id: (-scores[id], id))[:k]


def test_concurrent_searches_get_the_best_hits_of_all_shards(world: World) -> None:
    async def scenario(release: Release) -> None:
        async def search(i: int) -> None:
            queries = [Query(f"q{i}", "I"), Query(f"r{i}", None)][: 1 + i % 2]
            found = await release.search(Search(queries, 1 + i % 7))
            assert [[hit.id for hit in hits] for hits in found.results] == [
                best(f"{query.instruction} {query.text}", 1 + i % 7) for query in queries
            ]
            assert (found.model, found.index_version, found.missing_shards) == ("m", "v1", [])

        await asyncio.gather(*(search(i) for i in range(50)))

    world.play(scenario)
    assert sum(world.encoder.calls) == 50
    assert len(world.encoder.calls) < 10  # most share a call


def test_shards_apply_the_filter(world: World) -> None:
    async def scenario(release: Release) -> None:
        found = await release.search(Search([Query("q", "I")], 4, {"year": {"lt": 20}}))
        assert [hit.id for hit in found.results[0]] == best("I q", 4, lambda id: int(id[1:]) < 20)
        assert found.results[0][0].metadata == {"year": int(found.results[0][0].id[1:])}

    world.play(scenario)


def test_the_first_hits_are_reranked_before_they_are_cut_to_top_k(world: World) -> None:
    depth, lengths = 20, {"reranked": 0}

    def relevance(instruction: str | None, text: str) -> float:
        return float(vector(f"{instruction} {text}")[0])

    async def reranker(method: str, *arguments: Any) -> Any:
        if method == "ready":
            return True
        if lengths["reranked"] < 0:
            raise ReplicaLost
        lengths["reranked"] = max(len(texts) for _, _, texts in arguments[0])
        return [np.array([relevance(i, text) for text in texts], np.float32) for _, i, texts in arguments[0]]

    settings = RerankSettings(kind="late_interaction", depth=depth, weight=1.0, budget_ms=10_000)

    async def scenario(release: Release) -> None:
        by_cosine = best("I q", depth)
        expected = sorted(by_cosine, key=lambda id: -relevance("I", PASSAGES[id]))
        assert expected[:5] != by_cosine[:5]
        found = await release.search(Search([Query("q", "I")], 5, rerank=True))
        assert [hit.id for hit in found.results[0]] == expected[:5]
        assert (lengths["reranked"], found.notes) == (depth, [])
        assert found.timings.rerank_ms is not None
        found = await release.search(Search([Query("q", "I")], 30, rerank=True))
        assert [hit.id for hit in found.results[0]] == expected + best("I q", 30)[depth:]
        found = await release.search(Search([Query("q", "I")], 5, rerank=False))
        assert [hit.id for hit in found.results[0]] == by_cosine[:5]
        assert found.timings.rerank_ms is None
        lengths["reranked"] = -1
        found = await release.search(Search([Query("q", "I")], 5, rerank=True))
        assert [hit.id for hit in found.results[0]] == by_cosine[:5]
        assert [note for note in found.notes if "the reranker is not available" in note]
        assert await release.ready(with_reranker=True)

    world.play(scenario, reranker=RerankStage(settings, reranker))


def test_put_documents_are_found_and_deleted_ones_are_not(world: World) -> None:
    async def scenario(release: Release) -> None:
        sequence = await release.put([Document("new", "None fresh", {"year": 3}), Document("p1", "None fresh too")])
        found = await release.search(Search([Query("fresh")], 1))
        assert (found.results[0][0].id, found.sequence) == ("new", sequence)
        assert await release.document("new") == Document("new", "None fresh", {"year": 3})
        assert await release.document("p1") == Document("p1", "None fresh too", {"year": None})
        assert await release.delete(["new", "never was"]) > sequence
        assert await release.document("new") is None
        found = await release.search(Search([Query("fresh")], 60))
        assert "new" not in {hit.id for hit in found.results[0]}

    world.play(scenario)


def test_a_read_only_index_rejects_changes(tmp_path: Path) -> None:
    async def scenario(release: Release) -> None:
        with pytest.raises(ReadOnly):
            await release.put([Document("new", "text")])
        with pytest.raises(ReadOnly):
            await release.delete(["p1"])

    World(tmp_path, writable=False).play(scenario)
    assert not (tmp_path / "changes").exists()


def test_a_call_is_retried_when_a_replica_is_lost_but_not_when_it_is_full(world: World) -> None:
    async def scenario(release: Release) -> None:
        world.shards[1].failing = [ReplicaLost()] * 3
        found = await release.search(Search([Query("q", "I")], 5))
        assert [hit.id for hit in found.results[0]] == best("I q", 5)
        world.shards[1].failing = [QueueFull(2.0)]
        with pytest.raises(QueueFull):
            await release.search(Search([Query("q", "I")], 5))

    world.play(scenario)


def test_a_call_to_a_silent_encoder_replica_is_made_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "SILENCE_S", 0.05)

    class HalfSilent(Encoder):
        async def __call__(self, method: str, *arguments: Any) -> Any:
            answer = await super().__call__(method, *arguments)
            if len(self.calls) == 1:
                await asyncio.sleep(60)  # as on a lost machine that Ray has not noticed
            return answer

    async def scenario() -> None:
        release = world.release(world.calls(HalfSilent(), replicas=2))
        found = await asyncio.wait_for(release.search(Search([Query("q", "I")], 3)), 20)
        assert [hit.id for hit in found.results[0]] == best("I q", 3)

    asyncio.run(scenario())


def test_a_repeated_search_costs_no_encoding_and_sees_changes(world: World) -> None:
    async def scenario() -> None:
        calls = world.calls(query_cache_bytes=2**20)
        cached = world.release(calls)
        for _ in range(3):
            found = await cached.search(Search([Query("q", "I")], 4))
            assert [hit.id for hit in found.results[0]] == best("I q", 4)
        assert world.encoder.calls == [1]
        await cached.put([Document("new", "I q")])
        found = await cached.search(Search([Query("q", "I")], 4))
        assert [hit.id for hit in found.results[0]] == ["new", *best("I q", 3)]
        assert len(world.encoder.calls) == 2  # the document's, and none for the query
        assert (calls.query_cache.hits, calls.query_cache.misses) == (3, 1)

    asyncio.run(scenario())


def test_with_a_missing_shard_only_partial_searches_are_answered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "PARTIAL_PATIENCE_S", 0.1)

    async def scenario(release: Release) -> None:
        world.shards[2].failing = [ReplicaLost()] * 1000
        with pytest.raises(ReplicaLost):
            await release.search(Search([Query("q", "I")], 5))
        found = await release.search(Search([Query("q", "I")], 5, allow_partial=True))
        assert list(found.missing_shards) == ["s2"]
        assert [hit.id for hit in found.results[0]] == best("I q", 5, lambda id: shard_of(id, SHARDS) != 2)
        world.shards[2].failing = []
        found = await release.search(Search([Query("q", "I")], 5, allow_partial=True))
        assert list(found.missing_shards) == []
        assert [hit.id for hit in found.results[0]] == best("I q", 5)

    world.play(scenario, timeout_s=0.5)


INSTRUCTION = "Only recent trials, and no vendor pages; for clinicians."
PHRASES = ["Only recent trials,", "and no vendor pages;", "for clinicians."]
LEFT_OUT = [  # spelt out
    "and no vendor pages; for clinicians.",
    "Only recent trials, for clinicians.",
    "Only recent trials, and no vendor pages;",
]


@pytest.mark.parametrize("query_cache_bytes", [0, 2**20])
def test_an_explanation_agrees_with_brute_force_leave_one_out(world: World, query_cache_bytes: int) -> None:
    passages = {**PASSAGES, "new": f"{INSTRUCTION} q", "p7": "text 7, replaced"}
    del passages["p3"]

    def score(id: str, instruction: str | None) -> float:
        return float(vector(passages[id]) @ vector(f"{instruction} q"))

    async def scenario(release: Release) -> None:
        await release.put([Document("new", passages["new"]), Document("p7", passages["p7"])])
        sequence = await release.delete(["p3"])
        world.encoder.calls.clear()
        found = await release.search(Search([Query("q", INSTRUCTION)], 8, min_sequence=sequence, explain=True))
        assert len(world.encoder.calls) == (1 if query_cache_bytes else 2)
        explanation = found.explanation
        assert explanation is not None
        assert [phrase.text for phrase in explanation.phrases] == PHRASES
        assert [INSTRUCTION[phrase.start : phrase.end] for phrase in explanation.phrases] == PHRASES
        ranked, plain = (
            sorted(passages, key=lambda id: (-score(id, instruction), id)) for instruction in (INSTRUCTION, None)
        )
        left = [id for id in plain[:8] if id not in ranked[:8]]
        assert left
        assert [hit.id for hit in found.results[0]] == ranked[:8]
        assert [passage.id for passage in explanation.passages] == ranked[:8] + left
        assert explanation.passages[0].id == "new"
        for passage in explanation.passages:
            assert passage.rank == (None if passage.id in left else ranked.index(passage.id) + 1)
            assert passage.rank_without == plain.index(passage.id) + 1
            assert passage.score == pytest.approx(score(passage.id, INSTRUCTION), abs=1e-6)
            assert passage.score_without == pytest.approx(score(passage.id, None), abs=1e-6)
            expected = [score(passage.id, INSTRUCTION) - score(passage.id, without) for without in LEFT_OUT]
            assert passage.effects == pytest.approx(expected, abs=1e-6)
        assert max(abs(effect) for passage in explanation.passages for effect in passage.effects) > 0.1
        assert found.notes == []

    world.play(scenario, query_cache_bytes=query_cache_bytes)


def test_an_explanation_has_no_rank_beyond_its_depth_and_respects_the_filter(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining, "EXPLAINED_DEPTH", 5)
    allowed = lambda id: int(id[1:]) < 40  # noqa: E731

    async def scenario(release: Release) -> None:
        found = await release.search(Search([Query("q", INSTRUCTION)], 4, {"year": {"lt": 40}}, explain=True))
        assert found.explanation is not None
        hits, plain = best(f"{INSTRUCTION} q", 4, allowed), best("None q", 5, allowed)
        ranks = {p.id: (p.rank, p.rank_without) for p in found.explanation.passages}
        assert set(ranks) == {*hits, *plain[:4]}
        for id, (rank, rank_without) in ranks.items():
            assert rank == (hits.index(id) + 1 if id in hits else None)
            assert rank_without == (plain.index(id) + 1 if id in plain else None)
        assert None in {rank_without for _, rank_without in ranks.values()}

    world.play(scenario)


def test_an_explanation_says_what_it_could_not_know(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "PARTIAL_PATIENCE_S", 0.05)

    class Vanishing(OneShard):
        """Its documents are deleted between the search and the explanation; or it is lost then."""

        lost = False

        async def __call__(self, method: str, *arguments: Any) -> Any:
            if method == "scores_many" and self.lost:
                raise ReplicaLost
            answer = await super().__call__(method, *arguments)
            return [np.full_like(scores, np.nan) for scores in answer] if method == "scores_many" else answer

    world.shards[0] = gone = Vanishing(world.shards[0].live)

    async def scenario(release: Release) -> None:
        for allow_partial in (False, True):
            gone.lost = allow_partial
            search = Search([Query("q", INSTRUCTION)], 8, allow_partial=allow_partial, explain=True)
            found = await release.search(search)
            wanted = {*best(f"{INSTRUCTION} q", 8), *best("None q", 8)}
            kept = {id for id in wanted if shard_of(id, SHARDS) != 0}
            assert 0 < len(kept) < len(wanted)
            assert found.explanation is not None
            assert {passage.id for passage in found.explanation.passages} == kept
            assert found.notes == [
                f"explain: passages that changed meanwhile or whose shard did not answer: {len(wanted) - len(kept)}."
            ]
        gone.failing = [ReplicaLost()] * 1000
        found = await release.search(Search([Query("q", INSTRUCTION)], 8, allow_partial=True, explain=True))
        assert "explain: ranks without the instruction leave out s0." in found.notes

    world.play(scenario, timeout_s=1)


def test_it_is_ready_when_everything_answers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(release: Release) -> None:
        assert await release.ready()
        monkeypatch.setattr(blue_green, "PROBE_TIMEOUT_S", 0.1)
        world.shards[0].silent = True
        assert not await release.ready()

    world.play(scenario)


def test_one_requests_error_does_not_affect_another(world: World) -> None:
    async def scenario(release: Release) -> None:
        good, bad = await asyncio.gather(
            release.search(Search([Query("q", "I")], 5)),
            release.search(Search([Query("q", "I")], 5, {"color": "red"})),
            return_exceptions=True,
        )
        assert [hit.id for hit in good.results[0]] == best("I q", 5)
        assert isinstance(bad, ValueError)

    world.play(scenario)


def test_a_call_gets_the_time_left_of_its_request(world: World) -> None:
    async def scenario(release: Release) -> None:
        release._encoder.embed._max_calls = 1
        world.encoder.held = asyncio.Event()
        first = asyncio.ensure_future(release.search(Search([Query("a", "I")], 1)))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(release.search(Search([Query("b", "I")], 1)))
        await asyncio.sleep(0.3)
        world.encoder.held.set()
        await asyncio.gather(first, second)
        assert world.encoder.timeouts[1] < world.encoder.timeouts[0] - 0.25

    world.play(scenario)


def test_a_search_that_has_waited_too_long_is_rejected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batching, "MAX_WAIT_S", 0.1)

    async def scenario(release: Release) -> None:
        world.encoder.held = asyncio.Event()
        text = "x" * (encoder_calls.MAX_BATCH_CHARACTERS // 2)
        searches = [asyncio.ensure_future(release.search(Search([Query(text)], 1))) for _ in range(100)]
        await asyncio.sleep(0.2)
        world.encoder.held.set()
        outcomes = await asyncio.gather(*searches, return_exceptions=True)
        rejected = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
        assert 0 < len(rejected) < 100
        assert all(outcome.missing_shards == [] for outcome in outcomes if outcome not in rejected)

    world.play(scenario)


def test_with_a_damaged_log_changes_are_rejected_and_searches_work(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blue_green, "STATE_MAX_AGE_S", 0.0)
    document = {"id": "new", "text": "text new"}

    async def scenario(release: Release) -> None:
        app = create_app(cast(Service, release), "d", ApiKeys())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            put = partial(client.put, "/v1/documents", json={"documents": [document]})
            assert (await put()).status_code == 200
            (segment,) = Path(world.spec.changes).glob("*.arrow")
            whole = segment.read_bytes()
            segment.write_bytes(whole[:-1])
            answers = [await client.get("/readyz"), await put(), await client.delete("/v1/documents/p1")]
            for answer in answers:
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (503, "changes_stuck")
                assert "000000000001.arrow is corrupted" in error["message"]
                assert int(answer.headers["retry-after"]) > 1
            found = await client.post("/v1/search", json={"query": "q", "top_k": 5})
            assert [hit["id"] for hit in found.json()["hits"]] == best("None q", 5)
            assert len(list(segment.parent.glob("*.arrow"))) == 1  # nothing was appended after it
            segment.write_bytes(whole)
            assert (await client.get("/readyz")).status_code == 200
            assert (await put()).status_code == 200

    world.play(scenario)


def test_a_change_that_cannot_be_written_says_why_and_not_where(world: World) -> None:
    Path(world.spec.changes or "").write_text("no directory")

    async def scenario(release: Release) -> None:
        app = create_app(cast(Service, release), "d", ApiKeys())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            for shard in world.shards:
                shard.failing = [ReplicaLost()]  # so that only the writer notices it
            answer = await client.delete("/v1/documents/p1")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "changes_stuck")
            assert "cannot be" in answer.json()["error"]["message"]
            assert str(world.spec.changes) not in answer.text

    world.play(scenario)


def test_a_shard_that_does_not_answer_keeps_its_last_reported_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blue_green, "STATE_MAX_AGE_S", 0.0)

    async def scenario(release: Release) -> None:
        await release.delete(["p1"])
        (segment,) = Path(world.spec.changes).glob("*.arrow")
        segment.write_bytes(b"")
        assert "is corrupted" in (await release.fault() or "")
        for shard in world.shards:
            shard.failing = [ReplicaLost()]
        with pytest.raises(Stuck, match=r"s0: .*is corrupted"):
            await release.delete(["p1"])

    world.play(scenario)


def test_documents_beyond_the_limit_are_refused_and_deletions_are_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blue_green, "STATE_MAX_AGE_S", 0.0)
    warnings: list[str] = []  # not caplog: earlier tests of this process may have reconfigured logging
    monkeypatch.setattr(blue_green.log, "warning", lambda message, *values: warnings.append(message % values))

    async def scenario(release: Release) -> None:
        await release.put([Document(f"n{i}", "text") for i in range(6)])
        await release.put([Document(f"n{i}", "again") for i in range(6)])  # the same documents
        assert await release.changed_documents() == 6 / SHARDS
        await release.put([Document("m1", "text")])
        await release.put([Document("m2", "text")])
        assert warnings == [
            "6 documents differ from index version v1, and from 9 on documents are refused: compact the index"
        ]
        await release.delete([f"p{i}" for i in range(5)])
        with pytest.raises(TooManyChanges) as refusal:
            await release.put([Document("n1", "text")])
        assert refusal.value.args == (13, 9)
        await release.delete([f"n{i}" for i in range(6)])  # which the version does not have
        assert await release.changed_documents() == 7 / SHARDS
        await release.put([Document("m3", "text")])

    world.play(scenario, max_changed_documents=3)


def test_over_http_a_put_beyond_the_limit_names_the_remedies(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blue_green, "STATE_MAX_AGE_S", 0.0)

    async def scenario(release: Release) -> None:
        app = create_app(cast(Service, release), "d", ApiKeys())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            documents = {"documents": [{"id": f"n{i}", "text": "text"} for i in range(9)]}
            put = await client.put("/v1/documents", json=documents)
            assert put.status_code == 200
            answer = await client.put("/v1/documents", json=documents)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (507, "too_many_changes")
            assert "9 documents differ from the index version, and at most 9 may" in error["message"]
            assert "infembed index compact" in error["message"]
            body = {"query": "text", "top_k": 9, "min_sequence": put.json()["sequence"]}
            found = (await client.post("/v1/search", json=body)).json()
            assert found["sequence"] == put.json()["sequence"] == 1
            late = await client.post("/v1/search", json=body | {"min_sequence": 2})
            assert (late.status_code, late.json()["error"]["param"]) == (503, "min_sequence")
            assert "has applied the changes up to 1 only" in late.json()["error"]["message"]
            assert late.headers["retry-after"] == "1"

    world.play(scenario, timeout_s=1, max_changed_documents=3)
