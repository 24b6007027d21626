"""`infembed train`: the loop of every worker under Ray Train."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from infembed_ray import records as tables
from infembed_ray.config import TEMPERATURES, TrainSettings
from infembed_ray.distributed import connect
from infembed_ray.errors import InputError
from infembed_ray.modeling import model_card
from infembed_ray.modeling.checkpoint import describe, locate
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import say, track
from infembed_ray.storage import Published, Step, existing, fingerprint
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.metrics import read_metrics
from infembed_ray.training.objectives import MOST_JOINT_TEXTS, Objective
from infembed_ray.training.sampler import Sampler

POLL_S = 0.5
RAY_TRAIN_LOGS = "ray_train"
FAILURES = 3
"""Times a run restarts from its last state after losing workers, before it gives up."""


def run(settings: TrainSettings) -> Published:
    """Train a checkpoint; nothing to do if the same records, model and settings were trained before.

    Raises:
        InputError: before any work, for anything wrong with the settings, the records or the model.
    """
    Objective.of(settings)  # fits the other settings
    low, high = TEMPERATURES
    if settings.temperature_learned and not low < settings.temperature < high:
        raise InputError(
            f"temperature={settings.temperature}: learned temperatures lie between {low} and {high}; start within, "
            "or set temperature_learned=false"
        )
    if settings.precision == "bf16" and settings.zero_stage == 0:
        raise InputError("precision=bf16: zero_stage=0 would add up and export in bf16; set zero_stage=1 or higher")
    quantized = settings.lora is not None and settings.lora.quantized
    if quantized and (not settings.gpus_per_worker or settings.zero_stage == 3):
        raise InputError(
            "lora.quantized=true: needs gpus_per_worker=1 and zero_stage 0 to 2; or set lora.quantized=false"
        )
    path = existing(settings.records, "records")
    rows = tables.read(path, tables.Record, "records", split=settings.split)
    if len(rows) < settings.workers:
        raise InputError(
            f"workers={settings.workers}: more than the {len(rows)} records of {path}; set workers={len(rows)}"
        )
    model = locate(settings.model, "model")
    found = {"model": model.path}
    inputs, names = {"records": path} | model.inputs, dict(model.names)
    if settings.teacher is not None:
        teacher = locate(settings.teacher, "teacher")
        found["teacher"] = teacher.path
        inputs |= teacher.inputs
        names |= teacher.names
    step = Step("train", settings, settings.output, inputs, names)
    if done := step.finished():
        return done
    _check_model(settings.model_copy(update=found))
    connect()
    with step.publish() as staging:
        sampler = Sampler.of(settings, len(rows))
        say(f"train: {settings.objective}, {len(rows)} records, {sampler.steps} steps on {settings.workers} workers")
        with _progress(staging.path, sampler.steps):
            # The paths that were found here, not as they were written: workers have other working directories.
            _fit(settings.model_copy(update=found), rows, staging.path)
        staging.counts |= {"records": len(rows), "steps": sampler.steps}
        staging.facts["final_metrics"] = last = read_metrics(staging.path)[-1]
        model_card.write(
            staging.path,
            describe(str(staging.path)),
            model.path,
            model_card.TrainingData(path, fingerprint(path), [row.source for row in rows]),
            settings.identity(),
            last,
        )
    return step.published()


def _check_model(settings: TrainSettings) -> None:
    """Do the settings fit the model? Looked at here, without weights: on a worker it would cost a start each."""
    objective = Objective.of(settings)
    encoder = load_encoder(settings, "meta")
    if settings.teacher is not None:
        InstructionEncoder.from_pretrained(settings.teacher, device="meta")
    for dimensions in settings.matryoshka:
        if dimensions >= encoder.dimension:
            raise InputError(
                f"matryoshka={dimensions}: embeddings of {settings.model} have {encoder.dimension}; give fewer"
            )
    if encoder.interaction is not None and settings.template is not None:
        raise InputError(f"template={settings.template}: cross_attention has no joint text; leave it out")
    joint = 6 * settings.records_per_worker**2
    shared = encoder.causal or encoder.interaction is not None
    if (
        settings.instruction_negatives is None
        and "I" in objective.variables
        and not shared
        and joint > MOST_JOINT_TEXTS
    ):
        raise InputError(
            f"instruction_negatives=null: up to {joint} joint texts a worker and step, of which this backbone shares "
            f"nothing, at most {MOST_JOINT_TEXTS} are affordable; set a number"
        )


def _fit(settings: TrainSettings, rows: list[tables.Record], directory: Path) -> None:
    resources = {"CPU": settings.cpus_per_worker}
    if settings.gpus_per_worker:
        resources["GPU"] = settings.gpus_per_worker
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"settings": settings.model_dump(), "records": ray.put(rows), "directory": str(directory)},
        torch_config=TorchConfig(backend="nccl" if settings.gpus_per_worker else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=settings.workers, use_gpu=settings.gpus_per_worker > 0, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=f"{time.time_ns()}",  # never an earlier attempt's: resuming is ours, from our own states
            storage_path=str(directory / RAY_TRAIN_LOGS),
            failure_config=FailureConfig(max_failures=FAILURES),
        ),
    )
    trainer.fit()
    shutil.rmtree(directory / RAY_TRAIN_LOGS, ignore_errors=True)


def _worker(config: dict[str, Any]) -> None:
    """What Ray Train runs on every worker."""
    # Imported here, on the workers: DeepSpeed looks for accelerators and talks about them when it is imported.
    from infembed_ray.training.loop import train_worker

    settings = TrainSettings.of(config["settings"])
    if settings.gpus_per_worker == 0:
        torch.set_num_threads(max(1, int(settings.cpus_per_worker)))
    train_worker(settings, ray.get(config["records"]), Path(config["directory"]), get_device())


@contextmanager
def _progress(directory: Path, steps: int) -> Iterator[None]:
    """Show progress while the block runs, from the metrics that worker 0 writes."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(directory, steps, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(directory: Path, steps: int, stop: threading.Event) -> None:
    with track("train", steps) as advance:
        shown = 0
        stopping = False
        while not stopping:
            stopping = stop.wait(POLL_S)  # one last look after the end
            lines = read_metrics(directory)
            if len(lines) > shown:
                newest = lines[-1]
                advance(len(lines) - shown, note=f"loss {newest['loss']:.3f}  |g| {newest['grad_norm']:.2f}")
                shown = len(lines)
