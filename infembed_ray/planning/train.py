"""`infembed plan train`: what a training needs and costs on given hardware, in every way that DeepSpeed can lay it out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any, Literal

import torch

from infembed_ray.config import Offload, PlanTrainSettings, TrainSettings
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
from infembed_ray.planning.workload import Workload, workload
from infembed_ray.progress import say
from infembed_ray.storage import existing
from infembed_ray.training import deepspeed_config
from infembed_ray.training.flops import peak_flops
from infembed_ray.training.metrics import read_metrics

_FOUR_BITS = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes a weight in NF4 with double quantisation: 4 bits, and the scales of blocks of 64 (QLoRA, arXiv 2305.14314)."""
_LAYOUTS: tuple[tuple[Literal[0, 1, 2, 3], Offload], ...] = (
    (0, Offload()),
    (1, Offload()),
    (2, Offload()),
    (3, Offload()),
    (2, Offload(optimizer="cpu")),
    (3, Offload(optimizer="cpu")),
    (3, Offload(optimizer="cpu", parameters="cpu")),
    (3, Offload(optimizer="cpu", parameters="nvme", nvme_path="NVME")),
)
_WARM_UP = 5
"""Steps at a run's start that say little of its speed."""


@dataclass(frozen=True)
class Plan:
    """One way to run.

    Attributes:
        zero_stage, offload, activation_checkpointing: the settings it takes.
        memory: of a GPU at the peak of a step, bytes.
        start: bytes on a GPU while the model is taken over.
        host: of a node, bytes.
        obstacles: why it does not fit; empty: it fits.
        step_seconds: expected.
    """

    zero_stage: int
    offload: dict[str, str]
    activation_checkpointing: bool
    memory: Memory
    start: float
    host: Host
    obstacles: tuple[str, ...]
    step_seconds: float

    @property
    def overrides(self) -> str:
        """The settings, as a command line gives them."""
        names = [
            f"zero_stage={self.zero_stage}",
            f"activation_checkpointing={str(self.activation_checkpointing).lower()}",
        ]
        return " ".join([*names, *(f"offload.{what}={place}" for what, place in self.offload.items())])


@dataclass(frozen=True)
class Report:
    """All plans of a run.

    Attributes:
        model, cluster, workers, precision: whose.
        weights: of the model.
        work: of a worker and step.
        plans: every layout, without and with activation checkpointing.
        chosen: index of the fastest plan that fits; None: none fits.
        asked: index of the plan that the settings themselves are; None: not among them.
        speed: what the times are made of: `assumed`, `given` or `measured`.
    """

    model: str
    cluster: Cluster
    precision: str
    weights: Weights
    work: Workload
    plans: tuple[Plan, ...]
    chosen: int | None
    asked: int | None
    speed: Literal["assumed", "given", "measured"]

    def hours(self, plan: Plan) -> float:
        """Of the whole run, without saving states and evaluations."""
        return plan.step_seconds * self.work.steps / 3600

    def usd(self, plan: Plan) -> float:
        """Price of the whole run."""
        return self.hours(plan) * self.cluster.gpus * self.cluster.usd_per_gpu_hour

    def mfu(self, plan: Plan) -> float:
        """Share of the peak."""
        return self.work.flops / (plan.step_seconds * self.cluster.peak)


def run(settings: PlanTrainSettings, as_json: bool = False) -> None:
    """Print the plans of a training; nothing is run.

    Raises:
        InputError: the settings do not fit one another, the model or the hardware.
    """
    made = plan(settings)
    say(json.dumps(as_plain(made), indent=2) if as_json else as_text(made))


