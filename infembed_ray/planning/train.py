"""`infembed plan train`: memory, time and cost of a training, for every layout of DeepSpeed.

Batches are collated and laid out by the training's own code and counted; `planning.memory` computes the bytes. The time of a step
is model FLOPs / (peak x MFU), with the FLOPs that activation checkpointing and GradCache repeat.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import get_args

import torch

from infembed_ray.config.planning import PlanTrainSettings
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout
from infembed_ray.modeling.tokenizer import Side
from infembed_ray.planning.backbones import TOKENS_PER_WORD, load, stands_in
from infembed_ray.planning.hardware import FRAGMENTATION, FRAMEWORK_GIB, PlannedGpu
from infembed_ray.planning.memory import (
    GIB,
    HeldActivations,
    ModelSize,
    SavedBytes,
    StepMemory,
    saved_bytes,
    start_memory,
    step_memory,
)
from infembed_ray.progress import aligned, counted
from infembed_ray.records.tables import Record
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.storage.dry_run import gib, require_space_of_workers, state
from infembed_ray.storage.steps import STATES
from infembed_ray.training import deepspeed_config, launch, sources
from infembed_ray.training.checkpoints.manager import KEEP_LAST, CheckpointManager
from infembed_ray.training.collate import Batch, collate, drawn
from infembed_ray.training.losses import Objective
from infembed_ray.training.observability.flops import BackboneFlops
from infembed_ray.training.sources import Tally

_LAYOUTS = ((2, None), (3, None), (1, None), (0, None), (2, "optimizer"), (3, "optimizer"), (3, "all"))
"""ZeRO stage and offload, preferred ones first: ZeRO-2 sends least, and offload goes over the host's bus in every step."""
_SAMPLES = 4
"""Batches to count."""
_SYNTHETIC = 512
"""Least number of synthetic records: enough for their mean length and for different batches."""
_ONE_PASS = 1 << 40
_SPREAD = 0.4
"""Standard deviation of the logarithm of synthetic lengths, about that of MS MARCO's passages."""
_INSTRUCTION, _QUERY, _PASSAGE = range(3)
_LENGTHS = {
    "query_positive": _QUERY,
    "query_negative": _QUERY,
    "instruction_positive": _INSTRUCTION,
    "instruction_negative": _INSTRUCTION,
    "document_positive": _PASSAGE,
    "hard_negative_document_1": _PASSAGE,
    "hard_negative_document_2": _PASSAGE,
}
"""Column of a record -> the place of its mean length in the setting `tokens`."""


@dataclass(frozen=True)
class StepWork:
    """One worker's part of a step; means over `_SAMPLES` batches.

    Attributes:
        queries, passages: texts of a batch; `own`: queries of the records themselves, without drawn negatives.
        slots, tokens: positions of a step with and without padding; a shared prefix counts once.
        graph_slots: most positions whose graphs exist at once.
        passes: forward passes of a step.
        flops: model FLOPs of a step, forward and backward.
        steps: of the whole run.
        records: of a batch, all workers together; `whole_epoch`: these are all records there are.
    """

    queries: float
    own: int
    passages: int
    slots: float
    tokens: float
    graph_slots: int
    passes: float
    flops: float
    steps: int
    records: int
    whole_epoch: bool


@dataclass(frozen=True)
class TrainLayout:
    """One layout of a training.

    Attributes:
        memory: bytes of a GPU at the peak of a step.
        start: bytes of a GPU while DeepSpeed loads the model.
        obstacles: why the layout does not fit; empty if it fits.
    """

    zero_stage: int
    offload: str | None
    activation_checkpointing: bool
    memory: StepMemory
    start: float
    obstacles: tuple[str, ...]
    step_seconds: float

    @property
    def overrides(self) -> str:
        """The layout as settings on a command line."""
        checkpointing = f"activation_checkpointing={str(self.activation_checkpointing).lower()}"
        offload = f" offload={self.offload}" if self.offload else ""
        return f"zero_stage={self.zero_stage} {checkpointing}{offload}"


