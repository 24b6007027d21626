"""`infembed plan train`: memory, time and cost of a training, for every layout of DeepSpeed on given hardware."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any, Literal

import torch

from infembed_ray.config.planning import PlanTrainSettings
from infembed_ray.config.training import Offload, TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.planning import cost
from infembed_ray.planning.activations import Saved, saved
from infembed_ray.planning.backbones import load
from infembed_ray.planning.capacity import (
    GIB,
    Activations,
    Host,
    Memory,
    Weights,
    host_memory,
    start_memory,
    step_memory,
)
from infembed_ray.planning.cost import Cluster
from infembed_ray.planning.tables import table
from infembed_ray.planning.workload import Workload, workload
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.storage.steps import resolve_input
from infembed_ray.training import deepspeed_config
from infembed_ray.training.observability.metrics import read_metrics

_NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes per weight in NF4 with double quantisation: 4 bits, and the scales of blocks of 64 (QLoRA, arXiv 2305.14314)."""
_CPU = Offload(optimizer="cpu")
_LAYOUTS: tuple[tuple[int, Offload], ...] = (
    *((stage, Offload()) for stage in (0, 1, 2, 3)),
    (2, _CPU),
    (3, _CPU),
    (3, Offload(optimizer="cpu", parameters="cpu")),
    (3, Offload(optimizer="cpu", parameters="nvme", nvme_path="NVME")),
)
_WARM_UP = 5
"""Steps at the start of a run that its measured MFU leaves out."""


@dataclass(frozen=True)
class TrainOption:
    """One layout of a training.

    Attributes:
        memory: bytes of a GPU at the peak of a step.
        start: bytes of a GPU while DeepSpeed loads the model.
        obstacles: why the layout does not fit; empty if it fits.
        bottleneck: hardware that takes most of a step.
    """

    zero_stage: int
    offload: dict[str, str]
    activation_checkpointing: bool
    memory: Memory
    start: float
    host: Host
    obstacles: tuple[str, ...]
    step_seconds: float
    bottleneck: str

    @property
    def overrides(self) -> str:
        """The layout as settings on a command line."""
        checkpointing = f"activation_checkpointing={str(self.activation_checkpointing).lower()}"
        offload = [f"offload.{what}={place}" for what, place in self.offload.items()]
        return " ".join([f"zero_stage={self.zero_stage}", checkpointing, *offload])


@dataclass(frozen=True)
class TrainPlan:
    """All layouts of a training.

    Attributes:
        work: of one worker in one step.
        plans: every layout, with and without activation checkpointing.
        chosen: position of the fastest plan that fits; None: none fits.
        asked: position of the plan of the settings themselves; None: it is not among them.
        speed: origin of the times.
    """

    model: str
    cluster: Cluster
    precision: str
    weights: Weights
    work: Workload
    plans: tuple[TrainOption, ...]
    chosen: int | None
    asked: int | None
    speed: Literal["assumed", "given", "measured"]

    def totals(self, option: TrainOption) -> dict[str, float]:
        """Return `hours` and `usd` of the whole run, without checkpoints and evaluations, and `mfu`, its share of the peak."""
        hours = option.step_seconds * self.work.steps / 3600
        usd = hours * self.cluster.gpus * self.cluster.usd_per_gpu_hour
        return {"hours": hours, "usd": usd, "mfu": self.work.flops / (option.step_seconds * self.cluster.peak)}


def plan(settings: PlanTrainSettings) -> TrainPlan:
    """Compute all layouts and choose the fastest that fits; nothing is run.

    Raises:
        InputError: the settings do not fit each other, the model or the hardware.
    """
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    cluster = Cluster.from_settings(settings.hardware, dtype)
    settings = settings.model_copy(update={"workers": cluster.gpus, "gpus_per_worker": 1.0})
    deepspeed_config.check(settings)
    if settings.teacher is not None:
        raise InputError(
            f"teacher={settings.teacher}: is not planned for; leave it out, and reserve its fp32 weights on every GPU"
        )
    mfu, speed = _measured_mfu(settings)
    encoder = load(settings)
    work = workload(settings, encoder, cluster.gpus, torch.device("cuda"), dtype)
    weights, kept = weights_of(encoder, settings), saved(encoder, dtype)
    ways = [way for stage, offload in _LAYOUTS for way in _allowed(settings, stage, offload)]
    plans = [_option(way, work, weights, kept, cluster) for way in ways]
    asked = next((n for n, way in enumerate(ways) if _layout(way) == _layout(settings)), None)
    if mfu is not None:
        if asked is None:
            raise InputError(f"{speed} MFU: zero_stage={settings.zero_stage} with this offload is none of the plans")
        slower = work.flops / (mfu * cluster.peak) / plans[asked].step_seconds
        plans = [replace(p, step_seconds=p.step_seconds * slower) for p in plans]
    fitting = [n for n, p in enumerate(plans) if not p.obstacles]
    chosen = min(fitting, key=lambda n: (plans[n].step_seconds, plans[n].memory.total), default=None)
    return TrainPlan(settings.model, cluster, settings.precision, weights, work, tuple(plans), chosen, asked, speed)


