"""Runtimes of a serving replica's encoder: torch, and ONNX Runtime, which needs no torch.

The ONNX graph is exported once per machine, to the user's cache directory under the encoder's fingerprint.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from infembed_ray import __version__
from infembed_ray.config.serving import ServeSettings
from infembed_ray.modeling.tokenizer import Side, Tokens
from infembed_ray.progress import say

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder
    from infembed_ray.modeling.prefix_cache import PrefixCache

VERSIONS = f"{__version__}-torch{version('torch')}-transformers{version('transformers')}"
"""What a description, a graph and a measurement depend on besides the model."""


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
        from infembed_ray.modeling import prefix_cache

        self._encoder = encoder.eval()
        self._batch_tokens = batch_tokens
        self.padded = not encoder.packs
        self.prefixes: PrefixCache | None = None
        if encoder.causal and prefix_cache_bytes:
            if obstacle := prefix_cache.obstacle(encoder):
                say(f"serve: the prefix cache is off, every query encodes its instruction: {obstacle}")
            else:
                self.prefixes = prefix_cache.PrefixCache(encoder, prefix_cache_bytes)
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

    def __init__(self, graphs: Mapping[Side, Path], threads: int) -> None:
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
        vectors: np.ndarray = session.run(None, {"input_ids": ids, "attention_mask": real.astype(np.int64)})[0]
        return vectors


def threads(settings: ServeSettings) -> int:
    """Return the number of CPU threads of an encoder replica."""
    return max(1, int(settings.cpus_per_encoder))


def cache_directory() -> Path:
    """Return the directory of the user's cache that replicas share; below that of temporary files for a user without a home."""
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infembed"
    return Path(tempfile.gettempdir()) / "infembed"


def graph_files(fingerprint: str, backbones: int, int8: bool = False) -> dict[Side, Path]:
    """Return where the ONNX graph of each side is, once it is written.

    Args:
        fingerprint: of the encoder.
        backbones: 2 for separate encoders of queries and passages.
        int8: graphs whose linear layers compute in int8.
    """
    folder = cache_directory() / "onnx" / f"{fingerprint}-{VERSIONS}{'-int8' * int8}"
    names: dict[Side, str] = (
        {"query": "query", "passage": "passage"} if backbones > 1 else {"query": "model", "passage": "model"}
    )
    return {side: folder / f"{name}.onnx" for side, name in names.items()}


def graphs(encoder: InstructionEncoder, int8: bool = False) -> dict[Side, Path]:
    """Return the ONNX graph of each side; write it unless an earlier replica has.

    Args:
        encoder: with its weights, in float32.
        int8: graphs whose linear layers compute in int8.
    """
    from infembed_ray.modeling import onnx

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
