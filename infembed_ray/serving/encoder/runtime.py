"""Runtimes of a serving replica's encoder: torch and ONNX Runtime. `vllm_runtime` has the third.

The ONNX graph is exported once per machine, to the user's cache directory under the encoder's fingerprint.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
import torch
import transformers

from infembed_ray.config.serving import ServeSettings
from infembed_ray.modeling import onnx, prefix_cache
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Side, Tokens
from infembed_ray.modeling.prefix_cache import PrefixCache
from infembed_ray.progress import say

VERSIONS = f"torch{torch.__version__}-transformers{transformers.__version__}-opset{onnx.OPSET}"
"""What a graph and a measurement depend on besides the encoder."""


class Runtime(Protocol):
    """A model that the batching engine runs."""

    name: str
    padded: bool
    """Whether it pads the texts of a batch to the longest."""
    prefixes: PrefixCache | None
    """Its cache of encoded instructions, if it has one."""

    def embed(self, sequences: Sequence[Tokens]) -> np.ndarray:
        """Embed a batch; returns (len(sequences), d) float32 unit vectors."""

    def cost(self, tokens: Tokens) -> int:
        """Return the number of tokens of a text that are not cached."""


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


class OnnxRuntime:
    """ONNX Runtime on the CPU, on the graphs of an encoder.

    Args:
        graphs: the graph of each side; the same for both if they share a backbone.
        threads: threads of one run.
    """

    name = "onnx"
    padded = True
    prefixes: PrefixCache | None = None

    def __init__(self, graphs: dict[Side, Path], threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Threads that spin between two runs would take CPU time from the tokenizer and the event loop.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        sessions: dict[Path, Any] = {
            graph: onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
            for graph in set(graphs.values())
        }
        self._sessions = {side: sessions[graph] for side, graph in graphs.items()}

    def embed(self, sequences: Sequence[Tokens]) -> np.ndarray:
        """As `Runtime.embed`."""
        vectors: dict[int, np.ndarray] = {}
        for session in dict.fromkeys(self._sessions.values()):
            rows = [row for row, tokens in enumerate(sequences) if self._sessions[tokens.side] is session]
            if rows:
                vectors |= zip(rows, self._run(session, [sequences[row].ids for row in rows]), strict=True)
        return np.stack([vectors[row] for row in range(len(sequences))])

    def cost(self, tokens: Tokens) -> int:
        """As `Runtime.cost`."""
        return len(tokens)

    @staticmethod
    def _run(session: Any, texts: list[list[int]]) -> np.ndarray:
        lengths = np.array([len(ids) for ids in texts])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = np.zeros(real.shape, dtype=np.int64)  # masked positions may hold any token
        ids[real] = np.concatenate(texts)
        vectors: np.ndarray = session.run(
            [onnx.OUTPUT], dict(zip(onnx.INPUTS, (ids, real.astype(np.int64)), strict=True))
        )[0]
        return vectors


def threads(settings: ServeSettings) -> int:
    """Return the number of CPU threads of an encoder replica."""
    return max(1, int(settings.cpus_per_encoder))


def cache_directory() -> Path:
    """Return the directory of the user's cache that replicas share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infembed"


def graphs(encoder: InstructionEncoder, int8: bool = False) -> dict[Side, Path]:
    """Return the ONNX graph of each side; write it unless an earlier replica has.

    Args:
        encoder: with its weights, in float32.
        int8: graphs whose linear layers compute in int8.
    """
    sides: tuple[Side, ...] = get_args(Side)
    names = {side: f"{side if len(encoder.backbones) > 1 else 'model'}.onnx" for side in sides}
    sides_of = {name: side for side, name in names.items()}
    cache = cache_directory() / "onnx"
    found = _written(
        cache / f"{encoder.fingerprint()}-{VERSIONS}", sides_of, lambda side, to: onnx.export(encoder, side, to)
    )
    if int8:
        exported = found
        found = _written(Path(f"{found}-int8"), sides_of, lambda side, to: onnx.quantize(exported / names[side], to))
    return {side: found / name for side, name in names.items()}


def _written(found: Path, names: dict[str, Side], write: Callable[[Side, Path], None]) -> Path:
    """Return a directory of graphs after it is published."""
    if not found.is_dir():
        found.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=found.parent))
        try:
            for name, side in names.items():
                write(side, made / name)
            made.rename(found)
        except OSError:
            if not found.is_dir():  # otherwise another replica was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return found
