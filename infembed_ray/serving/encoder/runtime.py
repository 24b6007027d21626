"""Runtime of a serving replica's encoder: torch, or ONNX Runtime where it is faster and gives the same vectors.

Which runtime is faster depends on the model, the processor and the number of threads, so a replica measures both when it
starts. The ONNX graph is exported once per machine, to the user's cache directory under the encoder's fingerprint.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
import torch
import transformers

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling import onnx, prefix_cache
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Side, Tokens
from infembed_ray.modeling.prefix_cache import PrefixCache
from infembed_ray.progress import say

MIN_COSINE = 0.999
"""Smallest cosine between two runtimes' embeddings of a text at which they count as equal."""
PROBE_LENGTHS = (4, 8, 16, 24, 32, 64, 96, 128, 256, 512)
"""Lengths in tokens of the texts that compare and warm up the runtimes."""
_PROBE_TEXT = "An instruction says what a query asks for besides its topic: which sources, which years, whose words. "


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


def require_runnable(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> None:
    """InputError if the settings demand ONNX Runtime and it cannot run this encoder. Starts nothing."""
    if settings.runtime == "onnx":
        _require_onnx(encoder, settings, model)


def choose(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> Runtime:
    """Return the runtime that the settings name, or with `auto` the faster one.

    If ONNX Runtime is chosen, the weights of `encoder` are freed: from then on it can only tokenise.

    Args:
        encoder: on its device, in its precision.
        settings: runtime, threads, batches and memory.
        model: its name in messages.

    Raises:
        InputError: the settings demand ONNX Runtime, and it cannot run this encoder or gives different vectors.
    """
    in_torch = TorchRuntime(encoder, settings.batch_tokens, settings.prefix_cache_mib * 2**20)
    if settings.runtime == "torch":
        return in_torch
    try:
        _require_onnx(encoder, settings, model)
        in_onnx = OnnxRuntime(_graphs(encoder), threads(settings))
        texts = probes(encoder)
        cosine = _smallest_cosine(in_torch, in_onnx, texts)
        if not cosine >= MIN_COSINE:
            raise InputError(
                f"runtime=onnx: gives different vectors for {model} (smallest cosine {cosine:.4f}); set runtime=torch"
            )
    except Exception as error:  # torch runs every model; export and ONNX Runtime do not
        if settings.runtime == "onnx":
            raise
        say(f"serve: the encoder runs in torch ({str(error).splitlines()[0]})")
        return in_torch
    chosen: Runtime = in_onnx
    if settings.runtime == "auto":
        seconds = {runtime: _seconds(runtime, texts) for runtime in (in_torch, in_onnx)}
        chosen = min(seconds, key=seconds.__getitem__)
        times = ", ".join(f"{runtime.name} {1e3 * taken:.0f} ms" for runtime, taken in seconds.items())
        say(f"serve: the encoder runs in {chosen.name}, which is faster here ({times}; smallest cosine {cosine:.6f})")
    if chosen is in_onnx:
        encoder.to("meta")
    return chosen


def threads(settings: ServeSettings) -> int:
    """Return the number of CPU threads of an encoder replica."""
    return max(1, int(settings.cpus_per_encoder))


def probes(encoder: InstructionEncoder) -> list[Tokens]:
    """Return passages of `PROBE_LENGTHS` tokens, up to the encoder's maximum length, shortest first."""
    ids = encoder.tokenize_passages([_PROBE_TEXT * 50])[0].ids
    return [Tokens(ids[: length - 1] + ids[-1:]) for length in PROBE_LENGTHS if length <= len(ids)]


def _require_onnx(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> None:
    if settings.gpus_per_encoder:
        raise InputError(
            f"gpus_per_encoder={settings.gpus_per_encoder:g}: ONNX Runtime runs on CPUs only here; set runtime=torch"
        )
    if settings.dtype != "float32":
        raise InputError(f"dtype={settings.dtype}: ONNX graphs are float32 here; set runtime=torch, or dtype=float32")
    onnx.require_exportable(encoder, model)
    if importlib.util.find_spec("onnxruntime") is None:
        raise InputError("onnxruntime is not installed; pip install 'infembed-ray[onnx]', or set runtime=torch")


def _graphs(encoder: InstructionEncoder) -> dict[Side, Path]:
    """Return the ONNX graph of each side; export it unless an earlier replica has."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infembed" / "onnx"
    versions = f"torch{torch.__version__}-transformers{transformers.__version__}-opset{onnx.OPSET}"
    found = cache / f"{encoder.fingerprint()}-{versions}"
    sides: tuple[Side, ...] = get_args(Side)
    names = {side: side if len(encoder.backbones) > 1 else "model" for side in sides}
    if not found.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache))
        try:
            for name, side in {name: side for side, name in names.items()}.items():
                onnx.export(encoder, side, made / f"{name}.onnx")
            made.rename(found)
        except OSError:
            if not found.is_dir():  # otherwise another replica was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return {side: found / f"{name}.onnx" for side, name in names.items()}


def _smallest_cosine(one: Runtime, other: Runtime, texts: list[Tokens]) -> float:
    """Return the smallest cosine between each text alone in one runtime and all texts in one batch of the other."""
    alone = np.concatenate([one.embed([text]) for text in texts])
    return float((alone * other.embed(texts)).sum(axis=1).min())


def _seconds(runtime: Runtime, texts: list[Tokens]) -> float:
    """Time a short text alone, and batches of four equal texts for each of the shorter half."""
    batches = [texts[1:2], *([text] * 4 for text in texts[: len(texts) // 2 + 1])]

    def once() -> float:
        start = time.perf_counter()
        for batch in batches:
            runtime.embed(batch)
        return time.perf_counter() - start

    return min(once() for _ in range(3))
