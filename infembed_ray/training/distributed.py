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
from infembed_ray.config import TrainSettings
from infembed_ray.distributed import connect
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import model_identity
from infembed_ray.progress import say, track
from infembed_ray.storage import Published, Step, existing
from infembed_ray.training.metrics import read_metrics
from infembed_ray.training.objectives import Objective
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
    objective = Objective.parse(settings.objective)
    if "I" in objective.variables and settings.instruction_negatives == 0:
        raise InputError(
            f"instruction_negatives=0: {objective} contrasts instructions; set at least 1, or drop I from it"
        )
    path = existing(settings.records, "records")
    rows = tables.read(path, tables.Record, "records", split=settings.split)
    if len(rows) < settings.workers:
        raise InputError(
            f"workers={settings.workers}: more than the {len(rows)} records of {path}; set workers={len(rows)}"
        )
    inputs = {"records": path}
    model, names = model_identity(settings.model, "model")
    step = Step("train", settings, settings.output, inputs | model, names)
    if done := step.finished():
        return done
    connect()
    with step.publish() as staging:
        sampler = Sampler.of(settings, len(rows))
        say(f"train: {settings.objective}, {len(rows)} records, {sampler.steps} steps on {settings.workers} workers")
        with _progress(staging.path, sampler.steps):
            # The path that was found here, not as it was written: workers have other working directories.
            found = settings.model_copy(update={"model": str(model.get("model", settings.model))})
            _fit(found, rows, staging.path)
        staging.counts |= {"records": len(rows), "steps": sampler.steps}
        staging.facts["final_metrics"] = read_metrics(staging.path)[-1]
    return step.published()


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
