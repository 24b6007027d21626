"""Time and money of a run: from measured MFU where there is one, from a simple model of work and traffic else.

The model: passes compute at an assumed share of the peak, and nothing overlaps, so that it errs on the slow side. A
collective over V bytes takes as long as the slower of two ways: V (g - 1) / g over the links of a node's g GPUs, and
V (n - 1) / n over the link of each of n nodes. The traffic is the ZeRO paper's (arXiv 1910.02054, section 7): gradients
once and updated parameters once, and under ZeRO-3 the parameters for each forward pass, and again as the backward pass
comes through it, instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from infembed_ray.config import Hardware, nearest
from infembed_ray.errors import InputError
from infembed_ray.planning.capacity import FLOAT, Weights, offloaded
from infembed_ray.planning.workload import Workload

_GIGA = 1e9


@dataclass(frozen=True)
class Cluster:
    """What a run is to run on, all figures known; bytes, bytes a second, FLOP/s a GPU, USD."""

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
        """Of all nodes: the workers."""
        return self.nodes * self.gpus_per_node

    @classmethod
    def of(cls, hardware: Hardware, peak: float | None) -> Cluster:
        """Fill in what is not given.

        Args:
            hardware: the settings.
            peak: FLOP/s of the device in the run's precision; None: unknown.

        Raises:
            InputError: an unknown device, or one whose peak is not known and not given.
        """
        device = known(hardware.device)
        if hardware.peak_tflops is not None:
            peak = hardware.peak_tflops * 1e12
        if peak is None:
            raise InputError(f"hardware.peak_tflops is missing: the peak of {hardware.device} is not known; set it")

        def given(value: float | None, name: str) -> float:
            return float(device[name] if value is None else value)

        return cls(
            name=hardware.device,
            nodes=hardware.nodes,
            gpus_per_node=hardware.gpus_per_node,
            memory=given(hardware.memory_gib, "memory_gib") * 2**30,
            host_memory=given(hardware.host_gib, "host_gib") * 2**30,
            nvme=given(hardware.nvme_gib, "nvme_gib") * 2**30,
            peak=peak,
            usd_per_gpu_hour=given(hardware.usd_per_gpu_hour, "usd_per_gpu_hour"),
            gpu_link=device["gpu_link_gb_s"] * _GIGA,
            node_link=device["node_link_gb_s"] * _GIGA,
            host_link=device["host_link_gb_s"] * _GIGA,
            nvme_link=device["nvme_gb_s"] * _GIGA,
        )


@dataclass(frozen=True)
class Node:
    """A kind of node without GPUs; bytes, USD an hour."""

    name: str
    vcpus: int
    memory: float
    nvme: float
    usd_per_hour: float

    @property
    def usable(self) -> float:
        """Bytes of memory that system and Ray leave."""
        return self.memory * assumed("node_memory_share")

    @property
    def read_seconds(self) -> float:
        """Of one vector from the disk that an index lies on."""
        return 1e-6 * assumed("nvme_read_us" if self.nvme else "volume_read_us")

    def monthly(self, count: int, disk: float) -> float:
        """USD of so many for a month, and of a volume for those bytes that their own disks do not hold."""
        volume = max(0.0, disk - count * self.nvme) / 2**30 * float(_hardware()["volume_usd_per_gib_month"])
        return count * self.usd_per_hour * assumed("hours_per_month") + volume


def nodes(name: str | None = None) -> list[Node]:
    """Those of hardware.yaml, or the one; InputError if it does not know it."""
    known = _hardware()["nodes"]
    if name is not None and name not in known:
        raise InputError(f"node={name}: not in planning/hardware.yaml: {nearest(name, known)}")
    return [
        Node(key, of["vcpus"], of["memory_gib"] * 2.0**30, of["nvme_gib"] * 2.0**30, of["usd_per_hour"])
        for key, of in known.items()
        if name in (None, key)
    ]


@cache
def _hardware() -> dict[str, Any]:
    text = files("infembed_ray.planning").joinpath("hardware.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def known(device: str, name: str = "hardware.device") -> dict[str, Any]:
    """What hardware.yaml says of a device; InputError, which names the setting, if it does not know it."""
    devices = _hardware()["devices"]
    if device not in devices:
        raise InputError(f"{name}={device}: not in planning/hardware.yaml: {nearest(device, devices)}")
    return dict(devices[device])


def assumed(name: str) -> float:
    """An assumption of hardware.yaml."""
    return float(_hardware()["assumed"][name])


def step_seconds(
    work: Workload, weights: Weights, cluster: Cluster, config: Mapping[str, Any], grad_cache: bool, checkpointing: bool
) -> float:
    """Seconds of a step by the model of this module.

    Padding is computed like any token. GradCache repeats every forward pass but each batch's last, activation
    checkpointing each; a forward pass is a third of the FLOPs.

    Args:
        work: of a worker.
        weights: of the model.
        cluster: that it runs on.
        config: the DeepSpeed JSON.
        grad_cache: are passes repeated?
        checkpointing: are activations computed anew?
    """
    repeated = (1 - work.batches / work.passes if grad_cache else 0.0) + checkpointing
    computing = work.flops * work.slots / work.tokens * (1 + repeated / 3)
    seconds = computing / (cluster.peak * assumed("kernel_efficiency"))
    stage = config["zero_optimization"]["stage"]
    backward = work.passes if grad_cache else work.batches
    gathers = 2 * work.passes + (work.passes - work.batches if grad_cache else 0)
    trained, whole = weights.trained * weights.nbytes, weights.whole
    if stage == 3:
        traffic = whole * gathers + trained * backward
    elif stage == 2:
        traffic = trained * backward + trained
    else:  # adds up in fp32, where it is, until the step's end
        traffic = weights.trained * FLOAT + trained
    seconds += collective_seconds(traffic, cluster)
    optimizer_on, parameters_on = offloaded(config)
    share = 1 / cluster.gpus
    if optimizer_on is not None:
        seconds += 2 * trained * share / cluster.host_link
        seconds += weights.trained / cluster.nodes / assumed("cpu_adam_per_second")
    if optimizer_on == "nvme":
        seconds += 2 * 12 * weights.trained / cluster.nodes / cluster.nvme_link
    if parameters_on is not None:
        read = whole * share * gathers
        seconds += read / (cluster.host_link if parameters_on == "cpu" else cluster.nvme_link / cluster.gpus_per_node)
    return seconds


def collective_seconds(volume: float, cluster: Cluster) -> float:
    """Seconds that all GPUs need to gather, or to reduce and scatter, so many bytes."""
    g, n = cluster.gpus_per_node, cluster.nodes
    slower = max(volume * (g - 1) / g / cluster.gpu_link, volume * (n - 1) / n / cluster.node_link)
    return slower / assumed("link_efficiency")
