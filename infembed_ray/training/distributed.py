"""Training on a Ray cluster: Ray Train places the workers, connects them and restarts them after failures."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.train.v2._internal.exceptions import InsufficientClusterResourcesError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.context import get_train_context

from infembed_ray.config import TrainSettings
from infembed_ray.distributed import connect, on_a_cluster
from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.records import Record
from infembed_ray.storage import STATES

RAY_TRAIN_LOGS = "ray_train"


def fit(settings: TrainSettings, rows: Sequence[Record], directory: Path) -> None:
    """Let all workers train to the end.

    Args:
        settings: of the run.
        rows: its records.
        directory: shared by all workers.

    Raises:
        InputError: the cluster has no room for the workers, or a worker cannot work with its input.
        RuntimeError: the run failed once more than `max_failures` allows; it says how the last time.
    """
    grows = on_a_cluster()
    connect()
    if short := _shortage(settings):
        if not grows:
            raise InputError(short)
        say(f"train: waiting {settings.placement_timeout_s:g} s for room: {short}")
    # Ray Train counts a wait for room as a failure of its own kind, so all of them together may take the time-out.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(
        settings.placement_timeout_s / (1 + settings.max_failures)
    )
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"settings": settings.model_dump(), "records": ray.put(rows), "directory": str(directory)},
        torch_config=TorchConfig(
            backend="nccl" if settings.gpus_per_worker else "gloo", timeout_s=settings.collective_timeout_s
        ),
        scaling_config=ScalingConfig(
            num_workers=settings.workers,
            use_gpu=settings.gpus_per_worker > 0,
            resources_per_worker=_per_worker(settings),
            placement_strategy=settings.placement,
        ),
        run_config=RunConfig(
            name=f"{time.time_ns()}",  # never an earlier attempt's: resuming is ours, from our own states
            storage_path=str(directory / STATES / RAY_TRAIN_LOGS),
            failure_config=FailureConfig(
                max_failures=settings.max_failures, controller_failure_limit=settings.max_failures
            ),
        ),
    )
    try:
        refused = trainer.fit().return_value
    except TrainingFailedError as error:
        raise _explained(error, settings) from error
    if refused is not None:
        raise InputError(refused)
    shutil.rmtree(directory / STATES / RAY_TRAIN_LOGS, ignore_errors=True)


def _per_worker(settings: TrainSettings) -> dict[str, float]:
    return {"CPU": settings.cpus_per_worker} | ({"GPU": settings.gpus_per_worker} if settings.gpus_per_worker else {})


def _shortage(settings: TrainSettings) -> str | None:
    """What the workers ask for and what the cluster has, if it has less."""
    asked = {name: amount * settings.workers for name, amount in _per_worker(settings).items()}
    has = {name: ray.cluster_resources().get(name, 0.0) for name in asked}
    if all(has[name] >= amount for name, amount in asked.items()):
        return None
    return f"workers={settings.workers}: they ask for {_listed(asked)}, the cluster has {_listed(has)}; set fewer workers, or less for each"


def _listed(resources: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _explained(error: TrainingFailedError, settings: TrainSettings) -> Exception:
    """What became of a run that Ray Train has given up, in one line."""
    if isinstance(error, ControllerError):
        no_room = (WorkerGroupStartupTimeoutError, InsufficientClusterResourcesError)
        if not isinstance(error.controller_failure, no_room):
            return error
        asked, free = _per_worker(settings), ray.available_resources()
        return InputError(
            f"placement_timeout_s={settings.placement_timeout_s:g}: no room for workers={settings.workers} of "
            f"{_listed(asked)} each (placement={settings.placement}); free now: "
            f"{_listed({name: free.get(name, 0.0) for name in asked})}; set fewer workers, or wait longer"
        )
    failures = error.worker_failures if isinstance(error, WorkerGroupError) else {}
    if not failures:
        return error
    # without the traceback that Ray Train made its message of
    causes = {rank: getattr(failure, "_base_exc", failure) for rank, failure in failures.items()}
    rank, cause = min(causes.items(), key=lambda item: _remoteness(item[1]))
    if isinstance(cause, InputError):
        return cause
    what = " ".join(str(cause).split())
    return RuntimeError(
        f"worker {rank} of {settings.workers} failed, max_failures={settings.max_failures} before it: "
        f"{type(cause).__name__}: {what}; the same command resumes from the last state"
    )


def _remoteness(failure: Exception) -> int:
    """How far a worker's failure is from what went wrong: one that lost the others in a collective only followed them."""
    if isinstance(failure, InputError):
        return 0
    lost = isinstance(failure, dist.DistError) or (isinstance(failure, RuntimeError) and "gloo" in str(failure).lower())
    return 2 if lost else 1


def _worker(config: dict[str, Any]) -> str | None:
    """What Ray Train runs on every worker; returns why the run was ended, if not by its last step."""
    # Imported here, on the workers: DeepSpeed looks for accelerators and talks about them when it is imported.
    from infembed_ray.training.loop import train_worker

    settings = TrainSettings.of(config["settings"])
    if settings.gpus_per_worker == 0:
        torch.set_num_threads(max(1, int(settings.cpus_per_worker)))
    try:
        train_worker(settings, ray.get(config["records"]), Path(config["directory"]), get_device(), _preempted)
    except InputError as error:
        if dist.is_initialized():
            raise  # others may be waiting for this worker
        return str(error)  # all have ended alike, as they would again: nothing to be tried once more
    return None


def _preempted() -> bool:
    """Has Ray told this worker that a machine of the run is about to go?

    Not by `ray.train.get_preemption_info`, which is a collective, hence a cost in every step.
    """
    return get_train_context().preemption_context.preemption_info is not None
