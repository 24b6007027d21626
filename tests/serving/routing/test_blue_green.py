"""A release over real shards in this process, with an encoder that draws vectors from the texts."""

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import numpy as np
import pytest

from infembed_ray.config.serving import RankingSettings, RerankSettings, ServeSettings
from infembed_ray.modeling.formats import Question
from infembed_ray.retrieval.lexical import DeltaTerms, terms_of
from infembed_ray.retrieval.shards import Build, Shard, shard_of
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog, LogFault
from infembed_ray.serving import schema
from infembed_ray.serving.encoder.batching import Embedded, QueueFull
from infembed_ray.serving.http.app import create_app
from infembed_ray.serving.http.auth import ApiKeys
from infembed_ray.serving.release import CollectionSpec, EncoderArguments, IndexArguments, ReleaseSpec
from infembed_ray.serving.routing import blue_green
from infembed_ray.serving.routing.blue_green import Release
from infembed_ray.serving.routing.encoder_calls import EncoderCalls
from infembed_ray.serving.routing.reranking import RerankStage
from infembed_ray.serving.service import Document, ReplicaLost, ShardState, TooManyChanges
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
            texts = item.texts
            if item.instructions is not None:
                texts = [f"{i} {text}" for i, text in zip(item.instructions, texts, strict=True)]
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
        if method == "scores_many":
            return pickle.loads(pickle.dumps([self.live.scores(query) for query in arguments[0]]))
        if method == "search_many":
            return pickle.loads(pickle.dumps(self.live.search_many(*arguments)))
        if method == "document":
            content = self.live.get(*arguments)
            return content and Document(content.id, content.text, content.metadata)
        return True