@dataclass(frozen=True)
class TrainPlan:
    """All layouts of a training.

    Attributes:
        work: of one worker in one step.
        layouts: every layout, with and without activation checkpointing, preferred ones first.
        chosen: position of the first layout that fits; None: none fits.
        as_set: position of the layout of the settings; None: it is not among them.
    """

    model: str
    gpus: int
    gpu: PlannedGpu
    precision: str
    mfu: float
    size: ModelSize
    work: StepWork
    layouts: tuple[TrainLayout, ...]
    chosen: int | None
    as_set: int | None

    def totals(self, layout: TrainLayout) -> dict[str, float]:
        """Return `hours` and `usd` of the whole run, without checkpoints and evaluations."""
        hours = layout.step_seconds * self.work.steps / 3600
        return {"hours": hours, "usd": hours * self.gpus * self.gpu.usd_per_hour}


def plan(settings: PlanTrainSettings) -> TrainPlan:
    """Compute all layouts and choose the first that fits; nothing is run.

    Raises:
        InputError: the settings do not fit each other, the model or the GPUs.
    """
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    gpu = PlannedGpu.of(settings, dtype)
    settings = settings.model_copy(update={"gpus_per_worker": 1.0})
    deepspeed_config.check(settings)
    encoder = load(settings)
    work = step_work(settings, encoder, settings.workers, torch.device("cuda"), dtype)
    size, saved = ModelSize.of(encoder, settings), saved_bytes(encoder, dtype)
    ways = [way for checkpointing in (False, True) for way in _allowed(settings, checkpointing)]
    ways.sort(key=lambda way: way.offload is not None)  # offload costs more than recomputation
    layouts = [_layout(way, work, size, saved, gpu) for way in ways]
    return TrainPlan(
        settings.model,
        settings.workers,
        gpu,
        settings.precision,
        settings.mfu,
        size,
        work,
        tuple(layouts),
        chosen=next((n for n, layout in enumerate(layouts) if not layout.obstacles), None),
        as_set=next((n for n, way in enumerate(ways) if _choice(way) == _choice(settings)), None),
    )


def _allowed(settings: PlanTrainSettings, checkpointing: bool) -> Iterator[PlanTrainSettings]:
    """Yield the settings with each layout that DeepSpeed allows."""
    for stage, offload in _LAYOUTS:
        if stage == 3 and settings.lora is not None and settings.lora.quantized:
            continue  # ZeRO-3 cannot partition 4-bit weights
        change = {"zero_stage": stage, "offload": offload, "activation_checkpointing": checkpointing}
        way = settings.model_copy(update=change)
        try:
            deepspeed_config.check(way)
        except InputError:
            continue
        yield way


def _choice(settings: TrainSettings) -> tuple[object, ...]:
    """Return what distinguishes layouts."""
    return settings.zero_stage, settings.activation_checkpointing, settings.offload


def _layout(
    settings: PlanTrainSettings, work: StepWork, size: ModelSize, saved: SavedBytes, gpu: PlannedGpu
) -> TrainLayout:
    memory = _with_framework(tensor_memory(settings, work, size, saved, settings.workers))
    start = start_memory(size, settings.workers, deepspeed_config.deepspeed_config(settings), memory.framework)
    needs = (("at a step's peak", memory.total), ("at the start", start))
    # GradCache repeats every forward pass but the last; checkpointing repeats each. A forward pass is a third.
    repeated = 1 - 1 / work.passes if settings.grad_cache_tokens else 0.0
    repeated += settings.activation_checkpointing
    return TrainLayout(
        zero_stage=settings.zero_stage,
        offload=settings.offload,
        activation_checkpointing=settings.activation_checkpointing,
        memory=memory,
        start=start,
        obstacles=tuple(
            f"a GPU needs {need / GIB:.0f} GiB of {gpu.memory / GIB:.0f} {when}"
            for when, need in needs
            if need > gpu.memory
        ),
        step_seconds=work.flops * (1 + repeated / 3) / (gpu.peak * settings.mfu),
    )


