"""Training on a Ray cluster: Ray Train places the workers, connects them and restarts them after failures."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from infembed_ray import ray_compat, telemetry
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import ClusterError, InputError, explained, in_one_line
from infembed_ray.progress import say
from infembed_ray.ray_cluster import connect, on_a_cluster
from infembed_ray.ray_failures import cause_of, meaning
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.storage.object_store import Folder, is_uri
from infembed_ray.storage.places import clear, place_of
from infembed_ray.storage.steps import STATES
from infembed_ray.training.node_files import RAY_TRAIN_LOGS, node_directory

PLACEMENT_TIMEOUT_S = 600.0
"""Seconds to wait for resources of the cluster, all restarts together, unless `_START_TIMEOUT` is set."""
_START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
"""Ray Train's environment variable: seconds of one wait."""


def fit(settings: TrainSettings, rows: Sequence[TrainingRecord], directory: Path) -> None:
    """Train on a Ray cluster to the end.

    Args:
        settings: Settings of the run.
        rows: All records, which every node can read.
        directory: Output that all workers share; unused if `settings.output` is in an object store.

    Raises:
        InputError: the cluster lacks resources for the workers, or a worker rejected its input.
        ClusterError, RuntimeError: the run failed more than `max_failures` times; the message holds the last failure, which
            is a ClusterError if it is one of Ray.
    """
    grows = on_a_cluster()
    connect()
    if short := _shortage(settings):
        if not grows:
            raise InputError(short)
        say(f"train: waiting for resources: {short}")
    # Ray Train counts each wait for resources as a failure, so all waits together take the time-out.
    os.environ.setdefault(_START_TIMEOUT, str(PLACEMENT_TIMEOUT_S / (1 + settings.max_failures)))
    remote = place_of(settings.output) if is_uri(settings.output) else None
    logs = remote / RAY_TRAIN_LOGS if isinstance(remote, Folder) else directory / STATES / RAY_TRAIN_LOGS
    system, path = logs.file_system() if isinstance(logs, Folder) else (None, str(logs))
    trainer = TorchTrainer(
        _worker,
        train_loop_config={
            "settings": settings.model_dump(),
            "records": ray.put(rows),
            "directory": str(directory),
            "run": telemetry.current(),
        },
        torch_config=TorchConfig(backend="nccl" if settings.gpus_per_worker else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=settings.workers,
            use_gpu=settings.gpus_per_worker > 0,
            resources_per_worker=_per_worker(settings),
        ),
        run_config=RunConfig(
            name=f"{time.time_ns()}",  # a new name for each attempt, because runs resume from our own checkpoints
            storage_path=path,
            storage_filesystem=system,
            failure_config=FailureConfig(
                max_failures=settings.max_failures, controller_failure_limit=settings.max_failures
            ),
        ),
    )
    interrupt_handler = signal.getsignal(signal.SIGINT)
    try:
        refused = trainer.fit().return_value
    except TrainingFailedError as error:
        raise _explained(error, settings) from error
    finally:  # `fit` sets a handler of its own and leaves it, and that one ignores the next Ctrl-C
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt_handler)
    if refused is not None:
        raise InputError(refused)
    clear(logs)


def _per_worker(settings: TrainSettings) -> dict[str, float]:
    return {"CPU": settings.cpus_per_worker} | ({"GPU": settings.gpus_per_worker} if settings.gpus_per_worker else {})


def _shortage(settings: TrainSettings) -> str | None:
    """Return what the workers need and the cluster has, if it has less; otherwise None."""
    needed = {name: amount * settings.workers for name, amount in _per_worker(settings).items()}
    has = {name: ray.cluster_resources().get(name, 0.0) for name in needed}
    if all(has[name] >= amount for name, amount in needed.items()):
        return None
    fault = f"they need {_listed(needed)}, but the cluster has {_listed(has)}"
    return f"workers={settings.workers}: {fault}; set fewer workers, or less for each"


def _listed(resources: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _explained(error: TrainingFailedError, settings: TrainSettings) -> Exception:
    """Return an error of one line for a run that Ray Train gave up."""
    if isinstance(error, ControllerError) and isinstance(error.controller_failure, ray_compat.placement_errors()):
        needed, free = _per_worker(settings), ray.available_resources()
        fault = f"no resources for {_listed(needed)} each; free now: {_listed({n: free.get(n, 0.0) for n in needed})}"
        return InputError.of("workers", settings.workers, fault, f"set fewer, or a longer {_START_TIMEOUT} (s)")
    failures = error.worker_failures if isinstance(error, WorkerGroupError) else {}
    if not failures:
        return explained(error, "train")
    causes = {rank: cause_of(failure) for rank, failure in failures.items()}
    rank, cause = min(causes.items(), key=lambda item: _remoteness(item[1]))
    if isinstance(cause, InputError):
        return cause
    kind = RuntimeError if meaning(cause) is None else ClusterError
    failed = f"worker {rank} of {settings.workers} failed, after max_failures={settings.max_failures} earlier failures"
    remedy = "run the same command again to resume from the last checkpoint"
    return kind(f"{failed}: {in_one_line(cause, 'train')}; {remedy}")


def _remoteness(failure: BaseException) -> int:
    """Rank a failure by its distance from the cause: a worker that lost the others in a collective failed after them."""
    if isinstance(failure, InputError):
        return 0
    lost = isinstance(failure, dist.DistError) or (isinstance(failure, RuntimeError) and "gloo" in str(failure).lower())
    return 2 if lost else 1


def _worker(config: dict[str, Any]) -> str | None:
    """Train as a Ray Train worker; return the InputError that ended the run, or None after its last step."""
    from infembed_ray.training.loop import train_worker  # late: DeepSpeed probes for accelerators and logs on import

    settings = TrainSettings.from_mapping(config["settings"])
    telemetry.join(config["run"])
    if settings.gpus_per_worker == 0:
        torch.set_num_threads(max(1, int(settings.cpus_per_worker)))
    try:
        directory = node_directory(settings, Path(config["directory"]))
        train_worker(settings, ray.get(config["records"]), directory, get_device(), ray_compat.preemption_announced)
    except InputError as error:
        if dist.is_initialized():
            raise  # the other workers may wait for this one
        return str(error)  # all workers ended alike and would do so again, so Ray Train must not retry
    return None
