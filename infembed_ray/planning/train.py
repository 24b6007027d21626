"""`infembed plan train`: memory, time and cost of a training.

Batches are collated and laid out by the training's own code and counted; `planning.memory` computes the bytes. The time of a step
is model FLOPs / (peak x MFU), with the FLOPs that activation checkpointing and GradCache repeat. `mfu.yaml` has measured MFUs.
"""

import json
import math
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import get_args

import torch
import yaml

from infembed_ray.config.base import nearest
from infembed_ray.config.planning import PlanTrainSettings
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.tokenizer import Side
from infembed_ray.planning.backbones import VOCABULARY, load
from infembed_ray.planning.memory import FLOAT, ModelSize, SavedBytes, StepMemory, saved_bytes, step_memory
from infembed_ray.progress import counted
from infembed_ray.records.tables import Record
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.storage.steps import GIB, STATES, gib, output_state, require_space
from infembed_ray.training import deepspeed_config, launch
from infembed_ray.training.backbone import precision_of
from infembed_ray.training.checkpoints.manager import KEEP_LAST, CheckpointManager
from infembed_ray.training.collate import Batch
from infembed_ray.training.losses import Objective
from infembed_ray.training.observability.flops import BackboneFlops, peak_flops
from infembed_ray.training.preparation import ONE_PASS, batch_of
from infembed_ray.training.sources import Tally

GPUS: Mapping[str, tuple[str, float]] = {
    "a100-80g": ("NVIDIA A100-SXM4-80GB", 79.1),
    "h100-80g": ("NVIDIA H100 80GB HBM3", 79.1),
    "h200-141g": ("NVIDIA H200", 139.8),
    "l40s-48g": ("NVIDIA L40S", 44.5),
}
"""Short name -> torch's name, and the GiB that the driver leaves to a process."""
_SAMPLES = 4
"""Batches to count."""
_SYNTHETIC = 512
"""Minimum number of synthetic records: enough for their mean length and for different batches."""
_SPREAD = 0.4
"""Standard deviation of the logarithm of synthetic lengths, about that of MS MARCO's passages."""
_LENGTHS = dict.fromkeys(("query_positive", "query_negative"), 1)
_LENGTHS |= dict.fromkeys(("instruction_positive", "instruction_negative"), 0)
_LENGTHS |= dict.fromkeys(("document_positive", "hard_negative_document_1", "hard_negative_document_2"), 2)
"""Column of a record -> the place of its mean length in the setting `tokens`."""
_STATE_BYTES = 12
"""Bytes per trained parameter in a state: the fp32 weight and Adam's two moments."""


@dataclass(frozen=True)
class StepWork:
    """One worker's part of a step; means over `_SAMPLES` batches. `steps` are those of the run, `records` of all workers.

    `slots` and `tokens` are positions with and without padding, a shared prefix once; `graph_slots` is the maximum of those
    whose graphs exist at once. `flops` are model FLOPs, forward and backward.
    """

    queries: float
    passages: float
    slots: float
    tokens: float
    graph_slots: int
    passes: float
    flops: float
    steps: int
    records: int


@dataclass(frozen=True)
class TrainPlan:
    """A training with the layout of its settings; bytes of a GPU: all, at the peak of a step, and while the model is loaded."""

    model: str
    gpus: int
    gpu: str
    gpu_memory: float
    size: ModelSize
    work: StepWork
    memory: StepMemory
    start: float
    mfu: float
    mfu_source: str
    step_seconds: float
    hours: float
    usd: float | None
    """Of the whole run; None without a price."""

    @property
    def fits(self) -> bool:
        """Whether a GPU has the memory."""
        return max(self.memory.total, self.start) <= self.gpu_memory


def plan(settings: PlanTrainSettings) -> TrainPlan:
    """Compute memory, time and cost; nothing is run.

    Raises:
        InputError: the settings do not fit each other, the model or the GPUs.
    """
    if settings.gpu not in GPUS:
        raise InputError.of("gpu", settings.gpu, "unknown GPU", nearest(settings.gpu, GPUS))
    name, gib_of_gpu = GPUS[settings.gpu]
    settings = settings.model_copy(update={"gpus_per_worker": 1.0})
    deepspeed_config.check(settings)
    encoder = load(settings)
    work, size, tensors = _step(settings, encoder, synthetic(settings, encoder), settings.epoch_records, cuda=True)
    memory = tensors.with_framework()
    # GradCache repeats every forward pass but the last; checkpointing repeats each. A forward pass is a third.
    repeated = settings.activation_checkpointing + (1 - 1 / work.passes if settings.grad_cache_tokens else 0.0)
    mfu, source = settings.mfu, "as set"
    if mfu is None:
        mfu, source = measured_mfu(size.parameters, work.tokens / (work.passes if settings.grad_cache_tokens else 1))
    seconds = work.flops * (1 + repeated / 3) / ((peak_flops(name, precision_of(settings)) or math.inf) * mfu)
    hours, price = seconds * work.steps / 3600, settings.gpu_usd_per_hour
    return TrainPlan(
        model=settings.model,
        gpus=settings.workers,
        gpu=settings.gpu,
        gpu_memory=gib_of_gpu * GIB,
        size=size,
        work=work,
        memory=memory,
        start=size.at_start(settings.workers, settings.zero_stage) + memory.framework,
        mfu=mfu,
        mfu_source=source,
        step_seconds=seconds,
        hours=hours,
        usd=None if price is None else hours * settings.workers * price,
    )