def plan(settings: PlanTrainSettings) -> Report:
    """All ways to run a training on its hardware, with the fastest that fits."""
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    cluster = Cluster.of(settings.hardware, peak_flops(cost.known(settings.hardware.device)["name"], dtype))
    settings = settings.model_copy(update={"workers": cluster.gpus, "gpus_per_worker": 1.0})
    deepspeed_config.check(settings)
    if settings.teacher is not None:
        raise InputError(
            f"teacher={settings.teacher}: is not planned for; leave it out, and keep room for it, whole and in fp32, on "
            "every GPU"
        )
    mfu, speed = _measured(settings)
    encoder = load(settings)
    work = workload(settings, encoder, cluster.gpus, torch.device("cuda"), dtype)
    weights = weights_of(encoder, settings)
    kept = saved(encoder, dtype)
    quantized = settings.lora is not None and settings.lora.quantized
    plans = []
    for stage, offload in _LAYOUTS:
        if quantized and stage == 3:
            continue  # ZeRO-3 cannot divide weights of 4 bits
        for checkpointing in (False, True):
            change = {"zero_stage": stage, "offload": offload, "activation_checkpointing": checkpointing}
            try:
                deepspeed_config.check(way := settings.model_copy(update=change))
            except InputError:
                continue  # this precision or this option of the run knows no such layout
            plans.append(_plan(way, work, weights, kept, cluster))
    asked = next((n for n, p in enumerate(plans) if _is(p, settings)), None)
    if mfu is not None:
        if asked is None:
            raise InputError(f"{speed} MFU: zero_stage={settings.zero_stage} with this offload is none of the plans")
        slower = work.flops / (mfu * cluster.peak) / plans[asked].step_seconds
        plans = [replace(p, step_seconds=p.step_seconds * slower) for p in plans]
    fitting = [n for n, p in enumerate(plans) if not p.obstacles]
    chosen = min(fitting, key=lambda n: (plans[n].step_seconds, plans[n].memory.total), default=None)
    return Report(settings.model, cluster, settings.precision, weights, work, tuple(plans), chosen, asked, speed)


