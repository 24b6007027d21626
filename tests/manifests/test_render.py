import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from infembed_ray.cli.main import main
from infembed_ray.config.manifests import ManifestsSettings
from infembed_ray.errors import InputError
from infembed_ray.manifests import render
from infembed_ray.manifests.render import run
from tests.serving.indexes import AGAIN, PASSAGES, publish_index
from tests.support import kubernetes

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "jobs" / "configs" / "manifests.yaml")
JOBS = ("synthesize", "analyze", "train", "evaluate", "index")


def settings(output: Path, *overrides: str) -> ManifestsSettings:
    return ManifestsSettings.load(CONFIG, [f"output={output}", "stages.serve=null", *overrides])


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the settings file names others by relative paths


def written(directory: Path) -> list[dict[str, Any]]:
    files = [file for file in directory.rglob("*.yaml") if file.name not in ("kustomization.yaml", "serve-config.yaml")]
    return [document for file in files for document in kubernetes.documents(file.read_text(encoding="utf-8"))]


def job(directory: Path, stage: str) -> dict[str, Any]:
    """The RayJob of a stage."""
    return kubernetes.documents((directory / "jobs" / f"{stage}.yaml").read_text(encoding="utf-8"))[1]


def restricted(pod: dict[str, Any]) -> bool:
    """Whether a pod is allowed by Kubernetes' pod security standard `restricted`, which the namespace enforces."""
    spec = pod["spec"]
    containers = [container["securityContext"] for container in spec["containers"]]
    return (
        spec["securityContext"]["runAsNonRoot"]
        and spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        and all(not one["allowPrivilegeEscalation"] and one["capabilities"] == {"drop": ["ALL"]} for one in containers)
    )


@pytest.mark.parametrize("override", ["claim=null", "groups.head={resources: {cpu: 2, memory: 8Gi}}"])
def test_every_manifest_of_the_jobs_is_valid(tmp_path: Path, override: str) -> None:
    run(settings(tmp_path, override))
    documents = written(tmp_path)
    assert {d["kind"] for d in documents} >= {
        "RayJob",
        "ConfigMap",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "ServiceMonitor",
    }
    for document in documents:
        kubernetes.validate(document)
        assert all(restricted(pod) for pod in kubernetes.pods(document))


def test_a_job_runs_its_verb_with_the_settings_file_that_was_given(tmp_path: Path) -> None:
    run(settings(tmp_path))
    for stage in JOBS:
        config, ray_job = kubernetes.documents((tmp_path / "jobs" / f"{stage}.yaml").read_text(encoding="utf-8"))
        assert yaml.safe_load(config["data"][f"{stage}.yaml"]) == yaml.safe_load(
            (ROOT / "jobs" / "configs" / f"{stage}.yaml").read_text(encoding="utf-8")
        )
        assert ray_job["spec"]["entrypoint"] == f"infembed {stage} --config /etc/infembed/{stage}.yaml"
        head = ray_job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
        assert {"name": "settings", "configMap": {"name": config["metadata"]["name"]}} in head["volumes"]
        assert ray_job["spec"]["shutdownAfterJobFinishes"]  # Kueue requires both
        assert "enableInTreeAutoscaling" not in ray_job["spec"]["rayClusterSpec"]


def test_pods_with_gpus_get_the_gpu_image_and_the_others_do_not(tmp_path: Path) -> None:
    run(settings(tmp_path, "images.default=cpu@sha256:1", "images.gpu=cuda@sha256:2"))
    cluster = job(tmp_path, "train")["spec"]["rayClusterSpec"]
    (worker,) = cluster["workerGroupSpecs"]
    head, gpu = (part["template"]["spec"]["containers"][0] for part in (cluster["headGroupSpec"], worker))
    assert (head["image"], gpu["image"]) == ("cpu@sha256:1", "cuda@sha256:2")
    assert {"name": "INFEMBED_IMAGE", "value": "cuda@sha256:2"} in gpu["env"]
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == gpu["resources"]["requests"]["nvidia.com/gpu"] == 8


def test_a_secret_reaches_only_its_stage(tmp_path: Path) -> None:
    run(settings(tmp_path))
    for stage in JOBS:
        pods = kubernetes.pods(job(tmp_path, stage)["spec"]["rayClusterSpec"])
        sources = [source for pod in pods for source in pod["spec"]["containers"][0].get("envFrom", [])]
        assert sources == [{"secretRef": {"name": f"infembed-{stage}", "optional": True}}] * len(pods)


