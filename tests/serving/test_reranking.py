"""The reranker: settings checked before a start, its engine over a scorer that the tests know, and the stage on Ray Serve."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import serve

from infembed_ray.config.serving import RerankSettings, ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.late_interaction import LateInteraction
from infembed_ray.modeling.pair_scorer import PairScorer
from infembed_ray.retrieval.index import Index
from infembed_ray.serving.distributed import run, serving
from infembed_ray.serving.encoder.batching import DeadlineExceeded
from infembed_ray.serving.release import RERANKER, RerankerArguments
from infembed_ray.serving.reranking import PLAIN_CLASSIFIER, RerankEngine, resolve
from tests.evaluation.retrievers import models
from tests.modeling import backbones
from tests.serving.http_client import ask, values
from tests.serving.releases import replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.bert(tmp_path_factory.mktemp("classifier"), labels=1)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return backbones.write("modernbert", tmp_path_factory.mktemp("encoder"))


def resolved(served: str, cpus: float = 1.0, **rerank: Any) -> RerankerArguments:
    settings = ServeSettings.from_mapping({"index": "i", "rerank": rerank, "cpus_per_encoder": cpus})
    arguments = resolve(settings, served)
    assert arguments is not None
    return arguments


def test_late_interaction_uses_the_served_encoder_or_another(encoder: str, tmp_path: Path) -> None:
    assert resolve(ServeSettings(index="i"), encoder) is None
    other = backbones.write("llama", tmp_path)
    served, named = resolved(encoder, kind="late_interaction"), resolved(encoder, kind="late_interaction", model=other)
    assert (served.model, named.model) == (encoder, other)
    assert served.reranker is named.reranker is None
    assert served.application != named.application


def test_a_cross_encoder_is_a_directory_or_the_settings_of_another_kind(
    encoder: str, classifier: str, tmp_path: Path
) -> None:
    made = resolved(encoder, kind="cross_encoder", model=classifier)
    assert made.model == classifier
    assert made.reranker == PLAIN_CLASSIFIER
    formats = {"kind": "classifier", "instructed_query": "{query} ({instruction})", "plain_query": "{query}"}
    other = resolved(encoder, kind="cross_encoder", model={**formats, "model": classifier, "pair_length": 64})
    assert other.reranker == {**formats, "pair_length": 64}
    assert made.application != other.application
    copy = shutil.copytree(classifier, tmp_path / "copy")
    assert resolved(encoder, kind="cross_encoder", model=str(copy)).application == made.application


def test_what_the_api_does_with_the_scores_starts_no_other_reranker(encoder: str) -> None:
    first = resolved(encoder, kind="late_interaction")
    for change in ({"depth": 7}, {"budget_ms": 9.0}):
        assert resolved(encoder, kind="late_interaction", **change).application == first.application
    assert resolved(encoder, kind="late_interaction", replicas=2).application != first.application
    assert resolved(encoder, kind="late_interaction", cpus=2.0).application != first.application


def test_arguments_round_trip_through_the_config_file(encoder: str, classifier: str) -> None:
    for made in (
        resolved(encoder, kind="late_interaction"),
        resolved(encoder, kind="cross_encoder", model=classifier),
    ):
        assert RerankerArguments.model_validate(made.model_dump(mode="json", exclude_defaults=True)) == made


@pytest.mark.parametrize(
    ("rerank", "setting"),
    [
        ({"kind": "cross_encoder"}, "rerank.model"),
        ({"kind": "cross_encoder", "model": "./nowhere"}, "rerank.model"),
        ({"kind": "late_interaction", "model": "./nowhere"}, "rerank.model"),
        ({"kind": "late_interaction", "model": {"model": "x"}}, "rerank.model"),
        ({"kind": "cross_encoder", "model": {"kind": "bm25"}}, "rerank.model"),
    ],
)
def test_a_model_that_does_not_fit_is_rejected_before_the_start(
    encoder: str, rerank: dict[str, Any], setting: str
) -> None:
    with pytest.raises(InputError) as refusal:
        resolved(encoder, **rerank)
    assert refusal.value.faults[0].setting == setting


def test_weights_that_are_no_classifier_are_rejected_before_the_start(encoder: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no weights for classifier"):
        resolved(encoder, kind="cross_encoder", model=models.bert(tmp_path, labels=0))


# -------------------------------------------------------------------------------------------------------- engine


class ByLength(PairScorer):
    """Scores a passage by its length and the query's; a pair has one token per character."""

    def __init__(self) -> None:
        self.busy = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.batches: list[int] = []

    def tokenize(self, query: str, instruction: str | None, texts: Sequence[str]) -> list[str]:
        return [f"{query}{instruction or ''}|{text}" for text in texts]

    def cost(self, pair: str) -> int:
        return len(pair)

    def relevance(self, pairs: Sequence[str]) -> np.ndarray:
        self.busy.set()
        self.open.wait()
        self.batches.append(max(map(len, pairs)) * len(pairs))
        return np.array([np.nan if "broken" in pair else len(pair) for pair in pairs], dtype=np.float32)


def engine(scorer: ByLength, **settings: int) -> RerankEngine:
    return RerankEngine(scorer, **settings)


