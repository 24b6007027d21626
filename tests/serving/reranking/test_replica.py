"""The API with a reranker on a real Ray Serve: started, lost, upgraded and stopped."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from ray import serve

from infembed_ray.config.serving import RerankSettings, ServeSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.late_interaction import LateInteraction
from infembed_ray.retrieval.index import Index
from infembed_ray.serving.distributed import run, serving
from infembed_ray.serving.release import RERANKER
from tests.serving.http_client import ask, values
from tests.serving.releases import replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

QUERY, INSTRUCTION = "diabetes", "Only guidelines written for clinicians."


def search(api: str, **more: Any) -> dict[str, Any]:
    body = {"query": QUERY, "instruction": INSTRUCTION, "top_k": 12, **more}
    status, answer, _ = ask(f"{api}/v1/search", body)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


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

    rerank = RerankSettings(kind="late_interaction", budget_ms=7000, cpus=0.5)
    with serving(settings.model_copy(update={"rerank": rerank})) as api:
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
        run(settings.model_copy(update={"rerank": cheaper}))  # the API does something else with the same reranker
        assert rerankers() == [first]
        wait_until(lambda: ids(search(api)) == by_cosine and search(api)["hits"][0]["rerank_score"] is not None, 30)
        run(settings.model_copy(update={"rerank": None}))
        assert rerankers() == []
        assert search(api)["timings"]["rerank_ms"] is None