def tensor_memory(
    settings: TrainSettings, work: StepWork, size: ModelSize, saved: SavedBytes, workers: int
) -> StepMemory:
    """Compute the memory of a worker's tensors at the peak of a step.

    The graphs that exist at once are those of a batch, or of GradCache's largest pass; each has its own backward pass.
    """
    layer = work.graph_slots * saved.layer
    held = HeldActivations(work.graph_slots * saved.token, layer)
    if settings.activation_checkpointing:
        held = HeldActivations(work.graph_slots * saved.checkpointed, 2 * layer)
    passes = round(work.passes) if settings.grad_cache_tokens else 1
    return step_memory(size, held, workers, deepspeed_config.deepspeed_config(settings), passes)


def peak_memory(settings: TrainSettings, encoder: InstructionEncoder, records: Sequence[TrainingRecord]) -> StepMemory:
    """Compute the memory of one worker at the peak of a step, with the layout, workers and device of the settings."""
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    on_gpu = settings.gpus_per_worker > 0
    planned = PlanTrainSettings.from_mapping(settings.model_dump())
    work = step_work(planned, encoder, settings.workers, torch.device("cuda" if on_gpu else "cpu"), dtype, records)
    size = ModelSize.of(encoder, settings)
    memory = tensor_memory(settings, work, size, saved_bytes(encoder, dtype), settings.workers)
    return _with_framework(memory) if on_gpu else memory


def _with_framework(memory: StepMemory) -> StepMemory:
    """Add what a GPU holds besides the tensors."""
    return replace(memory, framework=FRAMEWORK_GIB * GIB + FRAGMENTATION * memory.total)


