"""Collectives across workers. Without a process group, or with one worker, they return their input."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def world() -> tuple[int, int]:
    """Return (rank, world size) of this worker."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class _Gather(torch.autograd.Function):
    """Differentiable all-gather: the backward pass sums the gradients of all workers with respect to this worker's rows."""

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
    """Concatenate the rows of all workers in rank order: (B, ...) per worker -> (sum of `sizes`, ...).

    Differentiable. If each worker minimizes the mean loss of its own rows times `Batch.share`, and parameter gradients
    are averaged over workers, as DeepSpeed does, that average is the gradient of the mean over all rows.
    """
    if world()[1] == 1:
        return rows
    if rows.requires_grad:
        return _Gather.apply(rows, list(sizes))
    return _all_rows(rows, sizes)


def _all_rows(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = max(sizes) - len(rows)  # all_gather needs equal shapes
    filled = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    parts = [torch.empty_like(filled) for _ in sizes]
    dist.all_gather(parts, filled)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def from_first(value: T) -> T:
    """Return worker 0's value on every worker."""
    values = [value]
    if world()[1] > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def from_all(value: T) -> list[T]:
    """Return the values of all workers, in rank order, on every worker."""
    values = [value] * world()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def mean_over_workers(values: Tensor) -> Tensor:
    """Return the element-wise mean over workers, without gradient.

    For means over a worker's rows times `Batch.share`, this is the mean over all rows.
    """
    values = values.detach().clone()
    if world()[1] > 1:
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


def max_over_workers(count: int, device: torch.device) -> int:
    """Return the highest count of any worker."""
    most = torch.tensor(count, device=device)
    if world()[1] > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
