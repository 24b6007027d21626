"""What a pipeline does to a live API: a model that fails its gate or its probes is not promoted, a good one is, under load."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import serve

from infembed_ray.config.pipeline import PipelineSettings
from infembed_ray.errors import GateError, StartError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.pipeline.stages import run
from infembed_ray.serving import distributed
from infembed_ray.storage.steps import read_manifest, resolve
from tests.serving.http_client import Answered, ask, under_load
from tests.serving.indexes import AGAIN, PASSAGES
from tests.support.files import write_jsonl
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.training.test_collate import record

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def worse(tmp_path_factory: pytest.TempPathFactory, minilm: str) -> str:
    """The model with noise in its weights."""
    encoder = InstructionEncoder.from_pretrained(minilm)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in encoder.backbone.parameters():
            weight.add_(weight.std() * torch.randn_like(weight))
    path = tmp_path_factory.mktemp("worse")
    encoder.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def api(ray_cluster: None) -> Iterator[str]:
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})  # as a job leaves it that is killed early
    yield f"http://127.0.0.1:{port}"
    distributed.stop()


def indexes(answers: list[Answered]) -> set[str]:
    """Return the indexes that answered; every search must have an answer."""
    assert {answer.status for answer in answers} == {200}
    return {answer.body["index_version"] for answer in answers}


def test_only_a_release_that_passes_gate_and_probes_is_promoted_and_no_search_is_lost(
    api: str, worse: str, minilm: str, tmp_path: Path
) -> None:
    texts = {"old": PASSAGES, "new": PASSAGES | AGAIN}
    corpora = {
        name: str(write_jsonl(tmp_path / f"{name}.jsonl", ({"id": id, "text": text} for id, text in rows.items())))
        for name, rows in texts.items()
    }
    probe = {"query": "diabetes", "instruction": "Only guidelines for clinicians.", "relevant": ["diabetes-doctors"]}
    probes = str(
        write_jsonl(tmp_path / "probes.jsonl", [probe, probe | {"query": "asthma", "relevant": ["asthma-doctors"]}])
    )

    def pipeline(model: str, corpus: str, **stages: dict[str, Any]) -> str:
        """Run a pipeline into the same output; return the index of its latest release."""
        serve = {"port": int(api.rsplit(":")[-1]), "wait": False, "dtype": "float32"}
        serve |= {"request_timeout_s": 8}
        index = {"model": model, "corpus": corpora[corpus], "shards": 1}
        given = {"output": str(tmp_path / "out"), "index": index, "serve": serve | stages.pop("serve", {})} | stages
        run(PipelineSettings.from_mapping(given))
        return latest()

    def latest() -> str:
        release = read_manifest(resolve(tmp_path / "out" / "release"), "output")
        return str(release["stages"]["index"]["identity"])

    old = pipeline(minilm, "old")
    held_out = write_jsonl(tmp_path / "held_out.jsonl", (vars(record(n)) for n in range(40)))
    evaluate = {"records": str(held_out), "models": {"base": minilm, "trained": worse}}
    with under_load(api, clients=2) as answers:
        with pytest.raises(GateError, match=r"evaluate: gate=trained: records: "):
            pipeline(worse, "new", evaluate=evaluate)
        assert latest() == old
        with pytest.raises(StartError, match=r"^serve: the new release is not served"):
            pipeline(worse, "old", serve={"probes": probes})
        assert latest() == old
        assert indexes(answers) == {old}
        new = pipeline(minilm, "new", serve={"probes": probes})
        assert latest() == new != old
        seen = len(answers)
        wait_until(lambda: len(answers) > seen + 20)
        assert indexes(answers[seen + 10 :]) == {new}
        assert pipeline(minilm, "old") == old  # back to the release before, by its settings
        seen = len(answers)
        wait_until(lambda: len(answers) > seen + 20)
        assert indexes(answers[seen + 10 :]) == {old}
    assert indexes(answers) == {old, new}
    print(f"{len(answers)} searches")
    assert ask(f"{api}/v1/models")[1]["data"][0]["index_version"] == old