def step_work(
    settings: PlanTrainSettings,
    encoder: InstructionEncoder,
    workers: int,
    device: torch.device,
    dtype: torch.dtype,
    own: Sequence[TrainingRecord] | None = None,
) -> StepWork:
    """Count the first worker's share of some steps.

    Args:
        settings: of the run; its `workers` is ignored.
        encoder: on the meta device.
        workers: that share a batch.
        device, dtype: of the run; they decide whether texts are packed.
        own: the records of the run; None: those that the settings name, if they exist.

    Raises:
        InputError: a batch has fewer records than there are workers.
    """
    own = _existing_records(settings) if own is None else own
    number = settings.epoch_records if own is None else len(own)
    per_step = min(settings.records_per_step, number)  # as the sampler does
    if per_step < workers:
        raise InputError(
            f"records_per_step={settings.records_per_step}: {per_step} records a step leave some of the {workers} GPUs "
            "without any; set more, or fewer nodes"
        )
    records = _synthetic(settings, max(_SYNTHETIC, 2 * per_step)) if own is None else own
    encoder.train()
    budget = settings.grad_cache_tokens or _ONE_PASS
    batches = list(_batches(settings, encoder, records, per_step, workers))
    passes = [
        [
            layout
            for side in (batch.queries, batch.passages)
            for _, layout in encoder.lay_out(side, budget, device, dtype)
        ]
        for batch in batches
    ]
    slots = [[layout.input_ids.numel() for layout in of_batch] for of_batch in passes]
    work = {side: BackboneFlops.count(encoder.backbone_of(side), encoder.causal) for side in get_args(Side)}
    flops = fmean(
        sum(_tokens(p) * work[p.side].token + float(work[p.side].pairs(p)) * work[p.side].pair for p in of_batch)
        for of_batch in passes
    )
    return StepWork(
        queries=fmean(len(batch.queries) for batch in batches),
        own=len(set(batches[0].own)),
        passages=len(batches[0].passages),
        slots=fmean(map(sum, slots)),
        tokens=fmean(sum(map(_tokens, of_batch)) for of_batch in passes),
        graph_slots=max(map(max if settings.grad_cache_tokens else sum, slots)),
        passes=fmean(map(len, slots)),
        flops=flops,
        steps=settings.epochs * -(-number // settings.records_per_step),
        records=per_step,
        whole_epoch=per_step < settings.records_per_step,
    )


def _batches(
    settings: PlanTrainSettings, encoder: InstructionEncoder, records: Sequence[TrainingRecord], size: int, workers: int
) -> Iterator[Batch]:
    """Yield the first worker's share of `_SAMPLES` batches."""
    objective = Objective.from_settings(settings)
    rng = random.Random(settings.seed)
    for n in range(_SAMPLES):
        chosen = [drawn(record, settings.hard_negatives, str(n)) for record in rng.sample(records, size)]
        yield collate(
            encoder,
            [chosen[rank::workers] for rank in range(workers)],
            0,
            objective,
            instruction_negatives=settings.instruction_negatives,
            iq_negatives=settings.iq_negatives,
            seed=str(n),
        )


def _tokens(layout: Layout) -> int:
    """Tokens of a layout; a shared prefix counts once."""
    return layout.input_ids.numel() if layout.attention_mask is None else layout.tokens.numel()


def _existing_records(settings: PlanTrainSettings) -> list[TrainingRecord] | None:
    """The records of the run; None if they do not exist yet."""
    if stands_in(settings.model) or not (settings.records or settings.sources):
        return None  # a model without its tokenizer cannot count the tokens of texts
    paths = [source.path for source in sources.named(settings).values()]
    if any("://" in path or not Path(path).expanduser().exists() for path in paths):
        return None
    return list(sources.read(settings, sources.locate(settings)))


def _synthetic(settings: PlanTrainSettings, number: int) -> list[Record]:
    """Records of random words; lengths are log-normal around the means of `tokens`."""
    rng = random.Random(settings.seed)
    tokens_per_word = 1.0 if stands_in(settings.model) else TOKENS_PER_WORD

    def text(mean: int) -> str:
        length = mean / tokens_per_word * rng.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)
        return " ".join(f"w{rng.randrange(4096)}" for _ in range(max(1, round(length))))

    return [
        Record(id=str(n), **{column: text(settings.tokens[kind]) for column, kind in _LENGTHS.items()})
        for n in range(number)
    ]


_COMPONENTS = dict(
    zip(
        ("params", "grads", "master", "optim", "activ", "comm", "other"),
        (f.name for f in fields(StepMemory)),
        strict=True,
    )
)


def as_text(train_plan: TrainPlan) -> str:
    """Format the plan for people: the workload of a step, a table of all layouts, the choice."""
    work, size = train_plan.work, train_plan.size
    rows = [_columns(train_plan, number) for number in range(len(train_plan.layouts))]
    lines = [
        f"{train_plan.model}: {size.parameters / 1e9:.3f} B parameters"
        + (f", {size.trained / 1e6:.1f} M trained" if size.trained < size.parameters else "")
        + f", {train_plan.precision}; {train_plan.gpus} x {train_plan.gpu.name}",
        f"per step and GPU: {work.own} instruction-query texts + {work.queries - work.own:.0f} for negatives, "
        f"{work.passages} passages; {work.tokens:.0f} tokens ({work.slots:.0f} with padding), "
        f"{work.passes:.0f} passes, at most {work.graph_slots} tokens with graphs",
        f"run: {work.steps} steps of {work.records} records"
        f"{' (all there are)' * work.whole_epoch}, {work.flops * train_plan.gpus / 1e12:.1f} model TFLOP per step",
        "",
        *aligned([list(rows[0]), *(list(row.values()) for row in rows)]),
        "",
        "GiB per GPU at the peak of a step, by component. > first that fits, * as set.",
        f"Times: MFU {train_plan.mfu:g}. Take it from the log of a short run, and set mfu.",
    ]
    if train_plan.chosen is None:
        reasons = min((layout.obstacles for layout in train_plan.layouts), key=len)
        lines.append(
            f"Nothing fits. Nearest: {'; '.join(reasons)}. Lower records_per_step, set grad_cache_tokens, add workers."
        )
    else:
        best = train_plan.layouts[train_plan.chosen]
        totals = train_plan.totals(best)
        lines.append(
            f"First that fits: {best.overrides}: {best.memory.total / GIB:.1f} GiB per GPU, "
            f"{best.step_seconds:.2f} s per step, {totals['hours']:.2f} h, {totals['usd']:.0f} USD"
        )
    return "\n".join(lines)