def test_equal_settings_give_the_same_job_and_other_settings_another_one(tmp_path: Path) -> None:
    names = []
    for overrides in ([], [], ["images.gpu=other"]):
        run(settings(tmp_path, *overrides))
        names.append(job(tmp_path, "train")["metadata"]["name"])
    assert names[0] == names[1] != names[2]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_the_base_in_the_namespace(tmp_path: Path) -> None:
    run(settings(tmp_path))
    built = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True).stdout
    documents = kubernetes.documents(built)
    namespaces = {d["metadata"].get("namespace", d["metadata"]["name"]) for d in documents}
    assert namespaces == {"infembed"}
    assert len(documents) == 9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.trian={gpu: 1}", "stages.trian: no such verb; did you mean train"),
        ("stages.train={gpus: 1}", "stages.train: no group gpus; did you mean gpu"),
        ("stages.train={gpu: 1-2}", "stages.train.gpu=1-2: give one number of pods; only `serve` is autoscaled"),
        ("stages.train={gpu: many}", "train.gpu=many: give a number of pods"),
        ("images={default: a}", "groups.gpu: has GPUs; set images.gpu"),
        ("images={gpu: a}", "images.default: is missing"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(settings(tmp_path / "out", override))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "faults"),
    [
        ({"output": "/data/a"}, ["output=/data/a"]),
        ({"output": "runs/a", "seeds": "s.jsonl"}, ["output=runs/a", "seeds=s.jsonl"]),
        ({"seeds": "/mnt/infembed/../x.jsonl"}, ["seeds=/mnt/infembed/../x.jsonl"]),
        ({"seeds": "/mnt/infembed2/x.jsonl"}, ["seeds=/mnt/infembed2/x.jsonl"]),
        ({"output": "s3://bucket/a", "seeds": "s3://bucket/s.jsonl"}, []),
        ({"output": "/mnt/infembed/deep/er"}, []),
    ],
)
def test_paths_that_pods_do_not_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], faults: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (file := tmp_path / "jobs" / "configs" / "synthesize.yaml").parent.mkdir(parents=True)
    models = {"generator": {"model": "a"}, "judge": {"model": "b"}}
    file.write_text(yaml.safe_dump({"output": "/mnt/infembed/r", "seeds": "/mnt/infembed/s.jsonl", **models, **given}))
    chosen = settings(tmp_path / "out", "stages={synthesize: {cpu: 1}}")
    if not faults:
        run(chosen)
        return
    with pytest.raises(InputError) as refused:
        run(chosen)
    lines = [str(fault) for fault in refused.value.faults]
    rest = ": pods have no such path: they share /mnt/infembed only; give a path below it, or a URI"
    assert lines == [f"stages.synthesize.{fault}{rest}" for fault in faults]
    assert not (tmp_path / "out").exists()


def test_every_mistake_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["stages.train={cpus: 1}", "stages.index={cpus: 1}", "stages.serve=null"]
    assert main(["manifests", "--config", CONFIG, f"output={tmp_path / 'out'}", *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.integration
def test_the_api_is_a_service_of_the_served_index(tmp_path: Path, minilm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(render, "MOUNT", str(tmp_path))
    from ray.serve.schema import ServeDeploySchema

    from infembed_ray.serving.release import ReleaseSpec

    indexes = [publish_index(tmp_path / "one", minilm, PASSAGES), publish_index(tmp_path / "two", minilm, AGAIN)]
    served = []
    for index in (*indexes, indexes[1]):
        file = tmp_path / "jobs" / "configs" / "serve.yaml"
        file.parent.mkdir(exist_ok=True, parents=True)
        rerank = "{kind: late_interaction}"
        file.write_text(f"{{index: {index}, host: 127.0.0.1, encoder_replicas: 2, rerank: {rerank}}}")
        run(settings(tmp_path / "out", "stages={serve: {cpu: 2-8}}"))
        (service,) = kubernetes.documents((tmp_path / "out" / "rayservice.yaml").read_text(encoding="utf-8"))
        kubernetes.validate(service)
        assert all(restricted(pod) for pod in kubernetes.pods(service))
        config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
        assert config.http_options.host == "0.0.0.0"
        (api,) = config.applications
        assert (api.name, api.args["locked"]) == ("infembed", True)  # replicas without keys do not start
        served.append(ReleaseSpec.model_validate(api.deployments[0].user_config))
    assert all(release.reranker for release in served)
    assert [release.default.index.index for release in served] == [str(indexes[0]), *[str(indexes[1])] * 2]
    assert served[1].fingerprint == served[2].fingerprint
    assert service["spec"]["excludeHeadPodFromServeSvc"]
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == "infembed-redis:6379"
    (group,) = cluster["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 8)
    domains = {spread["topologyKey"] for spread in group["template"]["spec"]["topologySpreadConstraints"]}
    assert domains == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    ports = {port["name"] for port in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]}
    assert "serve" in ports  # without it KubeRay makes no service of the API