def measured_mfu(parameters: float, tokens: float) -> tuple[float, str]:
    """Return the MFU of the measured model whose size is nearest at these tokens per step (GradCache: per pass), and its source.

    A step takes a constant time and a time per token, so 1 / MFU is linear in 1 / tokens, up to the largest measured step.
    """
    measured = yaml.safe_load(files("infembed_ray.planning").joinpath("mfu.yaml").read_text(encoding="utf-8"))
    like = min(measured["models"], key=lambda model: abs(math.log(1e9 * model["parameters"] / parameters)))
    (few, low), (many, high) = like["steps"]
    share = (1 / min(tokens, many) - 1 / many) / (1 / few - 1 / many)
    source = f"measured: {like['name']}, {measured['device']}, {like['date']}, commit {like['commit']}"
    return 1 / ((1 - share) / high + share / low), source


def tensor_memory(settings: TrainSettings, size: ModelSize, saved: SavedBytes, slots: int, passes: float) -> StepMemory:
    """Compute the memory of a worker's tensors at the peak of a step; `slots` and `passes` as in `StepWork`."""
    held, config = saved.held(slots, settings.activation_checkpointing), deepspeed_config.deepspeed_config(settings)
    return step_memory(size, held, settings.workers, config, round(passes) if settings.grad_cache_tokens else 1)


def _step(
    settings: TrainSettings, encoder: InstructionEncoder, records: Sequence[TrainingRecord], number: int, cuda: bool
) -> tuple[StepWork, ModelSize, StepMemory]:
    """Count a worker's part of a step, and the memory of its tensors; arguments as of `step_work`."""
    dtype = precision_of(settings)
    work = step_work(settings, encoder, torch.device("cuda" if cuda else "cpu"), dtype, records, number)
    size = ModelSize.of(encoder, settings)
    compiled = settings.zero_stage < 3 and encoder.train().compiles_on(torch.device("cuda" if cuda else "cpu"))
    saved = saved_bytes(encoder, dtype, compiled)
    return work, size, tensor_memory(settings, size, saved, work.graph_slots, work.passes)


def step_work(
    settings: TrainSettings,
    encoder: InstructionEncoder,
    device: torch.device,
    dtype: torch.dtype,
    records: Sequence[TrainingRecord],
    number: int,
) -> StepWork:
    """Count the first worker's share of some steps.

    Args:
        settings, device, dtype: of the run; the last two decide whether texts are packed.
        encoder: on the meta device.
        records, number: records to sample batches from, and number of those of an epoch.

    Raises:
        InputError: a step has fewer records than there are workers.
    """
    per_step = min(settings.records_per_step, number)  # as the sampler does
    if per_step < settings.workers:
        fault = f"{per_step} records a step leave some of the {settings.workers} workers without any"
        raise InputError.of("records_per_step", settings.records_per_step, fault, "set more, or fewer workers")
    encoder.train()
    budget = settings.grad_cache_tokens or ONE_PASS
    batches = list(_batches(settings, encoder, records, min(per_step, len(records))))
    texts_of = (batch.queries + batch.passages for batch in batches)
    passes = [[layout for _, layout in encoder.lay_out(texts, budget, device, dtype)] for texts in texts_of]
    slots = [[layout.input_ids.numel() for layout in of_batch] for of_batch in passes]
    work = {side: BackboneFlops.count(encoder.backbone_of(side), encoder.causal) for side in get_args(Side)}
    flops = fmean(
        sum(p.size * work[p.side].token + float(work[p.side].pairs(p)) * work[p.side].pair for p in of_batch)
        for of_batch in passes
    )
    return StepWork(
        queries=fmean(len(batch.queries) for batch in batches),
        passages=fmean(len(batch.passages) for batch in batches),
        slots=fmean(map(sum, slots)),
        tokens=fmean(sum(p.size for p in of_batch) for of_batch in passes),
        graph_slots=max(map(max if settings.grad_cache_tokens else sum, slots)),
        passes=fmean(map(len, slots)),
        flops=flops,
        steps=settings.epochs * -(-number // settings.records_per_step),
        records=per_step,
    )


def _batches(
    settings: TrainSettings, encoder: InstructionEncoder, records: Sequence[TrainingRecord], size: int
) -> Iterator[Batch]:
    """Yield the first worker's share of `_SAMPLES` batches."""
    objective = Objective.from_settings(settings)
    rng = random.Random(settings.seed)
    for n in range(_SAMPLES):
        chosen = rng.sample(records, size)
        shares = [chosen[rank :: settings.workers] for rank in range(settings.workers)]
        yield batch_of(settings, encoder, objective, shares, 0, str(n))


def synthetic(settings: PlanTrainSettings, encoder: InstructionEncoder) -> list[Record]:
    """Return records of random words for two batches or more; lengths are log-normal around the means of `tokens`."""
    rng = random.Random(settings.seed)
    some = " ".join(f"w{31 * n % VOCABULARY}" for n in range(128))
    tokens_per_word = len(encoder.tokenizer(some, add_special_tokens=False)["input_ids"]) / 128

    def text(mean: int) -> str:
        length = mean / tokens_per_word * rng.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)
        return " ".join(f"w{rng.randrange(VOCABULARY)}" for _ in range(max(1, round(length))))

    return [
        Record(id=str(n), **{column: text(settings.tokens[kind]) for column, kind in _LENGTHS.items()})
        for n in range(max(_SYNTHETIC, 2 * settings.records_per_step))
    ]


