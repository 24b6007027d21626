"""Hardware, prices and the step-time model of the planner.

The step-time model: passes compute at an assumed share of the peak, and nothing overlaps, so the estimate errs on the slow
side. A collective over V bytes takes the longer of V (g - 1) / g over the links of a node's g GPUs and V (n - 1) / n over
the link of each of n nodes. The traffic is that of the ZeRO paper (arXiv 1910.02054, section 7): gradients once and updated
parameters once; under ZeRO-3 instead the parameters for each forward pass and again for its backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import yaml

from infembed_ray.config.base import nearest
from infembed_ray.config.planning import Hardware
from infembed_ray.errors import InputError
from infembed_ray.planning.capacity import FLOAT, GIB, Weights, offloaded
from infembed_ray.planning.workload import Workload
from infembed_ray.training.observability.flops import peak_flops

_GIGA = 1e9


@dataclass(frozen=True)
class Cluster:
    """GPU nodes of a run. Sizes in bytes, links in bytes per second, `peak` in FLOP/s per GPU."""

    name: str
    nodes: int
    gpus_per_node: int
    memory: float
    host_memory: float
    nvme: float
    peak: float
    usd_per_gpu_hour: float
    gpu_link: float
    node_link: float
    host_link: float
    nvme_link: float

    @property
    def gpus(self) -> int:
        """GPUs of all nodes; one worker each."""
        return self.nodes * self.gpus_per_node

    @classmethod
    def from_settings(cls, hardware: Hardware, dtype: torch.dtype) -> Cluster:
        """Complete the settings by the device's figures in hardware.yaml.

        Raises:
            InputError: the device is unknown, or its peak in this precision is neither known nor given.
        """
        device = gpu(hardware.device)
        peak = peak_flops(device["name"], dtype) if hardware.peak_tflops is None else hardware.peak_tflops * 1e12
        if peak is None:
            raise InputError(f"hardware.peak_tflops is missing: the peak of {hardware.device} is unknown; set it")
        device |= hardware.model_dump(exclude_none=True)
        return cls(
            name=hardware.device,
            nodes=hardware.nodes,
            gpus_per_node=hardware.gpus_per_node,
            memory=device["memory_gib"] * GIB,
            host_memory=device["host_gib"] * GIB,
            nvme=device["nvme_gib"] * GIB,
            peak=peak,
            usd_per_gpu_hour=device["usd_per_gpu_hour"],
            gpu_link=device["gpu_link_gb_s"] * _GIGA,
            node_link=device["node_link_gb_s"] * _GIGA,
            host_link=device["host_link_gb_s"] * _GIGA,
            nvme_link=device["nvme_gb_s"] * _GIGA,
        )


@dataclass(frozen=True)
class Node:
    """A kind of node without GPUs. Sizes in bytes."""

    name: str
    vcpus: int
    memory: float
    nvme: float
    usd_per_hour: float

    @property
    def usable(self) -> float:
        """Bytes of memory left by the system and Ray."""
        return self.memory * assumed("node_memory_share")

    @property
    def read_seconds(self) -> float:
        """Seconds to read one vector from the disk of the index."""
        return 1e-6 * assumed("nvme_read_us" if self.nvme else "volume_read_us")

    def monthly(self, count: int, disk: float) -> float:
        """USD per month of `count` nodes, plus a network volume for the bytes that their own disks cannot hold."""
        volume = max(0.0, disk - count * self.nvme) / GIB * float(_hardware()["volume_usd_per_gib_month"])
        return count * self.usd_per_hour * assumed("hours_per_month") + volume


@dataclass(frozen=True)
class Demand:
    """Identical replicas to be placed: `memory` and `disk` in bytes, and `vcpus`, of each."""

    replicas: int
    memory: float
    vcpus: int = 0
    disk: float = 0.0

    def per_node(self, node: Node) -> float:
        """Replicas that one node holds. Files beyond its own disk lie on a network volume, so a disk holds at least one."""
        by_cpu = node.vcpus // self.vcpus if self.vcpus else math.inf
        by_disk = max(1, node.nvme // self.disk) if node.nvme and self.disk else math.inf
        return min(node.usable // self.memory, by_cpu, by_disk)


def node_count(demands: Sequence[Demand], node: Node, least: int = 1) -> int | None:
    """Nodes of one kind that hold all replicas, by total memory, total vCPUs and whole replicas; None if one exceeds a node."""
    if not all(demand.per_node(node) for demand in demands):
        return None
    return max(
        least,
        math.ceil(sum(demand.replicas * demand.memory for demand in demands) / node.usable),
        math.ceil(sum(demand.replicas * demand.vcpus for demand in demands) / node.vcpus),
        *(math.ceil(demand.replicas / demand.per_node(node)) for demand in demands),
    )


@cache
def _hardware() -> dict[str, Any]:
    text = files("infembed_ray.planning").joinpath("hardware.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def gpu(device: str, setting: str = "hardware.device") -> dict[str, Any]:
    """The entry of a GPU in hardware.yaml; InputError naming the setting if there is none."""
    return dict(_entry("devices", device, setting))


def nodes(name: str | None = None) -> list[Node]:
    """The node kinds of hardware.yaml, or the one named; InputError if it is unknown."""
    chosen = _hardware()["nodes"] if name is None else {name: _entry("nodes", name, "node")}
    return [
        Node(key, n["vcpus"], n["memory_gib"] * float(GIB), n["nvme_gib"] * float(GIB), n["usd_per_hour"])
        for key, n in chosen.items()
    ]


def _entry(section: str, name: str, setting: str) -> dict[str, Any]:
    known = _hardware()[section]
    if name not in known:
        raise InputError(f"{setting}={name}: not in planning/hardware.yaml: {nearest(name, known)}")
    return dict(known[name])


def assumed(name: str) -> float:
    """An assumption of hardware.yaml."""
    return float(_hardware()["assumed"][name])


def step_seconds(
    work: Workload, weights: Weights, cluster: Cluster, config: Mapping[str, Any], grad_cache: bool, checkpointing: bool
) -> float:
    """Estimate the seconds of a training step (see the module docstring and `step_parts`)."""
    return sum(step_parts(work, weights, cluster, config, grad_cache, checkpointing).values())


def step_parts(
    work: Workload, weights: Weights, cluster: Cluster, config: Mapping[str, Any], grad_cache: bool, checkpointing: bool
) -> dict[str, float]:
    """Estimate the seconds of a training step by the hardware that takes them.

    Padding costs as much as tokens. GradCache repeats every forward pass but the last of a batch; activation checkpointing
    repeats each. A forward pass is a third of the FLOPs.

    Args:
        work: of one worker.
        config: the DeepSpeed JSON.
    """
    repeated = (1 - work.batches / work.passes if grad_cache else 0.0) + checkpointing
    computing = work.flops * work.slots / work.tokens * (1 + repeated / 3)
    stage = config["zero_optimization"]["stage"]
    backward = work.passes if grad_cache else work.batches
    gathers = 2 * work.passes + (work.passes - work.batches if grad_cache else 0)
    trained, whole = weights.trained * weights.nbytes, weights.whole
    if stage == 3:
        traffic = whole * gathers + trained * backward
    elif stage == 2:
        traffic = trained * backward + trained
    else:  # gradients accumulate locally in fp32 until the end of the step
        traffic = weights.trained * FLOAT + trained
    links = _link_seconds(traffic, cluster)
    slower = max(links, key=lambda link: links[link])
    parts = {"GPU kernels": computing / (cluster.peak * assumed("kernel_efficiency")), slower: links[slower]}
    optimizer_on, parameters_on = offloaded(config)
    share, offloading = 1 / cluster.gpus, 0.0
    if optimizer_on is not None:
        offloading += 2 * trained * share / cluster.host_link
        offloading += weights.trained / cluster.nodes / assumed("cpu_adam_per_second")
    if optimizer_on == "nvme":
        offloading += 2 * 12 * weights.trained / cluster.nodes / cluster.nvme_link
    if parameters_on is not None:
        read = whole * share * gathers
        offloading += read / (
            cluster.host_link if parameters_on == "cpu" else cluster.nvme_link / cluster.gpus_per_node
        )
    return parts | {"offload": offloading}


def collective_seconds(volume: float, cluster: Cluster) -> float:
    """Seconds to all-gather or reduce-scatter `volume` bytes over all GPUs."""
    return max(_link_seconds(volume, cluster).values())


def _link_seconds(volume: float, cluster: Cluster) -> dict[str, float]:
    """Seconds of a collective over each kind of link; the links work at the same time."""
    g, n, efficiency = cluster.gpus_per_node, cluster.nodes, assumed("link_efficiency")
    return {
        "links within a node": volume * (g - 1) / g / cluster.gpu_link / efficiency,
        "links between nodes": volume * (n - 1) / n / cluster.node_link / efficiency,
    }
