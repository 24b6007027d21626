"""Overlap: while a device computes, threads prepare what it computes next, and its results are copied."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

AHEAD = 2
"""Items prepared before they are needed, and passes that a GPU may still compute when the next one is launched."""
OVERLAPPING = {"cuda"}
"""Types of devices that compute while the host prepares."""
SLICE = 1024
"""Texts that are tokenized and laid out together while a device computes the texts before them."""
COMPILE_AFTER_S = 20.0
"""Seconds of encoding more than `SLICE` texts, so none of requests, after which an encoder compiles its layers."""
CPU_BATCH_TOKENS = 4096
"""Default tokens of a pass on a CPU, where larger passes are no faster."""

T = TypeVar("T")


def ahead(items: Iterable[T]) -> Generator[T, None, None]:
    """Yield items that a thread takes from an iterable, up to `AHEAD` of them before they are asked for."""
    source, end = iter(items), object()
    with ThreadPoolExecutor(1, thread_name_prefix="prepare") as thread:
        pending = deque(thread.submit(next, source, end) for _ in range(AHEAD))
        try:
            while True:
                pending.append(thread.submit(next, source, end))
                if (item := pending.popleft().result()) is end:
                    return
                yield item  # type: ignore[misc]
        finally:
            for future in pending:
                future.cancel()


def fetched(results: Iterable[tuple[list[int], Tensor]]) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield results in host memory; a result on CUDA comes after the launches of `AHEAD` later passes."""
    copies: deque[tuple[list[int], Tensor, torch.cuda.Event]] = deque()
    for rows, vectors in results:
        if not vectors.is_cuda:
            yield rows, vectors.numpy()
            continue
        copy = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True).copy_(vectors, non_blocking=True)
        copies.append((rows, copy, torch.cuda.current_stream(vectors.device).record_event()))
        if len(copies) > AHEAD:
            yield _arrived(*copies.popleft())
    yield from starmap(_arrived, copies)


def _arrived(rows: list[int], copy: Tensor, event: torch.cuda.Event) -> tuple[list[int], np.ndarray]:
    event.synchronize()
    return rows, copy.numpy()


def default_batch_tokens(width: int, element_bytes: int, free_bytes: int | None) -> int:
    """Return the default tokens of a pass, by the free memory of a CUDA device; None stands for a CPU.

    Launching the kernels of a pass takes a fixed time per layer. 2^25 / width tokens (37,000 at 0.5B, 9,000 at 7B) take
    several times longer to compute. Activations, 24 numbers per token and unit of width, get a quarter of the memory.
    """
    if free_bytes is None:
        return CPU_BATCH_TOKENS
    return max(1024, min(2**25 // width, free_bytes // 4 // (24 * width * element_bytes)))


def batch_tokens_of(model: Any) -> int:
    """Return the default tokens of a pass of a Hugging Face model where it is now."""
    device, free = model.device, None
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + kept
    return default_batch_tokens(model.config.hidden_size, model.dtype.itemsize, free)
