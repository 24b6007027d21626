"""cluster.yaml against Ray's own code: schema and checks, the nodes that the autoscaler launches, and the shell commands that
the launcher runs on a node, without the installations."""

import json
import logging
import os
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.command_runner import _with_interactive
from ray.autoscaler._private.resource_demand_scheduler import _default_utilization_scorer, get_nodes_for
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig

from infembed_ray.config.evaluation import EvaluateSettings
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.config.training import TrainSettings

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "jobs" / "configs"
EC2 = {  # from Amazon's pages of instance types
    "m6i.4xlarge": {"CPU": 16},
    "m6i.8xlarge": {"CPU": 32},
    "p4de.24xlarge": {"CPU": 96, "GPU": 8},
}
COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)


@pytest.fixture
def written():
    """The parsed file."""
    return yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def prepared(written, caplog):
    """The file with the defaults of `ray up`."""
    with caplog.at_level(logging.ERROR):
        return prepare_config(written)


def launched(config, demands):
    """Return node type -> nodes that Ray's autoscaler would start for these demands, and the demands that it cannot meet."""
    to_add, unmet = get_nodes_for(
        config["available_node_types"],
        existing_nodes={config["head_node_type"]: 1},
        head_node_type=config["head_node_type"],
        max_to_add=config["max_workers"],
        resources=demands,
        utilization_scorer=lambda *arguments: _default_utilization_scorer(*arguments, node_availability_summary=None),
    )
    return dict(to_add), unmet


def test_the_file_fits_rays_schema(written):
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(written, schema)


def test_rays_launcher_accepts_it(prepared):
    validate_config(prepared)


def test_node_types_declare_what_their_instances_have(written):
    for name, node in written["available_node_types"].items():
        has = EC2[node["node_config"]["InstanceType"]]
        if name == written["head_node_type"]:
            assert node["resources"] == {"CPU": 0}
        else:
            assert node["resources"] == has


def test_worker_limits_are_consistent(written):
    pools = {n: t for n, t in written["available_node_types"].items() if n != written["head_node_type"]}
    head = written["available_node_types"][written["head_node_type"]]
    assert head["min_workers"] == head["max_workers"] == 0
    assert all(0 <= pool["min_workers"] <= pool["max_workers"] for pool in pools.values())
    assert written["max_workers"] == sum(pool["max_workers"] for pool in pools.values())
    assert pools["a100"]["min_workers"] == 0  # idle GPUs cost nothing


def test_plain_tasks_start_cpu_nodes_and_never_gpu_nodes(prepared):
    assert launched(prepared, [{"CPU": 1}] * 64) == ({"cpu": 2}, [])


def test_the_jobs_configs_get_the_gpus_that_they_request(prepared):
    train = TrainSettings.load(str(CONFIGS / "train.yaml"))
    workers = [{"CPU": train.cpus_per_worker, "GPU": train.gpus_per_worker}] * train.workers
    assert launched(prepared, workers) == ({"a100": 1}, [])
    for settings in (
        EvaluateSettings.load(str(CONFIGS / "evaluate.yaml")),
        IndexSettings.load(str(CONFIGS / "index.yaml")),
    ):
        encoders = [{"CPU": 1, "GPU": settings.gpus_per_actor}] * settings.actors
        assert launched(prepared, encoders) == ({"a100": 1}, [])


def test_demands_beyond_the_pools_stay_unmet(prepared):
    _, unmet = launched(prepared, [{"GPU": 8}] * 5)
    assert unmet == [{"GPU": 8}]


def setup_of(prepared, node):
    """Return the setup commands that Ray runs on a node of this type."""
    if node == prepared["head_node_type"]:
        return prepared["head_setup_commands"]
    return AutoscalingConfig(prepared | {"file_mounts": {}}).get_worker_setup_commands(node)


@pytest.mark.parametrize("node", ["head", "cpu", "a100"])
def test_a_node_gets_the_build_of_faiss_for_its_type(prepared, tmp_path, node):
    """Run the setup commands in a temporary home, with a pip that only logs its arguments."""
    bin_directory, package = tmp_path / "infembed" / "venv" / "bin", tmp_path / "infembed" / "package"
    for directory in (bin_directory, package, tmp_path / ".ray"):
        directory.mkdir(parents=True)
    for file in ("infembed/secrets.env", ".ray/auth_token", "infembed/package/infembed_ray-1-py3-none-any.whl"):
        (tmp_path / file).touch()
    for name, script in {"python": "", "pip": 'echo "$@" >> ~/pip.log'}.items():
        (bin_directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (bin_directory / name).chmod(0o755)
    for command in setup_of(prepared, node):
        environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        subprocess.run(["bash", "-c", f"touch ~/.bashrc; {command}"], env=environment, check=True)
    assert (tmp_path / "infembed" / "env.sh").is_file()
    ours, other = ("gpu", "cpu") if prepared["available_node_types"][node]["resources"].get("GPU") else ("cpu", "gpu")
    assert (tmp_path / "pip.log").read_text().splitlines()[-2:] == [
        f"uninstall -qy faiss-{other}",
        f"install -q -c constraints.txt infembed_ray-1-py3-none-any.whl[{ours}]",
    ]


@pytest.mark.parametrize("kind", COMMANDS)
def test_commands_are_valid_shell_after_ray_wraps_them(prepared, kind):
    of_types = [command for node in prepared["available_node_types"].values() for command in node.get(kind, [])]
    for command in prepared[kind] + of_types:
        *_, quoted = _with_interactive(command)
        (wrapped,) = shlex.split(quoted)
        check = subprocess.run(["bash", "-n", "-c", wrapped], capture_output=True, text=True, check=False)
        assert check.returncode == 0, f"{command}: {check.stderr}"


def test_ray_starts_with_token_authentication_and_the_nodes_secrets(prepared, tmp_path):
    """Run the setup commands that write the environment in a temporary home, then read what Ray would see."""
    (tmp_path / "infembed").mkdir()
    (tmp_path / "infembed" / "secrets.env").write_text("OPENAI_API_KEY=k1\nINFEMBED_API_KEYS=k2,k3\n")
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    for command in prepared["worker_setup_commands"]:
        if "env.sh" in command:
            subprocess.run(["bash", "-c", f"touch ~/.bashrc; ({command})"], env=environment, check=True)
    for kind in ("head_start_ray_commands", "worker_start_ray_commands"):
        for command in prepared[kind]:
            assert command.startswith(". ~/infembed/env.sh; ")
    shell = subprocess.run(
        ["bash", "-c", ". ~/.bashrc; env"], env=environment, capture_output=True, text=True, check=True
    )
    seen = dict(line.split("=", 1) for line in shell.stdout.splitlines() if "=" in line)
    assert seen["RAY_AUTH_MODE"] == "token"
    assert seen["OPENAI_API_KEY"] == "k1"
    assert seen["INFEMBED_API_KEYS"] == "k2,k3"
    assert seen["PATH"].startswith(f"{tmp_path}/infembed/venv/bin:")
    assert "OMP_NUM_THREADS" not in seen
    assert prepared["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_the_dashboard_listens_on_loopback_only(prepared):
    start = prepared["head_start_ray_commands"][-1]
    assert "--dashboard-host=127.0.0.1" in start
    assert "--num-cpus=0" in start


def test_no_node_is_in_rays_default_security_group(prepared):
    for node in prepared["available_node_types"].values():
        assert node["node_config"]["SecurityGroupIds"]