def _columns(train_plan: TrainPlan, number: int) -> dict[str, str]:
    """Return the cells of a layout's row by their headings."""
    layout = train_plan.layouts[number]
    totals = train_plan.totals(layout)
    return {
        "": ">" * (number == train_plan.chosen) + "*" * (number == train_plan.as_set),
        "zero": str(layout.zero_stage),
        "offload": layout.offload or "-",
        "ckpt": "yes" if layout.activation_checkpointing else "no",
        **{heading: f"{getattr(layout.memory, name) / GIB:.1f}" for heading, name in _COMPONENTS.items()},
        "total": f"{layout.memory.total / GIB:.1f}",
        "s/step": f"{layout.step_seconds:.2f}",
        "hours": f"{totals['hours']:.2f}",
        "USD": f"{totals['usd']:.0f}",
        "fits": "; ".join(layout.obstacles) or "yes",
    }


def as_json(train_plan: TrainPlan) -> str:
    """Format the plan as JSON: bytes, seconds, hours, USD."""
    values = asdict(train_plan)
    for layout, plain in zip(train_plan.layouts, values["layouts"], strict=True):
        plain["memory"]["total"] = layout.memory.total
        plain |= {"overrides": layout.overrides, **train_plan.totals(layout)}
    return json.dumps(values, indent=2)


_STATE_BYTES = 12
"""Bytes per trained parameter in a state: the fp32 weight and Adam's two moments."""
_WEIGHT_BYTES = 4


def describe(settings: TrainSettings) -> Iterator[str]:
    """Yield what a training would do, line by line; InputError as the training."""
    inputs, step = launch.prepare(settings)
    if (yield from state(step)):
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
        memory = peak_memory(inputs.settings, encoder, rows)
    weights = ModelSize.of(encoder, settings)
    yield f"model: {weights.parameters / 1e6:,.1f} M parameters, {weights.trained / 1e6:,.1f} M trained"
    yield f"memory: about {gib(memory.total)} {memory_of(settings)} at the peak of a step"
    yield require_space_of_workers(step, _disk(settings, weights))


def needs(settings: TrainSettings) -> tuple[int, float, float]:
    """Check a training; return its steps, the memory of a step's peak and its disk, in bytes; InputError as the training."""
    inputs = launch.resolve(settings)
    encoder = launch.check_model(inputs.settings)
    with tempfile.TemporaryDirectory() as directory:
        rows, sampler = launch.lay_out(settings, inputs, Path(directory))
        memory = peak_memory(inputs.settings, encoder, rows).total
    return sampler.steps, memory, _disk(settings, ModelSize.of(encoder, settings))


def memory_of(settings: TrainSettings) -> str:
    """Name the memory that a training needs."""
    return "of each GPU" if settings.gpus_per_worker else "of CPU memory for the tensors of each worker"


def _disk(settings: TrainSettings, weights: ModelSize) -> float:
    """Return the bytes that a training writes at most."""
    states = KEEP_LAST + (settings.validation is not None) + 1
    return _WEIGHT_BYTES * weights.parameters + states * _STATE_BYTES * weights.trained