class World:
    def __init__(self, root: Path) -> None:
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
            metadata={"year": "integer"}, writable=True, lexical=True,
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

    def release(self, calls: EncoderCalls, reranker: RerankStage | None = None, **settings: Any) -> Release:
        given = ServeSettings(index="", **{"request_timeout_s": 20, **settings})
        return Release(self.spec, calls, self.shards, given, reranker)

    def open(self, **options: Any) -> Release:
        return self.release(self.calls(), **options)

    def play(self, scenario: Callable[[Release], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def run() -> None:
            await scenario(self.open(**options))

        asyncio.run(run())


def request(query: str, instruction: str | None, top_k: int, **more: Any) -> schema.SearchRequest:
    return schema.SearchRequest(query=query, instruction=instruction, top_k=top_k, **more)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def best(query: str, k: int, allowed: Callable[[str], bool] = lambda id: True) -> list[str]:
    """Brute force."""
    scores = {id: float(vector(text) @ vector(query)) for id, text in PASSAGES.items() if allowed(id)}
    return sorted(scores, key=lambda id: (-scores[id], id))[:k]


async def test_concurrent_searches_get_the_best_hits_of_all_shards(world: World) -> None:
    release = world.open()

    async def search(i: int) -> None:
        query = Question(f"q{i}", "I" if i % 2 else None)
        answer = await release.search(request(*query, 1 + i % 7))
        assert [hit.id for hit in answer.hits] == best(f"{query.instruction} {query.query}", 1 + i % 7)
        assert (answer.model, answer.index_version) == ("m", "v1")

    await asyncio.gather(*(search(i) for i in range(50)))
    assert sum(world.encoder.calls) == 50
    assert len(world.encoder.calls) < 10  # most share a call


async def test_the_first_hits_are_reranked_before_they_are_cut_to_top_k(world: World) -> None:
    depth, lengths = 20, {"reranked": 0}

    def relevance(instruction: str | None, text: str) -> float:
        return float(vector(f"{instruction} {text}")[0])

    async def reranker(method: str, *arguments: Any) -> Any:
        if method == "ready":
            return True
        if lengths["reranked"] < 0:
            raise ReplicaLost
        _, instruction, texts, _ = arguments
        lengths["reranked"] = len(texts)
        return np.array([relevance(instruction, text) for text in texts], np.float32)

    settings = RerankSettings(kind="late_interaction", depth=depth, budget_ms=10_000)
    release = world.open(reranker=RerankStage(settings, reranker))
    by_cosine = best("I q", depth)
    expected = sorted(by_cosine, key=lambda id: -relevance("I", PASSAGES[id]))
    assert expected[:5] != by_cosine[:5]
    answer = await release.search(request("q", "I", 5, rerank=True))
    assert [hit.id for hit in answer.hits] == expected[:5]
    assert (lengths["reranked"], answer.notes) == (depth, [])
    assert answer.timings.rerank_ms is not None
    answer = await release.search(request("q", "I", 30, rerank=True))
    assert [hit.id for hit in answer.hits] == expected + best("I q", 30)[depth:]
    answer = await release.search(request("q", "I", 5, rerank=False))
    assert [hit.id for hit in answer.hits] == by_cosine[:5]
    assert answer.timings.rerank_ms is None
    lengths["reranked"] = -1
    answer = await release.search(request("q", "I", 5, rerank=True))
    assert [hit.id for hit in answer.hits] == by_cosine[:5]
    assert [note for note in answer.notes if "the reranker is not available" in note]
    assert await release.ready(with_reranker=True)


async def test_put_documents_are_found_and_deleted_ones_are_not(world: World) -> None:
    release = world.open()
    sequence = await release.put([Document("new", "None fresh", {"year": 3}), Document("p1", "None fresh too")])
    answer = await release.search(request("fresh", None, 1))
    assert (answer.hits[0].id, answer.sequence) == ("new", sequence)
    assert await release.document("new") == Document("new", "None fresh", {"year": 3})
    assert await release.document("p1") == Document("p1", "None fresh too", {"year": None})
    assert await release.delete(["new", "never was"]) > sequence
    assert await release.document("new") is None
    answer = await release.search(request("fresh", None, 60))
    assert "new" not in {hit.id for hit in answer.hits}


async def test_a_call_is_retried_when_a_replica_is_lost_but_not_when_it_is_full(world: World) -> None:
    release = world.open()
    world.shards[1].failing = [ReplicaLost()] * 3
    answer = await release.search(request("q", "I", 5))
    assert [hit.id for hit in answer.hits] == best("I q", 5)
    world.shards[1].failing = [QueueFull(2.0)]
    with pytest.raises(QueueFull):
        await release.search(request("q", "I", 5))


async def test_a_repeated_search_costs_no_encoding_and_sees_changes(world: World) -> None:
    calls = world.calls()
    cached = world.release(calls)
    for _ in range(3):
        answer = await cached.search(request("q", "I", 4))
        assert [hit.id for hit in answer.hits] == best("I q", 4)
    assert world.encoder.calls == [1]
    await cached.put([Document("new", "I q")])
    answer = await cached.search(request("q", "I", 4))
    assert [hit.id for hit in answer.hits] == ["new", *best("I q", 3)]
    assert len(world.encoder.calls) == 2  # the document's, and none for the query
    assert (calls.query_cache.hits, calls.query_cache.misses) == (3, 1)


INSTRUCTION = "Only recent trials, and no vendor pages; for clinicians."
PHRASES = ["Only recent trials,", "and no vendor pages;", "for clinicians."]
LEFT_OUT = [  # spelt out
    "and no vendor pages; for clinicians.",
    "Only recent trials, for clinicians.",
    "Only recent trials, and no vendor pages;",
]


def test_an_explanation_agrees_with_brute_force_leave_one_out(world: World) -> None:
    card = world.spec.card.model_copy(update={"exclusion_weight": 0.4})
    world.spec = world.spec.model_copy(update={"card": card})
    passages = {**PASSAGES, "new": f"{INSTRUCTION} q", "p7": "text 7, replaced"}
    del passages["p3"]

    def score(id: str, instruction: str | None) -> float:
        return float(vector(passages[id]) @ vector(f"{instruction} q"))

    async def scenario(release: Release) -> None:
        await release.put([Document("new", passages["new"]), Document("p7", passages["p7"])])
        sequence = await release.delete(["p3"])
        world.encoder.calls.clear()
        answer = await release.search(request("q", INSTRUCTION, 8, min_sequence=sequence, explain=True))
        assert len(world.encoder.calls) == 1
        explanation = answer.explanation
        assert explanation is not None
        assert explanation.excluded == "vendor pages"
        assert [phrase.text for phrase in explanation.phrases] == PHRASES
        assert [INSTRUCTION[phrase.start : phrase.end] for phrase in explanation.phrases] == PHRASES
        ranked, plain = (
            sorted(passages, key=lambda id: (-score(id, instruction), id)) for instruction in (INSTRUCTION, None)
        )
        left = [id for id in plain[:8] if id not in ranked[:8]]
        assert left
        assert [hit.id for hit in answer.hits] == ranked[:8]
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
        assert answer.notes == []

    world.play(scenario)


def test_an_explanation_says_that_passages_changed_meanwhile(world: World) -> None:
    class Vanishing(OneShard):
        """Its documents are deleted between the search and the explanation."""

        async def __call__(self, method: str, *arguments: Any) -> Any:
            answer = await super().__call__(method, *arguments)
            return [np.full_like(scores, np.nan) for scores in answer] if method == "scores_many" else answer

    world.shards[0] = Vanishing(world.shards[0].live)

    async def scenario(release: Release) -> None:
        answer = await release.search(request("q", INSTRUCTION, 8, explain=True))
        wanted = {*best(f"{INSTRUCTION} q", 8), *best("None q", 8)}
        kept = {id for id in wanted if shard_of(id, SHARDS) != 0}
        assert 0 < len(kept) < len(wanted)
        assert answer.explanation is not None
        assert {passage.id for passage in answer.explanation.passages} == kept
        assert len(answer.notes) == 1

    world.play(scenario)


async def test_it_is_ready_when_everything_answers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    release = world.open()
    assert await release.ready()
    monkeypatch.setattr(blue_green, "PROBE_TIMEOUT_S", 0.1)
    world.shards[0].silent = True
    assert not await release.ready()


async def test_with_a_damaged_log_changes_are_rejected_and_searches_work(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blue_green, "STATE_MAX_AGE_S", 0.0)
    document = {"id": "new", "text": "text new"}
    release = world.open()
    app = create_app(lambda: {"index": release}, lambda: "d", ApiKeys(), metrics=AsyncMock())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        put = partial(client.put, "/v1/documents", json={"documents": [document]})
        assert (await put()).status_code == 200
        (segment,) = Path(world.spec.changes).glob("*.arrow")
        whole = segment.read_bytes()
        segment.write_bytes(whole[:-1])
        answers = [
            await client.get("/readyz"),
            await put(),
            await client.request("DELETE", "/v1/documents", json={"ids": ["p1"]}),
        ]
        for refusal in answers:
            error = refusal.json()["error"]
            assert (refusal.status_code, error["code"]) == (503, "changes_stuck")
            assert "000000000001.arrow is corrupted" in error["message"]
            assert int(refusal.headers["retry-after"]) > 1
        answer = await client.post("/v1/search", json={"query": "q", "top_k": 5})
        assert [hit["id"] for hit in answer.json()["hits"]] == best("None q", 5)
        assert len(list(segment.parent.glob("*.arrow"))) == 1  # nothing was appended after it
        segment.write_bytes(whole)
        assert (await client.get("/readyz")).status_code == 200
        assert (await put()).status_code == 200


async def test_a_change_that_cannot_be_written_says_why_and_not_where(world: World) -> None:
    Path(world.spec.changes or "").write_text("no directory")
    release = world.open()
    app = create_app(lambda: {"index": release}, lambda: "d", ApiKeys(), metrics=AsyncMock())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        for shard in world.shards:
            shard.failing = [ReplicaLost()]  # so that only the writer notices it
        answer = await client.request("DELETE", "/v1/documents", json={"ids": ["p1"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "changes_stuck")
        assert "cannot be" in answer.json()["error"]["message"]
        assert str(world.spec.changes) not in answer.text


async def test_documents_beyond_the_limit_are_refused_and_deletions_are_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blue_green, "STATE_MAX_AGE_S", 0.0)
    monkeypatch.setattr(blue_green, "FULL", 1)
    release = world.open(compact_at=3)
    await release.put([Document(f"n{i}", "text") for i in range(6)])
    await release.put([Document(f"n{i}", "again") for i in range(6)])  # the same documents
    assert await release.changed_documents() == 6 / SHARDS
    await release.put([Document("m1", "text")])
    await release.put([Document("m2", "text")])
    await release.delete([f"p{i}" for i in range(5)])
    with pytest.raises(TooManyChanges) as refusal:
        await release.put([Document("n1", "text")])
    assert refusal.value.args == (13, 9)
    await release.delete([f"n{i}" for i in range(6)])  # which the version does not have
    assert await release.changed_documents() == 7 / SHARDS
    await release.put([Document("m3", "text")])


# --------------------------------------------------------------------------------------------- hybrid

QUERY = Question("text", "Prices of 7, no history")


def ranked(scores: dict[str, float], k: int) -> list[str]:
    return sorted(scores, key=lambda id: (-scores[id], id))[:k]


def words(world: World, query: str, texts: dict[str, str]) -> dict[str, float]:
    """BM25 of texts with the statistics of their shards, by the formula for texts put since."""
    scores = {}
    for id, text in texts.items():
        delta = DeltaTerms()
        delta.add(0, [text])
        index = world.shards[shard_of(id, SHARDS)].live.base.lexical
        assert index is not None
        scores[id] = float(delta.scores(index, terms_of(query), 1)[0])
    return scores


def test_a_hybrid_search_fuses_all_shards_and_reads_only_wanted_words(world: World) -> None:
    async def scenario(release: Release) -> None:
        await release.put([Document("new", "prices prices of 7 text", {}), Document("p3", "history history", {})])
        search = request(*QUERY, 8, filter={"year": {"lt": 50}}, hybrid=0.4, min_sequence=1)
        answer = await release.search(search)
        texts = {id: text for id, text in PASSAGES.items() if int(id[1:]) < 50 and id != "p3"}
        lexical = words(world, "Prices of 7 text", texts)
        query = vector("Prices of 7, no history text")
        largest = max(lexical.values())
        scores = {id: 0.6 * float(query @ vector(text)) + 0.4 * lexical[id] / largest for id, text in texts.items()}
        assert [hit.id for hit in answer.hits] == ranked(scores, 8)
        assert [hit.score for hit in answer.hits] == pytest.approx(sorted(scores.values())[::-1][:8], abs=1e-5)
        assert all(hit.text == texts[hit.id] for hit in answer.hits)

    world.play(scenario)


def test_an_older_release_without_words_ignores_the_default(world: World) -> None:
    world.spec = world.spec.model_copy(update={"card": world.spec.card.model_copy(update={"lexical": False})})

    async def scenario(release: Release) -> None:
        default, plain = await release.search(request(*QUERY, 5)), await release.search(request(*QUERY, 5, hybrid=0.0))
        assert default.hits == plain.hits

    world.play(scenario, ranking=RankingSettings(hybrid=0.9))


# ---------------------------------------------------------------------------------------------------- collections


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, World]:
    """Application of an index -> its shards; their deployments are found by name, as those of Serve are."""
    made = {name: World(tmp_path / name) for name in ("index-a", "index-b")}
    shards = {world.spec.index.application: world.shards for world in made.values()}
    encoders = {"e": made["index-a"].encoder, "other": made["index-b"].encoder}

    def named(deployment: str, application: str) -> Any:
        if application in shards:
            return shards[application][int(deployment.removeprefix("s"))]
        return encoders[application.split("-")[2]]

    monkeypatch.setattr(blue_green, "STATE_MAX_AGE_S", 0.0)
    monkeypatch.setattr(blue_green, "RemoteDeployment", SimpleNamespace(named=named))
    return made


def collections(worlds: dict[str, World], encoder: str = "e") -> dict[str, Release]:
    default, news = (world.spec for world in worlds.values())
    news = news.model_copy(update={"encoder": news.encoder.model_copy(update={"fingerprint": encoder})})
    spec = ReleaseSpec(api="a", collections={"index": default, "news": news})
    return blue_green.open_release(spec, ServeSettings(index=""))


async def test_collections_share_an_encoder_and_its_cache_but_neither_documents_nor_changes(
    worlds: dict[str, World],
) -> None:
    opened = collections(worlds)
    index, news = opened["index"], opened["news"]
    assert list(opened) == ["index", "news"]
    assert index.encoder is news.encoder
    sequence = await news.put([Document("new", "I q")])
    worlds["index-a"].encoder.calls.clear()
    answers = [await one.search(request("q", "I", 1)) for one in (index, news)]
    assert worlds["index-a"].encoder.calls == [1]  # one encoding for both
    assert [answer.hits[0].id for answer in answers] == [best("I q", 1)[0], "new"]
    assert [answer.sequence for answer in answers] == [0, sequence]
    assert await index.document("new") is None
    assert await index.changed_documents() == 0
    assert await news.changed_documents() > 0
    assert len({one.encoder for one in collections(worlds, encoder="other").values()}) == 2