def weights_of(encoder: InstructionEncoder, settings: TrainSettings) -> Weights:
    """Sizes of a model, and what its frozen part takes."""
    nbytes = 2 if settings.precision == "bf16" else 4
    quantized = settings.lora is not None and settings.lora.quantized
    linear = {id(module.weight) for module in encoder.modules() if isinstance(module, torch.nn.Linear) and quantized}
    parameters = list(encoder.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    return Weights(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        largest=max(p.numel() for p in parameters),
        frozen_bytes=sum(p.numel() * (_FOUR_BITS if id(p) in linear else nbytes) for p in frozen),
        nbytes=nbytes,
    )


def activations(work: Workload, kept: Saved, checkpointing: bool) -> Activations:
    """Bytes of a batch's graphs: of all passes at once, or of GradCache's largest."""
    layer = work.graph_slots * kept.layer
    if checkpointing:
        return Activations(work.graph_slots * kept.checkpointed, 2 * layer)
    return Activations(work.graph_slots * kept.token, layer)


def backward_passes(work: Workload, settings: TrainSettings) -> int:
    """Of a step: one a batch, or one for each of GradCache's."""
    return round(work.passes) if settings.grad_cache_tokens else work.batches


def _plan(settings: PlanTrainSettings, work: Workload, weights: Weights, kept: Saved, cluster: Cluster) -> Plan:
    config = deepspeed_config.deepspeed_config(settings)
    checkpointing = settings.activation_checkpointing
    framework = cost.assumed("framework_gib") * GIB
    memory = step_memory(
        weights, activations(work, kept, checkpointing), cluster.gpus, config, backward_passes(work, settings)
    )
    framework += cost.assumed("fragmentation") * memory.total
    memory = replace(memory, framework=framework)
    start = start_memory(weights, framework)
    host = host_memory(weights, cluster.gpus, cluster.gpus_per_node, config, cost.assumed("host_process_gib") * GIB)
    needs = (
        ("a GPU at a step's peak", memory.total, cluster.memory),
        ("a GPU at the start", start, cluster.memory),
        ("a node's CPUs", host.memory, cluster.host_memory),
        ("a node's disks", host.nvme, cluster.nvme),
    )
    offload = {"optimizer": settings.offload.optimizer, "parameters": settings.offload.parameters}
    return Plan(
        zero_stage=settings.zero_stage,
        offload={what: place for what, place in offload.items() if place},
        activation_checkpointing=checkpointing,
        memory=memory,
        start=start,
        host=host,
        obstacles=tuple(
            f"{where} needs {need / GIB:.0f} GiB of {there / GIB:.0f}" for where, need, there in needs if need > there
        ),
        step_seconds=cost.step_seconds(
            work, weights, cluster, config, settings.grad_cache_tokens is not None, checkpointing
        ),
    )


def _is(plan: Plan, settings: TrainSettings) -> bool:
    places = (settings.offload.optimizer, settings.offload.parameters)
    return (
        plan.zero_stage == settings.zero_stage
        and plan.activation_checkpointing == settings.activation_checkpointing
        and (plan.offload.get("optimizer"), plan.offload.get("parameters")) == places
    )


def _measured(settings: PlanTrainSettings) -> tuple[float | None, Literal["assumed", "given", "measured"]]:
    """The MFU of the settings' own layout, and where it comes from."""
    if settings.mfu is not None and settings.measured is not None:
        raise InputError(f"mfu={settings.mfu}: measured={settings.measured} gives it too; leave one of them out")
    if settings.measured is None:
        return settings.mfu, "assumed" if settings.mfu is None else "given"
    metrics = read_metrics(existing(settings.measured, "measured"))[_WARM_UP:]
    found = [m["mfu"] for m in metrics if m.get("mfu")]
    if not found:
        raise InputError(
            f"measured={settings.measured}: no MFU after its first {_WARM_UP} steps; give a longer run on GPUs, or mfu"
        )
    return median(found), "measured"


# --------------------------------------------------------------------------------------------------- how it is shown


def as_text(report: Report) -> str:
    """The report for people: what is read in a step, a table of all plans, the choice."""
    work, weights, cluster = report.work, report.weights, report.cluster
    lines = [
        f"{report.model}: {weights.parameters / 1e9:.3f} B parameters"
        + (f", {weights.trained / 1e6:.1f} M trained" if weights.trained < weights.parameters else "")
        + f", {report.precision}; {cluster.nodes} x {cluster.gpus_per_node} {cluster.name}",
        f"a batch, a GPU: {work.own} instruction-query texts + {work.queries - work.own:.0f} more for negatives, "
        f"{work.passages} passages; {work.tokens / work.batches:.0f} tokens in {work.slots / work.batches:.0f} places, "
        f"{work.passes / work.batches:.0f} passes, {work.graph_slots} places with graphs at once",
        f"a run: {work.steps} steps of {work.batches} batch{'es' * (work.batches > 1)} of {work.records} records"
        f"{', all that there are' * work.whole_epoch}, "
        f"{work.flops * cluster.gpus / 1e12:.1f} model TFLOP a step",
        "",
        *_aligned([_HEADER, *(_row(report, n) for n in range(len(report.plans)))]),
        "",
        "GiB a GPU at the peak of a step, by component; host: GiB of a node's CPU memory. > the fastest that fits, * as set.",
        f"Times from {_SPEED[report.speed]}",
    ]
    if report.chosen is None:
        reasons = min((plan.obstacles for plan in report.plans), key=len)
        lines.append(
            f"Nothing fits. Nearest: {'; '.join(reasons)}. Lower records_per_step, set grad_cache_tokens, add nodes."
        )
    else:
        best = report.plans[report.chosen]
        lines.append(
            f"Fastest that fits: {best.overrides}: {best.memory.total / GIB:.1f} GiB a GPU, "
            f"{best.step_seconds:.2f} s a step, {report.hours(best):.2f} h, {report.usd(best):.0f} USD"
        )
    return "\n".join(lines)


_SPEED = {
    "assumed": "an assumed share of the peak (planning/hardware.yaml), nothing overlapping: for comparison, not for promises.",
    "given": "the MFU that was given, for the layout marked *; the others in proportion.",
    "measured": "the MFU that was measured, for the layout marked *; the others in proportion.",
}
_COMPONENTS = tuple(f.name for f in fields(Memory))
_HEADER = (
    *("", "zero", "offload", "ckpt", "params", "grads", "master", "optim", "activ", "comm", "other"),
    *("total", "host", "s/step", "hours", "USD", "MFU", "fits"),
)


def _row(report: Report, number: int) -> tuple[str, ...]:
    plan = report.plans[number]
    marks = ">" * (number == report.chosen) + "*" * (number == report.asked)
    return (
        marks,
        str(plan.zero_stage),
        "+".join(f"{what[:5]}:{place}" for what, place in plan.offload.items()) or "-",
        "yes" if plan.activation_checkpointing else "no",
        *(f"{getattr(plan.memory, name) / GIB:.1f}" for name in _COMPONENTS),
        f"{plan.memory.total / GIB:.1f}",
        f"{plan.host.memory / GIB:.0f}",
        f"{plan.step_seconds:.2f}",
        f"{report.hours(plan):.2f}",
        f"{report.usd(plan):.0f}",
        f"{report.mfu(plan):.2f}",
        "; ".join(plan.obstacles) or "yes",
    )


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def as_plain(report: Report) -> dict[str, Any]:
    """The report as JSON values: bytes, seconds, hours, USD."""
    plans = []
    for number, plan in enumerate(report.plans):
        values = asdict(plan)
        values["memory"]["total"] = plan.memory.total
        plans.append(
            values
            | {
                "overrides": plan.overrides,
                "fits": not plan.obstacles,
                "chosen": number == report.chosen,
                "as_set": number == report.asked,
                "hours": report.hours(plan),
                "usd": report.usd(plan),
                "mfu": report.mfu(plan),
            }
        )
    return asdict(report) | {"plans": plans}
