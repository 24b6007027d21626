"""Searches with exclusions and words through a release over real shards, against brute force over all passages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from infembed_ray.config.serving import RankingSettings
from infembed_ray.retrieval.lexical import DeltaTerms, terms_of
from infembed_ray.retrieval.shards import shard_of
from infembed_ray.serving.routing.blue_green import Release
from infembed_ray.serving.routing.channels import Channels
from infembed_ray.serving.service import Document, Query, Search
from tests.serving.routing.test_blue_green import PASSAGES, SHARDS, World, vector

QUERY = Query("text", "Prices of 7, no history")
WEIGHT = 0.6


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def moved(query: Query) -> np.ndarray:
    """The vector of a search for `QUERY` with its exclusion; the test's encoder embeds "instruction query"."""
    apart = vector(f"Prices of 7 {query.text}") - WEIGHT * vector("None history")
    return apart / np.linalg.norm(apart)


def ranked(scores: dict[str, float], k: int) -> list[str]:
    return sorted(scores, key=lambda id: (-scores[id], id))[:k]


def words(world: World, query: str, texts: dict[str, str]) -> dict[str, float]:
    """BM25 of texts with the statistics of their shards, by the formula for texts put since."""
    found = {}
    for id, text in texts.items():
        delta = DeltaTerms()
        delta.add(0, [text])
        index = world.shards[shard_of(id, SHARDS)].live.base.lexical
        assert index is not None
        found[id] = float(delta.scores(index, terms_of(query), 1)[0])
    return found


def test_an_exclusion_searches_with_a_moved_vector_after_one_call_to_the_encoder(world: World) -> None:
    async def scenario(release: Release) -> None:
        found = await release.search(Search([QUERY], 9, exclude=True))
        scores = {id: float(moved(QUERY) @ vector(text)) for id, text in PASSAGES.items()}
        assert [hit.id for hit in found.results[0]] == ranked(scores, 9)
        assert [hit.score for hit in found.results[0]] == pytest.approx(sorted(scores.values())[::-1][:9], abs=1e-6)

    world.play(scenario)
    assert world.encoder.calls == [1]  # one item of two texts


@pytest.mark.parametrize("exclude", [False, True])
def test_a_hybrid_search_fuses_all_shards_and_reads_only_wanted_words(world: World, exclude: bool) -> None:
    async def scenario(release: Release) -> None:
        await release.put([Document("new", "prices prices of 7 text", {}), Document("p3", "history history", {})])
        found = await release.search(
            Search([QUERY], 8, {"year": {"lt": 50}}, exclude=exclude, hybrid=0.4, min_sequence=1)
        )
        texts = {id: text for id, text in PASSAGES.items() if int(id[1:]) < 50 and id != "p3"}
        lexical = words(world, "Prices of 7 text", texts)
        query = moved(QUERY) if exclude else vector("Prices of 7, no history text")
        largest = max(lexical.values())
        scores = {id: 0.6 * float(query @ vector(text)) + 0.4 * lexical[id] / largest for id, text in texts.items()}
        assert [hit.id for hit in found.results[0]] == ranked(scores, 8)
        assert [hit.score for hit in found.results[0]] == pytest.approx(sorted(scores.values())[::-1][:8], abs=1e-5)
        assert all(hit.text == texts[hit.id] for hit in found.results[0])

        found = await release.search(Search([Query("prices")], 1, hybrid=1.0, min_sequence=1))
        assert [(hit.id, hit.score) for hit in found.results[0]] == [("new", 1.0)]

    world.play(scenario)


def test_requests_override_the_defaults(world: World) -> None:
    async def scenario(release: Release) -> None:
        plain = await release.search(Search([QUERY], 5, exclude=False, hybrid=0.0))
        scores = {id: float(vector("Prices of 7, no history text") @ vector(t)) for id, t in PASSAGES.items()}
        assert [hit.id for hit in plain.results[0]] == ranked(scores, 5)
        default = await release.search(Search([QUERY], 5))
        asked = await release.search(Search([QUERY], 5, exclude=True, hybrid=0.2))
        assert default.results == asked.results != plain.results

    world.play(scenario, ranking=RankingSettings(exclude=True, hybrid=0.2))


def test_an_older_release_without_words_ignores_the_default(world: World) -> None:
    world.spec = world.spec.model_copy(update={"card": world.spec.card.model_copy(update={"lexical": False})})

    async def scenario(release: Release) -> None:
        default = await release.search(Search([QUERY], 5))
        plain = await release.search(Search([QUERY], 5, hybrid=0.0))
        assert default.results == plain.results

    world.play(scenario, ranking=RankingSettings(hybrid=0.9))


def test_queries_of_one_search_keep_their_order_whether_or_not_they_exclude(world: World) -> None:
    queries = [Query("a", "I"), QUERY, Query("b"), Query("c", "no cats")]

    async def scenario(release: Release) -> None:
        together = await release.search(Search(queries, 4, exclude=True))
        for query, hits in zip(queries, together.results, strict=True):
            (alone,) = (await release.search(Search([query], 4, exclude=True))).results
            assert hits == alone

    world.play(scenario)


def test_without_an_exclusion_or_words_a_search_is_as_before() -> None:
    search = Search([Query("a", "Guidelines, no later than 2020"), Query("b")], 4, exclude=True)
    channels = Channels.of(search, RankingSettings())
    assert channels.texts == search.queries
    encoded = np.ones((2, 3), np.float32)
    assert channels.vectors(encoded) is not None
    np.testing.assert_array_equal(channels.vectors(encoded), encoded)


def test_an_encoder_that_is_trained_on_instructions_may_read_them_whole() -> None:
    settings = RankingSettings(exclude=True, exclusion_keeps_instruction=True, exclusion_weight=0.3)
    channels = Channels.of(Search([QUERY], 4), settings)
    assert channels.texts == [QUERY, Query("history")]
    wanted, unwanted = vector("a"), vector("b")
    expected = wanted - 0.3 * unwanted
    np.testing.assert_allclose(
        channels.vectors(np.stack([wanted, unwanted]))[0], expected / np.linalg.norm(expected), rtol=1e-5
    )
