"""Runtimes of a serving replica's encoder: the interface, and ONNX Runtime. `torch_runtime` and `vllm_runtime` have the others.

The ONNX graph is exported once per machine, to the user's cache directory under the encoder's fingerprint.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from infembed_ray import __version__
from infembed_ray.config.serving import ServeSettings
from infembed_ray.modeling.tokenizer import Side, Tokens

if TYPE_CHECKING:
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
