"""Gathering across workers. Without a process group, or with one worker, everything is already here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def world() -> tuple[int, int]:
    """(rank, world size) of this worker."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class _Gather(torch.autograd.Function):
    """Concatenate rows of all workers; the backward pass sums what every worker's loss says of this one's rows."""

    @staticmethod
    def forward(context: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        context.sizes = sizes
        return _all_rows(rows, sizes)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.split(context.sizes)[dist.get_rank()], None


def gather_rows(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """(B, ...) of every worker -> (sum of `sizes`, ...), in rank order.

    Differentiable. Where each worker minimises the mean loss of its own rows times `Batch.share`, and parameter
    gradients are averaged over workers, as DeepSpeed does, the sum in the backward pass makes that average the
    gradient of the mean over all rows.

    Args:
        rows: of this worker; as many as `sizes` says of its rank.
        sizes: B of every worker, in rank order.
    """
    if world()[1] == 1:
        return rows
    if rows.requires_grad:
        return _Gather.apply(rows, list(sizes))
    return _all_rows(rows, sizes)


def _all_rows(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = max(sizes) - len(rows)  # all_gather wants equal shapes
    filled = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    parts = [torch.empty_like(filled) for _ in sizes]
    dist.all_gather(parts, filled)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def from_first(value: T) -> T:
    """Worker 0's value, on every worker."""
    values = [value]
    if world()[1] > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def from_all(value: T) -> list[T]:
    """Every worker's value, in rank order, on every worker."""
    values = [value] * world()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def mean_over_workers(values: Tensor) -> Tensor:
    """Element-wise mean over workers, without gradient; of means times `Batch.share`, the mean over all rows."""
    values = values.detach().clone()
    if world()[1] > 1:
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


def most_of_workers(count: int, device: torch.device) -> int:
    """The highest count of any worker."""
    most = torch.tensor(count, device=device)
    if world()[1] > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
