"""Settings of the re-ranking stage, checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.serving.release import RerankerArguments
from infembed_ray.serving.reranking.arguments import resolve
from tests.evaluation.retrievers import models
from tests.modeling import backbones

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.bert(tmp_path_factory.mktemp("classifier"), labels=1)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return backbones.write("modernbert", tmp_path_factory.mktemp("encoder"))


def resolved(served: str, **rerank: Any) -> RerankerArguments:
    arguments = resolve(ServeSettings.from_mapping({"index": "i", "rerank": rerank}), served)
    assert arguments is not None
    return arguments


def test_it_is_off_by_default(encoder: str) -> None:
    assert resolve(ServeSettings(index="i"), encoder) is None


def test_late_interaction_uses_the_served_encoder_or_another(encoder: str, tmp_path: Path) -> None:
    other = backbones.write("llama", tmp_path)
    served, named = resolved(encoder, kind="late_interaction"), resolved(encoder, kind="late_interaction", model=other)
    assert (served.model, named.model) == (encoder, other)
    assert served.reranker is named.reranker is None
    assert served.application != named.application
    assert served.application.startswith("infembed-reranker-")


def test_a_directory_is_a_classifier_over_instruction_and_query(encoder: str, classifier: str) -> None:
    made = resolved(encoder, kind="cross_encoder", model=classifier)
    assert made.model == classifier
    assert made.reranker == {
        "kind": "classifier",
        "model": classifier,
        "instructed_query": "{instruction} {query}",
        "plain_query": "{query}",
    }
    mapping = {"kind": "classifier", "model": classifier, "instructed_query": "{query} ({instruction})"}
    other = resolved(encoder, kind="cross_encoder", model={**mapping, "plain_query": "{query}", "pair_length": 64})
    assert other.reranker is not None
    assert other.reranker["pair_length"] == 64
    assert made.application != other.application


def test_a_baseline_over_a_model_of_its_own(encoder: str, tmp_path: Path) -> None:
    t5 = models.t5(tmp_path)
    made = resolved(encoder, kind="cross_encoder", model={"baseline": "monot5-base", "model": t5})
    assert made.reranker is not None
    assert (made.reranker["kind"], made.reranker["model"]) == ("seq2seq", t5)
    assert made.reranker["answers"] == ["▁true", "▁false"]


def test_what_the_api_does_with_the_scores_starts_no_other_reranker(encoder: str) -> None:
    first = resolved(encoder, kind="late_interaction")
    for change in ({"depth": 7}, {"weight": 0.5}, {"budget_ms": 9.0}):
        assert resolved(encoder, kind="late_interaction", **change).application == first.application
    for change in ({"replicas": 2}, {"cpus": 2.0}):
        assert resolved(encoder, kind="late_interaction", **change).application != first.application


def test_arguments_round_trip_through_the_config_file(encoder: str, classifier: str) -> None:
    for made in (
        resolved(encoder, kind="late_interaction", gpus=0.5),
        resolved(encoder, kind="cross_encoder", model=classifier),
    ):
        assert RerankerArguments.model_validate(made.model_dump(mode="json", exclude_defaults=True)) == made


def test_a_model_that_does_not_fit_is_rejected_before_the_start(encoder: str, classifier: str, tmp_path: Path) -> None:
    def rejects(message: str, **rerank: Any) -> None:
        with pytest.raises(InputError, match=message) as refusal:
            resolved(encoder, **rerank)
        assert "\n" not in str(refusal.value)

    rejects(r"rerank\.model: missing; rerank\.kind=cross_encoder needs a model", kind="cross_encoder")
    rejects(r"rerank\.model=\./nowhere: no such model directory", kind="cross_encoder", model="./nowhere")
    rejects(r"rerank\.model=\./nowhere: no such model directory", kind="late_interaction", model="./nowhere")
    rejects("a mapping of settings is for rerank.kind=cross_encoder", kind="late_interaction", model={"model": "x"})
    rejects("has no weights for classifier", kind="cross_encoder", model=encoder_of_bert(tmp_path))
    rejects("is of kind encoder, which does not read query", kind="cross_encoder", model={"model": classifier})
    rejects("is of kind bm25", kind="cross_encoder", model="bm25")
    rejects(r"rerank\.depth=0", kind="late_interaction", depth=0)
    rejects(r"rerank\.weight=1.5", kind="late_interaction", weight=1.5)


def encoder_of_bert(path: Path) -> str:
    return models.bert(path, labels=0)
