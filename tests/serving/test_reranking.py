"""The reranker: settings checked before a start, and its engine over a scorer that the tests know."""

import asyncio
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.formats import Asked
from infembed_ray.modeling.rerankers import PairScorer
from infembed_ray.serving.encoder.batching import DeadlineExceeded
from infembed_ray.serving.release import RerankerArguments
from infembed_ray.serving.reranking import PLAIN_CLASSIFIER, RerankEngine, resolve
from tests.evaluation.retrievers import models
from tests.modeling import backbones

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
    (tmp_path / "latest").write_text("copy\n")  # as in the output of a training
    assert resolved(encoder, kind="cross_encoder", model=str(tmp_path)).application == made.application


def test_what_the_api_does_with_the_scores_starts_no_other_reranker(encoder: str) -> None:
    first = resolved(encoder, kind="late_interaction")
    for change in ({"depth": 7}, {"budget_ms": 9.0}):
        assert resolved(encoder, kind="late_interaction", **change).application == first.application
    assert resolved(encoder, kind="late_interaction", replicas=2).application != first.application
    assert resolved(encoder, kind="late_interaction", cpus=2.0).application != first.application


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
    model = models.bert(tmp_path, labels=0)
    with pytest.raises(InputError, match=r"^rerank.model=.*: is a BertModel, not a model of kind=classifier"):
        resolved(encoder, kind="cross_encoder", model=model)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": None}))
    with pytest.raises(InputError, match="has no weights for classifier"):
        resolved(encoder, kind="cross_encoder", model=model)


# -------------------------------------------------------------------------------------------------------- engine


class ByLength(PairScorer):
    """Scores a passage by its length and the query's; a pair has one token per character."""

    def __init__(self) -> None:
        self.busy = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.batches: list[int] = []

    def tokenized(self, pairs: Sequence[tuple[Asked, str]]) -> list[str]:
        return [f"{asked.query}{asked.instruction or ''}|{text}" for asked, text in pairs]

    def cost(self, pair: str) -> int:
        return len(pair)

    def relevance(self, pairs: Sequence[str]) -> np.ndarray:
        self.busy.set()
        self.open.wait()
        self.batches.append(max(map(len, pairs)) * len(pairs))
        return np.array([np.nan if "broken" in pair else len(pair) for pair in pairs], dtype=np.float32)


async def test_concurrent_searches_get_their_own_scores_in_batches_of_tokens() -> None:
    made = RerankEngine(scorer := ByLength(), batch_tokens=64)
    *scores, none = await asyncio.gather(
        *(made.score("q" * n, None, [f"{'x' * m}" for m in range(1, 9)], 10) for n in range(1, 9)),
        made.score("q", "i", [], 10),
    )
    for n, own in enumerate(scores, start=1):
        np.testing.assert_array_equal(own, [n + 1 + m for m in range(1, 9)])
        assert own.dtype == np.float32
    assert none.shape == (0,)
    assert max(scorer.batches) <= 64
    assert sum(scorer.batches) >= sum(n + 1 + m for n in range(1, 9) for m in range(1, 9))
    assert made.batching.counters.texts == 64


async def test_a_score_that_is_not_finite_fails_only_its_own_search() -> None:
    made = RerankEngine(ByLength())
    calls = (made.score("q", None, ["fine", "also"], 10), made.score("q", None, ["broken", "fine"], 10))
    fine, broken = await asyncio.gather(*calls, return_exceptions=True)
    np.testing.assert_array_equal(fine, [6, 6])
    assert isinstance(broken, ValueError)
    assert "not finite" in str(broken)


async def test_a_late_search_is_dropped() -> None:
    made = RerankEngine(scorer := ByLength(), batch_tokens=96)
    scorer.open.clear()
    first = asyncio.ensure_future(made.score("q", None, ["a" * 40] * 2, 60))
    while not scorer.busy.is_set():  # the model is held
        await asyncio.sleep(0.01)
    late = asyncio.ensure_future(made.score("q", None, ["b" * 40], 0.5))
    filling = [asyncio.ensure_future(made.score("q", None, ["c" * 40], 60)) for _ in range(7)]
    while made.batching.waiting < 8:
        await asyncio.sleep(0.01)
    await asyncio.wait([late])
    scorer.open.set()
    np.testing.assert_array_equal(await first, [42, 42])
    with pytest.raises(DeadlineExceeded):
        await late
    assert [list(other) for other in await asyncio.gather(*filling)] == [[42]] * 7
    assert made.batching.counters.expired == 1
    assert len(scorer.batches) == 5  # two pairs each; the late one is in none