def _allowed(settings: PlanTrainSettings, stage: int, offload: Offload) -> Iterator[PlanTrainSettings]:
    """The settings with this layout, without and with activation checkpointing, as far as DeepSpeed allows it."""
    if stage == 3 and settings.lora is not None and settings.lora.quantized:
        return  # ZeRO-3 cannot partition 4-bit weights
    for checkpointing in (False, True):
        change = {"zero_stage": stage, "offload": offload, "activation_checkpointing": checkpointing}
        way = settings.model_copy(update=change)
        try:
            deepspeed_config.check(way)
        except InputError:
            continue
        yield way


def _layout(settings: TrainSettings) -> tuple[Any, ...]:
    """What tells layouts apart."""
    offload = settings.offload
    return settings.zero_stage, settings.activation_checkpointing, offload.optimizer, offload.parameters


def weights_of(encoder: InstructionEncoder, settings: TrainSettings) -> Weights:
    """Sizes of a model and of its frozen part."""
    nbytes = 2 if settings.precision == "bf16" else 4
    quantized = settings.lora is not None and settings.lora.quantized
    linear = {id(module.weight) for module in encoder.modules() if isinstance(module, torch.nn.Linear) and quantized}
    parameters = list(encoder.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    return Weights(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        largest=max(p.numel() for p in parameters),
        frozen_bytes=sum(p.numel() * (_NF4_BYTES if id(p) in linear else nbytes) for p in frozen),
        nbytes=nbytes,
    )


def tensor_memory(settings: TrainSettings, work: Workload, weights: Weights, kept: Saved, workers: int) -> Memory:
    """Memory of a worker's tensors at the peak of a step.

    The graphs that exist at once are those of a batch, or of GradCache's largest pass; each has its own backward pass.
    """
    layer = work.graph_slots * kept.layer
    held = Activations(work.graph_slots * kept.token, layer)
    if settings.activation_checkpointing:
        held = Activations(work.graph_slots * kept.checkpointed, 2 * layer)
    passes = round(work.passes) if settings.grad_cache_tokens else work.batches
    return step_memory(weights, held, workers, deepspeed_config.deepspeed_config(settings), passes)


def _option(
    settings: PlanTrainSettings, work: Workload, weights: Weights, kept: Saved, cluster: Cluster
) -> TrainOption:
    config = deepspeed_config.deepspeed_config(settings)
    checkpointing = settings.activation_checkpointing
    memory = _with_framework(tensor_memory(settings, work, weights, kept, cluster.gpus))
    start = start_memory(weights, cluster.gpus, config, memory.framework)
    host = host_memory(weights, cluster.gpus, cluster.gpus_per_node, config, cost.assumed("host_process_gib") * GIB)
    needs = (
        ("a GPU at a step's peak", memory.total, cluster.memory),
        ("a GPU at the start", start, cluster.memory),
        ("a node's CPUs", host.memory, cluster.host_memory),
        ("a node's disks", host.nvme, cluster.nvme),
    )
    offload = {"optimizer": settings.offload.optimizer, "parameters": settings.offload.parameters}
    parts = cost.step_parts(work, weights, cluster, config, settings.grad_cache_tokens is not None, checkpointing)
    return TrainOption(
        zero_stage=settings.zero_stage,
        offload={what: place for what, place in offload.items() if place},
        activation_checkpointing=checkpointing,
        memory=memory,
        start=start,
        host=host,
        obstacles=tuple(
            f"{where} needs {need / GIB:.0f} GiB of {there / GIB:.0f}" for where, need, there in needs if need > there
        ),
        step_seconds=sum(parts.values()),
        bottleneck=max(parts, key=lambda part: parts[part]),
    )


def peak_memory(settings: TrainSettings, encoder: InstructionEncoder, records: Sequence[TrainingRecord]) -> Memory:
    """Memory of one worker at the peak of a step, with the settings' own layout, workers and device."""
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    gpu = settings.gpus_per_worker > 0
    planned = PlanTrainSettings.from_mapping(settings.model_dump())
    work = workload(planned, encoder, settings.workers, torch.device("cuda" if gpu else "cpu"), dtype, records)
    weights = weights_of(encoder, settings)
    memory = tensor_memory(settings, work, weights, saved(encoder, dtype), settings.workers)
    return _with_framework(memory) if gpu else memory


def _with_framework(memory: Memory) -> Memory:
    """Add what a GPU holds besides the tensors."""
    return replace(memory, framework=cost.assumed("framework_gib") * GIB + cost.assumed("fragmentation") * memory.total)


def _measured_mfu(settings: PlanTrainSettings) -> tuple[float | None, Literal["assumed", "given", "measured"]]:
    """The MFU of the settings' own layout, and its origin."""
    if settings.measured is None:
        return settings.mfu, "assumed" if settings.mfu is None else "given"
    if settings.mfu is not None:
        raise InputError(f"mfu={settings.mfu}: measured={settings.measured} gives it too; leave one of them out")
    metrics = read_metrics(resolve_input(settings.measured, "measured"))[_WARM_UP:]
    found = [m["mfu"] for m in metrics if m.get("mfu")]
    if not found:
        raise InputError(
            f"measured={settings.measured}: no MFU after its first {_WARM_UP} steps; give a longer run on GPUs, or mfu"
        )
    return median(found), "measured"


_SPEED = {
    "assumed": "an assumed share of the peak (planning/hardware.yaml), without overlap: compare layouts by them, nothing more.",
    "given": "the given MFU, for the layout marked *; the others in proportion.",
    "measured": "the measured MFU, for the layout marked *; the others in proportion.",
}
_COMPONENTS = dict(
    zip(("params", "grads", "master", "optim", "activ", "comm", "other"), (f.name for f in fields(Memory)), strict=True)
)


def as_text(made: TrainPlan) -> str:
    """Format the plan for people: the workload of a step, a table of all layouts, the choice."""
    work, weights, cluster = made.work, made.weights, made.cluster
    rows = [_columns(made, number) for number in range(len(made.plans))]
    lines = [
        f"{made.model}: {weights.parameters / 1e9:.3f} B parameters"
        + (f", {weights.trained / 1e6:.1f} M trained" if weights.trained < weights.parameters else "")
        + f", {made.precision}; {cluster.nodes} x {cluster.gpus_per_node} {cluster.name}",
        f"per batch and GPU: {work.own} instruction-query texts + {work.queries - work.own:.0f} for negatives, "
        f"{work.passages} passages; {work.tokens / work.batches:.0f} tokens ({work.slots / work.batches:.0f} with padding), "
        f"{work.passes / work.batches:.0f} passes, at most {work.graph_slots} tokens with graphs",
        f"run: {work.steps} steps of {work.batches} batch{'es' * (work.batches > 1)} of {work.records} records"
        f"{' (all there are)' * work.whole_epoch}, "
        f"{work.flops * cluster.gpus / 1e12:.1f} model TFLOP per step",
        "",
        *table(rows),
        "",
        "GiB per GPU at the peak of a step, by component; host: GiB of a node's CPU memory. > fastest that fits, * as set.",
        f"Times from {_SPEED[made.speed]}",
    ]
    if made.chosen is None:
        reasons = min((option.obstacles for option in made.plans), key=len)
        lines.append(
            f"Nothing fits. Nearest: {'; '.join(reasons)}. Lower records_per_step, set grad_cache_tokens, add nodes."
        )
    else:
        best = made.plans[made.chosen]
        totals = made.totals(best)
        lines.append(
            f"Fastest that fits: {best.overrides}: {best.memory.total / GIB:.1f} GiB a GPU, "
            f"{best.step_seconds:.2f} s a step, {totals['hours']:.2f} h, {totals['usd']:.0f} USD"
        )
    return "\n".join(lines)


def _columns(made: TrainPlan, number: int) -> dict[str, str]:
    """Cells of a layout's row by their headings."""
    option = made.plans[number]
    totals = made.totals(option)
    return {
        "": ">" * (number == made.chosen) + "*" * (number == made.asked),
        "zero": str(option.zero_stage),
        "offload": "+".join(f"{what[:5]}:{place}" for what, place in option.offload.items()) or "-",
        "ckpt": "yes" if option.activation_checkpointing else "no",
        **{heading: f"{getattr(option.memory, name) / GIB:.1f}" for heading, name in _COMPONENTS.items()},
        "total": f"{option.memory.total / GIB:.1f}",
        "host": f"{option.host.memory / GIB:.0f}",
        "s/step": f"{option.step_seconds:.2f}",
        "hours": f"{totals['hours']:.2f}",
        "USD": f"{totals['usd']:.0f}",
        "MFU": f"{totals['mfu']:.2f}",
        "fits": "; ".join(option.obstacles) or "yes",
    }


def as_json(made: TrainPlan) -> str:
    """Format the plan as JSON: bytes, seconds, hours, USD."""
    values = asdict(made)
    for number, (option, plain) in enumerate(zip(made.plans, values["plans"], strict=True)):
        plain["memory"]["total"] = option.memory.total
        plain |= {
            "overrides": option.overrides,
            "fits": not option.obstacles,
            "chosen": number == made.chosen,
            "as_set": number == made.asked,
            **made.totals(option),
        }
    return json.dumps(values, indent=2)