def as_text(made: TrainPlan) -> str:
    """Format the plan for people."""
    work, size = made.work, made.size
    trained = f", {size.trained / 1e6:.1f} M trained" if size.trained < size.parameters else ""
    parts = [f"{f.name} {getattr(made.memory, f.name) / GIB:.1f}" for f in fields(made.memory)]
    remedy = "lower records_per_step, set grad_cache_tokens or activation_checkpointing, raise zero_stage or workers"
    cost = "" if made.usd is None else f", {made.usd:,.0f} USD"
    return "\n".join(
        [
            f"{made.model}: {size.parameters / 1e9:.3f} B parameters{trained}; {made.gpus} x {made.gpu}",
            f"step of a GPU: {work.queries:.0f} queries, {work.passages:.0f} passages; {work.tokens:.0f} tokens "
            f"({work.slots:.0f} with padding)",
            f"run: {work.steps} steps of {work.records} records, "
            f"{work.flops * made.gpus / 1e12:.1f} model TFLOP per step",
            f"GiB of a GPU at the peak of a step: {', '.join(parts)}",
            f"memory: {made.memory.total / GIB:.1f} GiB at the peak, {made.start / GIB:.1f} GiB at the start, of "
            f"{made.gpu_memory / GIB:.1f}: {'fits' if made.fits else f'does not fit; {remedy}'}",
            f"time: {made.step_seconds:.2f} s per step, {made.hours:.2f} h{cost} at mfu={made.mfu:.2f} ({made.mfu_source})",
        ]
    )


def as_json(made: TrainPlan) -> str:
    """Format the plan as JSON: bytes, seconds, hours, USD."""
    values = asdict(made) | {"fits": made.fits}
    values["memory"]["total"] = made.memory.total
    return json.dumps(values, indent=2)


def describe(settings: TrainSettings) -> Iterator[str]:
    """Yield what a training would do, line by line; InputError as the training."""
    inputs, step = launch.prepare(settings)
    if (yield from output_state(step)):
        return
    encoder = launch.check_model(inputs.settings)
    with tempfile.TemporaryDirectory() as directory:  # a copy of the records, as the run makes it
        tallies: dict[str, Tally] = {}
        rows, sampler = launch.lay_out(settings, inputs, Path(directory), tallies)
        output = {"output": step.remote.uri} if step.remote else {}
        resumed = inputs.settings.model_copy(update=output)
        done = CheckpointManager(step.partial / STATES, resumed, sampler).require_resumable()
        for name, tally in tallies.items():
            yield f"{name.removesuffix('.path')}: {tally.describe(inputs.files[name])}"
        yield (
            f"steps: {sampler.steps_per_epoch:,} per epoch, {sampler.steps:,} in {counted(settings.epochs, 'epoch')}, on "
            f"{counted(settings.workers, 'worker')}" + (f"; {done:,} are done" if done else "")
        )
        cuda = settings.gpus_per_worker > 0
        _, weights, tensors = _step(inputs.settings, encoder, rows, len(rows), cuda)
    yield f"model: {weights.parameters / 1e6:,.1f} M parameters, {weights.trained / 1e6:,.1f} M trained"
    of = "of each GPU" if cuda else "of CPU memory for the tensors of each worker"
    memory = tensors.with_framework() if cuda else tensors
    yield f"memory: about {gib(memory.total)} {of} at the peak of a step"
    states = KEEP_LAST + (settings.validation is not None) + 1
    needed = FLOAT * weights.parameters + states * _STATE_BYTES * weights.trained
    yield require_space(step, needed, of_workers=True)
