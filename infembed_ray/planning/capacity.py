"""Memory of a training step by component, as DeepSpeed 0.19 allocates it: pure arithmetic.

With P parameters, T of them trained, b bytes each (fp32: 4, bf16: 2) and N workers, mixed precision takes (ZeRO,
Rajbhandari et al., arXiv 1910.02054, section 3.1) b P for parameters, b T for gradients, 4 T for fp32 master weights and
8 T for Adam's moments: the paper's 2 + 2 + 12 bytes per parameter. ZeRO-1 divides master weights and moments by N, ZeRO-2
also the gradients, ZeRO-3 also the parameters. DeepSpeed differs from the paper:

- Gradients accumulate in fp32 (`grad_accum_dtype`), so a worker's share takes 4 bytes whatever b is.
- ZeRO-1 and 2 copy an fp32 model to flat fp32 master weights. ZeRO-3 does not: its parameters are the master weights.
- Gradients travel in a buffer of `reduce_bucket_size` elements, which exists during a backward pass (ZeRO-3: always), and
  are copied once more, flat, when it is reduced.

A checkpoint is written from a copy in host memory, which stays allocated for the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

GIB = 2**30
FLOAT = 4
_MOMENTS = 8
_ALLREDUCE = 500_000_000
"""Elements that ZeRO-0 reduces at once (DeepSpeed's `numel_per_bucket`)."""
_BUCKET = 500_000_000
"""DeepSpeed's default `reduce_bucket_size`."""
_MAX_LIVE = 1_000_000_000
"""DeepSpeed's default `stage3_max_live_parameters`."""

Device = Literal["cpu", "nvme"] | None


@dataclass(frozen=True)
class Weights:
    """Sizes of a model: P and T parameters, those of the largest tensor, bytes of the frozen ones, and b per trained one."""

    parameters: int
    trained: int
    largest: int
    frozen_bytes: float
    nbytes: int

    @property
    def whole(self) -> float:
        """Bytes of all parameters on one worker."""
        return self.trained * self.nbytes + self.frozen_bytes


@dataclass(frozen=True)
class Activations:
    """Bytes on one worker: `kept` by autograd for all graphs that exist at once, `working` of the backward pass."""

    kept: float
    working: float


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at one moment; the components add up.

    Attributes:
        parameters: as the forward pass reads them; under ZeRO-3 the worker's share and those gathered at once.
        gradients, master: the worker's share, in fp32.
        optimizer: Adam's moments.
        activations: saved by autograd, and temporaries of the backward pass.
        communication: buckets.
        framework: memory outside the tensors, and losses of the allocator.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    master: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    communication: float = 0.0
    framework: float = 0.0

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class Host:
    """Bytes of a node's CPU memory and disks, for all its workers."""

    memory: float
    nvme: float


def step_memory(
    weights: Weights,
    activations: Activations,
    workers: int,
    config: Mapping[str, Any],
    backward_passes: int = 1,
    framework: float = 0.0,
) -> Memory:
    """Memory of one GPU at the peak of a step, after the first step.

    The peak is at the start or the end of the backward pass, or in the update. In between, gradients replace activations.

    Args:
        config: the DeepSpeed JSON.
        backward_passes: of a step; the later ones find gradients of the earlier ones.
        framework: bytes outside the tensors.
    """
    zero = config["zero_optimization"]
    stage = zero["stage"]
    optimizer_on, parameters_on = offloaded(config)
    share = workers if stage else 1
    trained = weights.trained / share
    bucket = int(zero.get("reduce_bucket_size", _BUCKET))
    separate_master = optimizer_on is None and stage > 0 and not (stage == 3 and weights.nbytes == FLOAT)
    master = trained * FLOAT if separate_master else 0.0
    moments = trained * _MOMENTS if optimizer_on is None else 0.0
    gradients = trained * FLOAT if optimizer_on is None else 0.0
    summed = stage == 3 or backward_passes > 1  # gradients exist before the last backward pass
    if stage == 3:
        live = min(weights.parameters, int(zero.get("stage3_max_live_parameters", _MAX_LIVE)))
        gathered = weights.whole * live / weights.parameters + weights.largest * weights.nbytes
        own = 0.0 if parameters_on else weights.whole / workers
        idle = buckets = float(bucket * weights.nbytes)
        flat = float(min(bucket, weights.trained) * weights.nbytes)
    else:
        own, gathered, idle = weights.whole, 0.0, 0.0
        if stage == 0:
            gradients = float(weights.trained * FLOAT)
            buckets, flat = 0.0, float(min(_ALLREDUCE, weights.trained) * FLOAT)
        else:
            # ZeRO-1 in bf16 keeps an fp32 sum of all gradients from step to step, and sends it.
            sums = stage == 1 and weights.nbytes != FLOAT
            nbytes = FLOAT if sums else weights.nbytes
            buckets = float((2 if zero.get("overlap_comm") else 1) * bucket * nbytes)
            flat = float(min(bucket, weights.trained) * nbytes)
            if sums:
                gradients, summed = float(weights.trained * FLOAT), True
            elif optimizer_on is not None:
                gradients = float(weights.largest * weights.nbytes)  # one at a time, on its way to the host
    states = Memory(own + gathered, gradients, master, moments, 0.0, 0.0, framework)
    at_first = replace(
        states,
        gradients=gradients if summed else 0.0,
        activations=activations.kept + activations.working,
        communication=buckets,
    )
    at_last = replace(states, communication=buckets + flat)
    in_update = replace(states, parameters=own, communication=idle)
    return max(at_first, at_last, in_update, key=lambda memory: memory.total)


def start_memory(weights: Weights, workers: int, config: Mapping[str, Any], framework: float = 0.0) -> float:
    """Bytes on one GPU while the model is loaded: twice, as it arrives and flat; under ZeRO-3 of its partition only."""
    if config["zero_optimization"]["stage"] == 3:
        return 2 * weights.whole / workers + weights.largest * weights.nbytes + framework
    return 2 * weights.whole + framework


def host_memory(weights: Weights, workers: int, per_node: int, config: Mapping[str, Any], process: float) -> Host:
    """CPU memory and disk of a node.

    Every worker reads the backbone in the run's precision before it goes to its GPU (b P). Under ZeRO-3, worker 0 reads one
    parameter after the other. Offloaded optimizer states take 16 T / N per worker (master weights, moments, gradients), and
    under ZeRO-1 and 2 b T / N for the updated parameters. Offloaded parameters take b P / N. The copy for checkpoints takes
    12 T / N per worker, and without ZeRO-3 also b T of worker 0.

    Args:
        workers, per_node: N, and those of one node.
        config: the DeepSpeed JSON.
        process: bytes of a worker's process.
    """
    stage = config["zero_optimization"]["stage"]
    optimizer_on, parameters_on = offloaded(config)
    trained = weights.trained / workers
    states = trained * (FLOAT + _MOMENTS)
    memory = nvme = 0.0
    if optimizer_on is not None:
        memory += trained * (FLOAT + (weights.nbytes if stage < 3 else 0))  # gradients, and what goes back
        memory, nvme = (memory + states, nvme) if optimizer_on == "cpu" else (memory, nvme + states)
    if parameters_on is not None:
        own = weights.whole / workers
        memory, nvme = (memory + own, nvme) if parameters_on == "cpu" else (memory, nvme + own)
    arrival = weights.largest * FLOAT if stage == 3 else weights.parameters * weights.nbytes
    of_first = weights.trained * weights.nbytes if stage < 3 else 0
    if stage == 0:
        copied, of_first = 0.0, of_first + weights.trained * _MOMENTS  # worker 0 writes all of it
    else:
        copied = states
    each = process + max(memory + copied, arrival)
    return Host(per_node * each + of_first, per_node * nvme)


def offloaded(config: Mapping[str, Any]) -> tuple[Device, Device]:
    """Devices of the optimizer states and of the parameters; None: the GPU."""
    zero = config["zero_optimization"]
    places = [zero.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param")]
    return tuple(None if place == "none" else place for place in places)  # type: ignore[return-value]
