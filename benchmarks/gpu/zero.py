"""Training steps of the product's engine: DeepSpeed ZeRO with one process, its memory against the plan, its checkpoints."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import measure, steps
from benchmarks.gpu.suite import Context, Result
from infembed_ray.config.training import TrainSettings
from infembed_ray.planning.memory import ModelSize, saved_bytes, step_memory
from infembed_ray.training.deepspeed_config import deepspeed_config
from infembed_ray.training.engine import Engine
from infembed_ray.training.zero_init import load_for_training

SIZE = "0.5B"
RATE = 1e-4
TOLERANCE = 0.15
"""Error of the planner's memory that `infembed plan train` promises."""
REPEATED_LOSS = {True: 5e-3, False: 0.0}
"""Difference of the loss in a repeated step, on CUDA or not: backward passes of attention sum there in no fixed order."""
GRAD_CACHE_LOSS = {True: 2e-2, False: 1e-4}
"""Difference of the loss with GradCache, whose passes are others; bf16 or not."""


def zero(context: Context) -> Iterator[Result]:
    """Take steps under a ZeRO stage and offload, restore a checkpoint, and repeat the first step with GradCache."""
    stage, _, offloaded = str(context.argument).partition(",")
    cuda = context.device == "cuda"
    settings = settings_of(context, zero_stage=int(stage), offload=offloaded or None)
    vocabulary = measure.config_of(SIZE, context).vocab_size
    sides = steps.texts(steps.TUPLES, vocabulary)
    engine = _engine(settings, context)
    slots = sum(
        layout.input_ids.numel() for _, layout in engine.encoder.layouts([*sides[0], *sides[1]], steps.ONE_PASS)
    )
    losses = [_step(engine, sides)]
    with measure.Peak(context) as peak:
        losses.append(_step(engine, sides))
    taken = measure.seconds(lambda: losses.append(_step(engine, sides)), context, rounds=3, warm_up=0)
    figures: dict[str, float | str] = {"step, ms": 1e3 * taken, "slots": slots}
    checks = {"last loss - first": (losses[-1] - losses[0], 0.0)}
    if cuda:
        planned = _planned(settings, slots, context) / measure.GIB
        figures |= {"peak, GiB": peak.most, "planned, GiB": planned}
        checks["planned off by"] = (abs(planned / peak.most - 1), TOLERANCE)
    yield Result(f"{SIZE}, {steps.TUPLES} tuples", figures, checks)
    yield _restored(engine, sides)
    engine.close()
    if not offloaded:
        cached = _engine(settings.model_copy(update={"grad_cache_tokens": max(64, slots // 4)}), context)
        loss = _step(cached, sides)
        cached.close()
        bound = GRAD_CACHE_LOSS[cuda]
        yield Result("GradCache, first step", {"loss": loss}, {"loss": (abs(loss / losses[0] - 1), bound)})


def _restored(engine: Engine, sides: Any) -> Result:
    """Save, take two steps, load, and compare the loss with that before."""
    with tempfile.TemporaryDirectory() as directory:
        written = engine.save(Path(directory), "state")
        expected = [_step(engine, sides) for _ in range(2)]  # while the state is written
        written.result()
        engine.load(Path(directory), "state")
        found = [_step(engine, sides) for _ in range(2)]
    off = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    bound = REPEATED_LOSS[engine.encoder.device.type == "cuda"]
    return Result("two steps after a restored checkpoint", {"loss": found[-1]}, {"loss": (off, bound)})


def settings_of(context: Context, **changes: Any) -> TrainSettings:
    """Return the settings of a training with one worker on the device."""
    cuda = context.device == "cuda"
    paths = dict.fromkeys(("records", "model", "output"), "-")
    given = {"workers": 1, "gpus_per_worker": float(cuda), "precision": "bf16" if cuda else "fp32"}
    return TrainSettings.from_mapping(paths | given | changes)


def engine_of(settings: TrainSettings, context: Context) -> Engine:
    """Load a model as training does (ZeRO-3 into its partitions)."""
    engine = Engine(load_for_training(settings, torch.device(context.device)), settings)
    engine.train()
    return engine


def _engine(settings: TrainSettings, context: Context) -> Engine:
    with tempfile.TemporaryDirectory() as directory:
        save(SIZE, context, directory)
        return engine_of(settings.model_copy(update={"model": directory}), context)


def save(size: str, context: Context, directory: str) -> None:
    """Write a random model with a tokenizer of `measure.WORDS`."""
    measure.backbone_of(size, context).save_pretrained(directory)
    measure.tokenizer().save_pretrained(directory)
    measure.free()


def _step(engine: Engine, sides: Any) -> float:
    loss = steps.loss_of(*engine.encode([*sides[0], *sides[1]]).split([len(side) for side in sides]))
    engine.backward(loss)
    norm = engine.update(RATE)
    assert math.isfinite(norm)
    return float(loss.detach())


def _planned(settings: TrainSettings, slots: int, context: Context) -> float:
    """Return the planner's bytes of the tensors on the GPU at the peak of a step."""
    encoder = steps.encoder_of(measure.backbone_of(SIZE, Context("meta", context.tiny), torch.float32))
    weights = ModelSize.of(encoder, settings)
    compiled = settings.zero_stage < 3 and encoder.compiles_on(torch.device(context.device))
    held = saved_bytes(encoder, torch.bfloat16, compiled).held(slots, checkpointing=False)
    return step_memory(weights, held, 1, deepspeed_config(settings)).total
