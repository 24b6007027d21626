"""Run a function in several processes that are the workers of one process group."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from tests.support.ports import free_port

PROCESSES = multiprocessing.get_context("forkserver")
"""New processes are forks of one that has imported what takes seconds. They have its environment, not that of the test."""
PROCESSES.set_forkserver_preload(
    [
        "infembed_ray.training.loop",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "modernbert", "qwen2")),
    ]
)


def run_workers(function: Callable[..., Any], workers: int, *arguments: Any) -> list[Any]:
    """Call `function(rank, *arguments)` in each of some new processes and return the results in rank order.

    `function` must be importable. It connects the processes itself, by torch.distributed's environment variables.
    """
    with PROCESSES.Manager() as manager:
        results = manager.dict()
        given = (dict(os.environ), function, workers, free_port(), arguments, results)
        torch.multiprocessing.start_processes(_worker, given, workers, start_method="forkserver")
        return [results[rank] for rank in range(workers)]


def _worker(
    rank: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    workers: int,
    port: int,
    arguments: tuple[Any, ...],
    results: Any,
) -> None:
    os.environ |= environment
    if workers > 1:  # a single process needs no variables
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    results[rank] = function(rank, *arguments)


def share_process_group() -> Callable[[], None]:
    """Let several trainings of this process use one process group; return the function that destroys it."""
    import deepspeed

    destroy = deepspeed.comm.destroy_process_group
    deepspeed.comm.destroy_process_group = lambda: None
    return destroy
