"""The torch runtime of a serving replica's encoder, and the export of its ONNX graphs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from infembed_ray.modeling import onnx, prefix_cache
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.prefix_cache import PrefixCache
from infembed_ray.modeling.tokenizer import Side, Tokens
from infembed_ray.progress import say
from infembed_ray.serving.encoder.runtime import graph_files


class TorchRuntime:
    """The encoder in torch, with a prefix cache for instructions if its backbone is causal.

    Args:
        encoder: on its device, in its precision.
        batch_tokens: largest number of tokens of a forward pass.
        prefix_cache_bytes: size of the prefix cache; 0: none.
    """

    name = "torch"

    def __init__(self, encoder: InstructionEncoder, batch_tokens: int, prefix_cache_bytes: int = 0) -> None:
        self._encoder = encoder.eval()
        self._batch_tokens = batch_tokens
        self.padded = not encoder.packs
        self.prefixes: PrefixCache | None = None
        if encoder.causal and prefix_cache_bytes:
            if obstacle := prefix_cache.obstacle(encoder):
                say(f"serve: the prefix cache is off, every query encodes its instruction: {obstacle}")
            else:
                self.prefixes = PrefixCache(encoder, prefix_cache_bytes)
                self.padded = False

    def embed(self, sequences: Sequence[Tokens]) -> np.ndarray:
        """As `Runtime.embed`."""
        return (self.prefixes or self._encoder).embed(sequences, self._batch_tokens)

    def cost(self, tokens: Tokens) -> int:
        """As `Runtime.cost`."""
        return self.prefixes.remaining(tokens) if self.prefixes else len(tokens)


def graphs(encoder: InstructionEncoder, int8: bool = False) -> dict[Side, Path]:
    """Return the ONNX graph of each side; write it unless an earlier replica has.

    Args:
        encoder: with its weights, in float32.
        int8: graphs whose linear layers compute in int8.
    """
    backbones, fingerprint = len(encoder.backbones), encoder.fingerprint()
    exported = graph_files(fingerprint, backbones)
    _write(exported, lambda side, to: onnx.export(encoder, side, to))
    if not int8:
        return exported
    quantized = graph_files(fingerprint, backbones, int8=True)
    _write(quantized, lambda side, to: onnx.quantize(exported[side], to))
    return quantized


def _write(graphs: dict[Side, Path], write: Callable[[Side, Path], None]) -> None:
    """Publish a directory of graphs, unless there is one."""
    folder = graphs["query"].parent
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            for name, side in {graph.name: side for side, graph in graphs.items()}.items():
                write(side, made / name)
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another replica was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
