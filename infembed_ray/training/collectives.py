"""Gathering across workers. Without a process group, or with one worker, everything is already here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """(rank, world size) of this worker."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class _Gather(torch.autograd.Function):
    """Concatenate rows of all workers; the backward pass sums what every worker's loss says of this one's rows."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        return _all_rows(rows)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def gather_rows(rows: Tensor) -> Tensor:
    """(B, ...) of every worker -> (world size x B, ...), in rank order; B must be equal on all workers.

    Differentiable: each worker minimises the mean loss of its own rows, DeepSpeed averages the parameter gradients
    over workers, and the sum in the backward pass makes that the gradient of the mean over all rows.
    """
    if world()[1] == 1:
        return rows
    return _Gather.apply(rows) if rows.is_floating_point() else _all_rows(rows)


def _all_rows(rows: Tensor) -> Tensor:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def mean_over_workers(values: Tensor) -> Tensor:
    """Element-wise mean over workers, without gradient."""
    values = values.detach().clone()
    if world()[1] > 1:
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values
