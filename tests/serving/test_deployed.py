"""The settings of a RayService on a real Ray Serve: what its supervisor does without any command."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from infembed_ray.config.serving import ServeSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.retrieval.index import Index
from infembed_ray.serving import distributed
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import APPLICATION, INGRESS, SUPERVISOR
from tests.serving.http_client import ask, under_load
from tests.serving.indexes import PASSAGES, publish_index
from tests.serving.releases import replica
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.ray]

KALMAR = "The Kalmar Union of 1397, part"


def deploy(settings: ServeSettings, file: Path) -> Plan:
    """Do as `serve deploy`, whose command sends the file to the dashboard, which does this."""
    plan = Plan.resolve(settings)
    plan.write_config(file)
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(yaml.safe_load(file.read_text())))
    return plan


@pytest.fixture(scope="module")
def directory(root: Path, minilm: str) -> Path:
    """The directory of an index's versions."""
    return publish_index(root / "deployed", minilm, PASSAGES).parent


@pytest.fixture(scope="module")
def of_service(directory: Path, root: Path) -> ServeSettings:
    probes = root / "probes.jsonl"
    rows = [{"query": f"{id.replace('-', ' ')}", "relevant": [id]} for id in PASSAGES]
    probes.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return ServeSettings(
        index=str(directory),
        port=free_port(),
        request_timeout_s=8,
        cpus_per_encoder=0.5,
        dtype="float32",
        compact_at=2,
        probes=str(probes),
    )


@pytest.fixture(scope="module")
def api(of_service: ServeSettings, root: Path, ray_cluster: None) -> Iterator[str]:
    distributed._start_serve(Plan.resolve(of_service))
    plan = deploy(of_service, root / "service.yaml")
    wait_until(lambda: version(plan.url) is not None, 180)
    yield plan.url
    distributed.stop()


def version(api: str) -> str | None:
    """Return the index version that answers, if any does."""
    try:
        answer = ask(f"{api}/v1/models")
    except OSError:
        return None
    return answer[1]["data"][0]["index_version"] if answer[0] == 200 else None


def latest(directory: Path) -> str:
    return (directory / "latest").read_text().strip()


def put(api: str, *numbers: int) -> int:
    documents = [{"id": f"kalmar-{number}", "text": f"{KALMAR} {number}."} for number in numbers]
    status, answer, _ = ask(f"{api}/v1/documents", {"documents": documents}, "PUT")
    assert status == 200, answer
    sequence: int = answer["sequence"]
    return sequence


def wanted() -> Any:
    """Return the release that the ingress should serve."""
    return serve.get_deployment_handle(INGRESS, APPLICATION).served.remote().result()[1]


def applications() -> set[str]:
    return set(serve.status().applications)


@pytest.mark.slow
def test_a_worse_encoder_is_refused_whether_a_file_or_the_latest_version_names_it(
    api: str, of_service: ServeSettings, directory: Path, root: Path, minilm: str
) -> None:
    served, before = version(api), applications()
    encoder = InstructionEncoder.from_pretrained(minilm)
    for weights in encoder.backbone.parameters():
        weights.data.normal_()
    encoder.save_pretrained(root / "worse")
    elsewhere = publish_index(root / "elsewhere", str(root / "worse"), PASSAGES)
    refused = deploy(of_service.model_copy(update={"index": str(elsewhere)}), root / "refused.yaml").release
    wait_until(lambda: wanted().fingerprint == refused.fingerprint, poll_s=0.1)
    wait_until(lambda: wanted().fingerprint != refused.fingerprint, 180, poll_s=0.5)
    assert version(api) == served
    (encoder_of_refused,) = refused.encoders
    assert encoder_of_refused in applications()
    wait_until(lambda: applications() == before, 120, poll_s=0.5)

    worse = publish_index(root / "deployed", str(root / "worse"), PASSAGES, shards=1)
    assert (latest(directory), worse.parent) == (worse.name, directory)
    (index_of_refused,) = {each.index.application for each in Plan.resolve(of_service).release.collections.values()}
    wait_until(lambda: index_of_refused in applications(), 120, poll_s=0.5)
    wait_until(lambda: applications() == before, 180, poll_s=0.5)
    assert version(api) == served
    (directory / "latest").write_text(str(served))


def test_live_writes_are_compacted_and_the_api_switches(api: str, directory: Path) -> None:
    served = version(api)
    with under_load(api, 1) as answers:
        sequence = put(api, *range(6))
        wait_until(lambda: version(api) != served, 240, poll_s=0.5)
    assert {answer.status for answer in answers} == {200}
    assert version(api) == latest(directory)
    assert Index.describe(directory).facts.folded == sequence
    hits = ask(f"{api}/v1/search", {"query": "Kalmar Union", "top_k": 6, "min_sequence": sequence})[1]["hits"]
    assert {hit["id"] for hit in hits} == {f"kalmar-{number}" for number in range(6)}
    assert put(api, 6) == sequence + 1


def test_a_supervisor_that_is_killed_between_compaction_and_switch_continues(api: str, directory: Path) -> None:
    served = version(api)
    put(api, *range(10, 16))
    wait_until(lambda: latest(directory) != served, 240)
    os.kill(replica(SUPERVISOR)["pid"], signal.SIGKILL)
    assert version(api) == served
    wait_until(lambda: version(api) == latest(directory) != served, 240, poll_s=0.5)


def test_the_api_stays_with_its_release_when_the_file_is_applied_again_and_the_controller_is_lost(
    api: str, of_service: ServeSettings, directory: Path, root: Path
) -> None:
    served = version(api)
    assert served == latest(directory)
    file = yaml.safe_load((root / "service.yaml").read_text())
    with under_load(api, 1) as answers:
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(file))
        wait_until(lambda: wanted().default.card.index_version != served, poll_s=0.1)
        wait_until(lambda: wanted().default.card.index_version == served, 120, poll_s=0.5)
        ray.kill(_get_global_client()._controller, no_restart=False)
        wait_until(lambda: APPLICATION in applications(), 120, poll_s=0.5)
        answered = len(answers)
        wait_until(lambda: len(answers) > answered + 50)
    assert {(answer.status, answer.body["index_version"]) for answer in answers} == {(200, served)}
    assert wanted().default.card.index_version == served