def test_concurrent_searches_get_their_own_scores_in_batches_of_tokens() -> None:
    made = engine(scorer := ByLength(), batch_tokens=64)

    async def run() -> list[np.ndarray]:
        return await asyncio.gather(
            *(made.score("q" * n, None, [f"{'x' * m}" for m in range(1, 9)], 10) for n in range(1, 9)),
            made.score("q", "i", [], 10),
        )

    *scores, none = asyncio.run(run())
    for n, own in enumerate(scores, start=1):
        np.testing.assert_array_equal(own, [n + 1 + m for m in range(1, 9)])
        assert own.dtype == np.float32
    assert none.shape == (0,)
    assert max(scorer.batches) <= 64
    assert sum(scorer.batches) >= sum(n + 1 + m for n in range(1, 9) for m in range(1, 9))
    assert made.batching.counters.texts == 64


def test_a_score_that_is_not_finite_fails_only_its_own_search() -> None:
    made = engine(ByLength())

    async def run() -> list[np.ndarray | BaseException]:
        calls = (made.score("q", None, ["fine", "also"], 10), made.score("q", None, ["broken", "fine"], 10))
        return await asyncio.gather(*calls, return_exceptions=True)

    fine, broken = asyncio.run(run())
    np.testing.assert_array_equal(fine, [6, 6])
    assert isinstance(broken, ValueError)
    assert "not finite" in str(broken)


def test_a_late_search_is_dropped() -> None:
    made = engine(scorer := ByLength(), batch_tokens=96)
    scorer.open.clear()

    async def run() -> list[np.ndarray | BaseException]:
        first = asyncio.ensure_future(made.score("q", None, ["a" * 40] * 2, 60))
        while not scorer.busy.is_set():  # the model is held
            await asyncio.sleep(0.01)
        late = asyncio.ensure_future(made.score("q", None, ["b" * 40], 0.5))
        filling = [asyncio.ensure_future(made.score("q", None, ["c" * 40], 60)) for _ in range(7)]
        while made.batching.waiting < 8:
            await asyncio.sleep(0.01)
        await asyncio.wait([late])
        scorer.open.set()
        return await asyncio.gather(first, late, *filling, return_exceptions=True)

    first, late, *others = asyncio.run(run())
    np.testing.assert_array_equal(first, [42, 42])
    assert isinstance(late, DeadlineExceeded)
    assert [list(other) for other in others] == [[42]] * 7  # type: ignore[arg-type]
    assert made.batching.counters.expired == 1
    assert len(scorer.batches) == 5  # two pairs each; the late one is in none


# --------------------------------------------------------------------------------------------------------- on Ray

QUERY, INSTRUCTION = "diabetes", "Only guidelines written for clinicians."


def search(api: str, **more: Any) -> dict[str, Any]:
    body = {"query": QUERY, "instruction": INSTRUCTION, "top_k": 12, **more}
    status, answer, _ = ask(f"{api}/v1/search", body)
    assert status == 200, answer
    body = answer
    return body


def ids(answer: dict[str, Any]) -> list[str]:
    return [hit["id"] for hit in answer["hits"]]


def rerankers() -> list[str]:
    return [name for name in serve.status().applications if "-reranker-" in name]


@pytest.mark.ray
def test_searches_are_reranked_and_go_on_without_a_lost_reranker(
    ray_cluster: None, settings: ServeSettings, index: str, minilm: str
) -> None:
    encoder = InstructionEncoder.from_pretrained(minilm)
    retrieved = Index.open(index, encoder.fingerprint()).search(encoder.encode_queries([QUERY], [INSTRUCTION]), 12)[0]
    scores = LateInteraction(encoder).score(QUERY, INSTRUCTION, [hit.text for hit in retrieved])
    by_scores = [retrieved[place].id for place in (-scores).argsort(kind="stable")]
    by_cosine = [hit.id for hit in retrieved]
    assert by_scores != by_cosine

    rerank = RerankSettings(kind="late_interaction", budget_ms=7000)
    with serving(settings.model_copy(update={"rerank": rerank, "cpus_per_encoder": 0.5})) as api:
        (first,) = rerankers()
        answer = search(api)
        assert ids(answer) == by_scores
        assert {hit["id"]: hit["rerank_score"] for hit in answer["hits"]} == pytest.approx(
            {hit.id: float(score) for hit, score in zip(retrieved, scores, strict=True)}, abs=1e-4
        )
        assert ids(search(api, rerank=False)) == by_cosine
        assert ask(f"{api}/v1/models")[1]["data"][0]["reranker"]

        os.kill(replica(RERANKER)["pid"], signal.SIGKILL)
        lost = search(api)  # answered, whatever the reranker does
        assert ids(lost) == (by_cosine if lost["notes"] else by_scores)
        assert ask(f"{api}/readyz")[0] == 200
        wait_until(lambda: ids(search(api)) == by_scores, 120)  # Serve starts another one
        wait_until(lambda: max(values(api, "infembed_rerank_searches_total"), default=0) >= 2, 30)
        wait_until(lambda: max(values(api, "infembed_reranker_texts_total"), default=0) >= 1, 30)

        cheaper = rerank.model_copy(update={"depth": 1})
        run(
            settings.model_copy(update={"rerank": cheaper, "cpus_per_encoder": 0.5})
        )  # the API does something else with the same reranker
        assert rerankers() == [first]
        wait_until(lambda: ids(search(api)) == by_cosine and search(api)["hits"][0]["rerank_score"] is not None, 30)
        run(settings.model_copy(update={"rerank": None, "cpus_per_encoder": 0.5}))
        assert rerankers() == []
        assert search(api)["timings"]["rerank_ms"] is None
