"""cluster.yaml and its variants in jobs/clusters against Ray's own schema and checks, and the shell commands on a node."""

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
from ray.autoscaler._private.docker import validate_docker_config
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig

ROOT = Path(__file__).parents[2]
AWS, GCP, LOCAL = "cluster.yaml", "jobs/clusters/gcp.yaml", "jobs/clusters/on-premises.yaml"
MACHINES = {  # from the clouds' pages of machine types
    "m6i.4xlarge": {"CPU": 16},
    "m6i.8xlarge": {"CPU": 32},
    "p4d.24xlarge": {"CPU": 96, "GPU": 8},
    "p4de.24xlarge": {"CPU": 96, "GPU": 8},
    "n2-standard-16": {"CPU": 16},
    "n2-standard-32": {"CPU": 32},
    "a2-ultragpu-8g": {"CPU": 96, "GPU": 8},
}
COMMANDS = ("initialization_commands", "setup_commands", "head_start_ray_commands", "worker_start_ray_commands")


def read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def prepared(name):
    """The file with the defaults of `ray up`."""
    logging.getLogger("ray.autoscaler").setLevel(logging.ERROR)
    return prepare_config(read(name))


@pytest.mark.parametrize("name", [AWS, GCP, LOCAL])
def test_ray_accepts_the_file(name):
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(read(name), schema)
    validate_config(prepared(name))
    validate_docker_config(prepared(name))


@pytest.mark.parametrize("name", [AWS, GCP])
def test_node_types_declare_what_their_machines_have_within_consistent_limits(name):
    file = read(name)
    for kind, node in file["available_node_types"].items():
        config, is_head = node["node_config"], kind == file["head_node_type"]
        has = MACHINES[config.get("InstanceType") or config["machineType"]]
        assert node["resources"] == ({"CPU": 0} if is_head else has)
        assert 0 <= node["min_workers"] <= node["max_workers"] <= file["max_workers"]
        assert node["min_workers"] == 0 or "GPU" not in node["resources"]  # idle GPUs cost nothing
        assert not is_head or node["max_workers"] == 0


@pytest.mark.parametrize("name", [AWS, GCP])
def test_a_node_gets_the_image_with_faiss_for_its_machine(name):
    config = AutoscalingConfig(prepared(name) | {"file_mounts": {}})
    for kind, node in config.get_config("available_node_types").items():
        docker = config.get_docker_config(kind)
        image = docker.get("worker_image", docker["image"])
        assert image.endswith("-cuda" if node["resources"].get("GPU") else "-cpu")
        assert "pip" not in " ".join(config.get_worker_setup_commands(kind))  # nothing is installed at boot


def test_no_node_has_a_public_address():
    assert read(AWS)["provider"]["use_internal_ips"]
    assert read(GCP)["provider"]["use_internal_ips"]
    for node in read(GCP)["available_node_types"].values():
        assert all("accessConfigs" not in interface for interface in node["node_config"]["networkInterfaces"])


def test_gpu_nodes_have_efa_on_every_network_card_and_no_node_is_in_rays_default_security_group():
    for node in read(AWS)["available_node_types"].values():
        config = node["node_config"]
        if "GPU" in node["resources"]:
            cards = [(i["NetworkCardIndex"], i["DeviceIndex"], i["InterfaceType"]) for i in config["NetworkInterfaces"]]
            assert cards == [(0, 0, "efa"), (1, 1, "efa"), (2, 1, "efa"), (3, 1, "efa")]
            assert config["Placement"] == {"GroupName": "infembed-a100"}
        groups = [config] if "SecurityGroupIds" in config else config["NetworkInterfaces"]
        assert all(group.get("SecurityGroupIds") or group.get("Groups") for group in groups)


def test_only_the_head_may_start_machines():
    actions = {}
    for name in ("head", "worker"):
        policy = json.loads((ROOT / "jobs" / "clusters" / "aws" / f"{name}-policy.json").read_text(encoding="utf-8"))
        named = [statement["Action"] for statement in policy["Statement"]]
        actions[name] = {each for one in named for each in ([one] if isinstance(one, str) else one)}
    assert not {action for action in actions["worker"] if action.startswith(("ec2:", "iam:"))}
    assert not {action for action in actions["head"] | actions["worker"] if "*" in action}
    for kind, node in read(AWS)["available_node_types"].items():
        role = "infembed-head" if kind == "head" else "infembed-worker"
        assert node["node_config"]["IamInstanceProfile"] == {"Name": role}


@pytest.mark.parametrize("name", [AWS, GCP, LOCAL])
def test_commands_are_valid_shell_after_ray_wraps_them_and_the_dashboard_is_on_loopback(name):
    config = prepared(name)
    for command in (command for kind in COMMANDS for command in config[kind]):
        *_, quoted = _with_interactive(command)
        (wrapped,) = shlex.split(quoted)
        subprocess.run(["bash", "-n", "-c", wrapped], check=True)
    start = config["head_start_ray_commands"][-1]
    assert "--dashboard-host=127.0.0.1" in start
    assert "--num-cpus=0" in start


@pytest.mark.parametrize("name", [AWS, GCP, LOCAL])
def test_ray_starts_with_token_authentication_and_the_nodes_secrets(name, tmp_path):
    """Run the setup commands in a temporary home, then read what Ray would see."""
    (tmp_path / "infembed").mkdir()
    (tmp_path / "infembed" / "auth_token").write_text("token")
    (tmp_path / "infembed" / "secrets.env").write_text("OPENAI_API_KEY=k1\nINFEMBED_API_KEYS=k2,k3\n")
    (tmp_path / ".bashrc").touch()
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    config = prepared(name)
    for command in config["setup_commands"]:
        subprocess.run(["bash", "-c", command], env=environment, check=True)
    for kind in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert all(command.startswith(". ~/env.sh; ") for command in config[kind])
    shell = subprocess.run(
        ["bash", "-c", ". ~/.bashrc; env"], env=environment, capture_output=True, text=True, check=True
    )
    seen = dict(line.split("=", 1) for line in shell.stdout.splitlines() if "=" in line)
    assert seen["RAY_AUTH_MODE"] == "token"
    assert seen["RAY_AUTH_TOKEN_PATH"] == f"{tmp_path}/infembed/auth_token"
    assert (seen["OPENAI_API_KEY"], seen["INFEMBED_API_KEYS"]) == ("k1", "k2,k3")
    assert seen["PATH"].startswith("/opt/infembed/bin:")
    assert "OMP_NUM_THREADS" not in seen
    assert (tmp_path / "infembed" / "secrets.env").stat().st_mode & 0o77 == 0
    assert config["file_mounts"]["~/infembed"] == "~/.infembed/cluster"
