"""CUDA graphs of small batches: a GPU replays recorded kernels, instead of waiting for the launch of each.

A graph has fixed shapes: up to `TEXTS` texts are packed in a row that padding, a text before them, extends to one of `TOKENS`.
Graphs are captured at warm-up only, so no request waits for a capture. A batch that fits one goes through it with its whole
instructions, because the tokens that the prefix cache saves cost less than the launches. Other batches go to the cache.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infembed_ray.modeling.attention.packing import PackedLayout, first_position, packed
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.progress import say

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of the graphs; larger batches take longer than their launches."""
TEXTS = 32

Forward = Callable[[], Tensor]


def capture(forward: Forward, device: torch.device, pool: Any) -> Forward:
    """Record a function of tensors at fixed places as a CUDA graph; on a CPU, return the function itself.

    Graphs of one `pool` share the memory of their activations, so only one may run at a time.
    """
    if device.type != "cuda":
        return forward
    with torch.cuda.device(device):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries allocate their work space in the first calls
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = forward()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


class GraphedEncoder:
    """Embeds batches by graphs, which it captures first, and others by `eager`. Thread-safe if `eager` is.

    The largest graph is captured first, because the others fit its memory. After a failure the rest stays with `eager`.

    Args:
        encoder: a packing encoder with one backbone and without `interaction`. Its weights must not change any more.
        eager: `embed` of the encoder or of its prefix cache.
        record, sizes: see `capture` and `TOKENS`.
    """

    def __init__(
        self,
        encoder: InstructionEncoder,
        eager: Callable[..., np.ndarray],
        record: Callable[..., Forward] = capture,
        sizes: Sequence[int] = TOKENS,
    ) -> None:
        self._eager = eager
        self._graphs: dict[int, _Graph] = {}
        self._lock = Lock()
        pool = torch.cuda.graph_pool_handle() if encoder.device.type == "cuda" else None
        try:
            for tokens in sorted(sizes, reverse=True):
                graph = _Graph(encoder.eval(), tokens)
                with torch.inference_mode():
                    graph.replay = record(graph.replay, encoder.device, pool)
                self._graphs[tokens] = graph
        except RuntimeError as error:
            say(f"serve: {len(self._graphs)} CUDA graphs were captured; other batches launch every kernel: {error}")

    def embed(self, sequences: Sequence[Tokens], batch_tokens: int | None = None) -> np.ndarray:
        """Embed texts like `InstructionEncoder.embed`."""
        tokens = sum(map(len, sequences))
        size = next((size for size in TOKENS if size >= tokens), 0)
        graph = self._graphs.get(size) if 0 < len(sequences) <= TEXTS else None
        if graph is None:
            return self._eager(sequences, batch_tokens)
        with self._lock:
            return graph.embed(sequences)


class _Graph:
    """A row of `tokens` tokens. `replay` embeds what `_inputs` hold on the device."""

    def __init__(self, encoder: InstructionEncoder, tokens: int) -> None:
        self._encoder = encoder
        self._first_position = first_position(encoder.backbone)
        self._sizes = tokens, tokens, TEXTS + 1  # ids, positions, lengths of padding and texts
        self._staged = torch.zeros(sum(self._sizes), dtype=torch.long, pin_memory=encoder.device.type == "cuda")
        self._staged[-1] = tokens
        self._inputs = self._staged.to(encoder.device, copy=True)
        self.replay: Forward = self._forward

    def _forward(self) -> Tensor:
        ids, positions, lengths = self._inputs.split(self._sizes)
        borders = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        places, row, at = torch.arange(len(ids), device=ids.device), ids.unsqueeze(0), positions.unsqueeze(0)
        return self._encoder(PackedLayout(row, None, places, lengths, "query", at, borders=borders, longest=len(ids)))

    @torch.inference_mode()
    def embed(self, sequences: Sequence[Tokens]) -> np.ndarray:
        """Embed texts that fit."""
        layout = packed(sequences, self._first_position)
        count, tokens = len(layout.lengths), len(layout.tokens)
        ids, positions, lengths = self._staged.split(self._sizes)
        ids[-tokens:], positions[-tokens:] = layout.input_ids, layout.position_ids
        positions[:-tokens] = self._first_position
        lengths[-count:], lengths[:-count], lengths[0] = layout.lengths, 0, len(ids) - tokens
        self._inputs.copy_(self._staged, non_blocking=True)
        return self.replay()[-count:].cpu().numpy()
