"""Run a function in several processes that are the workers of one process group."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.support.ports import free_port


def run_workers(function: Callable[..., Any], workers: int, *arguments: Any) -> list[Any]:
    """Call `function(rank, *arguments)` in each of some new processes and return the results in rank order.

    `function` must be importable. It connects the processes itself, by torch.distributed's environment variables.
    """
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_worker, args=(function, workers, free_port(), arguments, results), nprocs=workers)
        return [results[rank] for rank in range(workers)]


def _worker(
    rank: int, function: Callable[..., Any], workers: int, port: int, arguments: tuple[Any, ...], results: Any
) -> None:
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
