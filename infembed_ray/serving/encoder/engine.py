"""Encoding engine of a serving replica: texts of concurrent callers -> unit vectors. It depends on neither HTTP nor Ray.

One thread tokenises, another runs the model, and the batching engine between them forms the batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.precision import cpu_has_bf16
from infembed_ray.modeling.tokenizer import Side, TextTokenizer, Tokens
from infembed_ray.progress import say
from infembed_ray.serving import startup
from infembed_ray.serving.encoder.batching import BatchingEngine, DeadlineExceeded, Embedded
from infembed_ray.storage.steps import read_manifest, resolve_input

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder
    from infembed_ray.modeling.prefix_cache import PrefixCache

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 1024, 4096
"""Largest number of tokens in a batch. On a CPU larger ones save little and delay the next request."""
PREFIX_CACHE_BYTES = 256 * 2**20
"""Size of the prefix cache for instructions, with causal backbones."""
WARM_UP_LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512)
SLICE = 128
"""Inputs of a request that are tokenised in one call, so that other requests get a turn in between."""


class EncodingEngine:
    """Embeds texts. All calls come from one event loop; build it with `load`."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        batching: BatchingEngine,
        runtime: str = "torch float32",
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.batching = batching
        self.runtime = runtime
        self.prefixes = prefixes
        self._tokenizer = tokenizer
        # One thread, because truncation is mutable state of a fast tokenizer; not the event loop, which a long text
        # would block.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    @classmethod
    def load(
        cls, model: str, settings: ServeSettings, dimensions: int | None = None, fingerprint: str | None = None
    ) -> EncodingEngine:
        """Load a model and warm it up. Blocks for seconds.

        Args:
            model: directory or hub name.
            settings: `dtype`, `onnx`, and the resources of a replica.
            dimensions: as `InstructionEncoder.from_pretrained` takes it.
            fingerprint: that the model must have; None: any.

        Raises:
            InputError: there is no such model, it has another fingerprint, or `onnx` is not its export.
        """
        encoder = startup.in_background(lambda: _load(model, settings, dimensions))
        if fingerprint not in (None, own := encoder.fingerprint()):
            fault = f"its fingerprint is {own} on this node and {fingerprint} where `serve` was started"
            raise InputError.of("model", model, fault, "put the same checkpoint on all nodes")
        gpu = settings.gpus_per_encoder > 0
        batch_tokens = GPU_BATCH_TOKENS if gpu else CPU_BATCH_TOKENS
        if settings.onnx is not None:
            graphs = OnnxGraphs(onnx_files(settings.onnx, own), _threads(settings))
            batching, runtime, prefixes = BatchingEngine(graphs.embed, batch_tokens=batch_tokens), "onnx float32", None
            embed = graphs.embed
        else:
            prefixes = _prefix_cache(encoder)
            embedder = prefixes or encoder

            def embed(sequences: Sequence[Tokens]) -> np.ndarray:
                return embedder.embed(sequences, batch_tokens)

            batching = BatchingEngine(
                embed,
                batch_tokens=batch_tokens,
                padded=not (prefixes or encoder.packs),
                cost=prefixes.remaining if prefixes else len,
            )
            runtime = str(encoder.dtype).replace("torch.", "torch ")
        for length in WARM_UP_LENGTHS:
            embed([Tokens([0] * min(length, encoder.text.passage_length))])
        say(f"serve: the encoder runs in {runtime}")
        return cls(encoder.texts, batching, runtime, prefixes)

    async def embed(
        self, texts: Sequence[str], instructions: Sequence[str | None] | None, timeout_s: float | None = None
    ) -> Embedded:
        """Embed texts.

        Args:
            texts: at least one.
            instructions: one per query, None for a query without one; None: the texts are passages.
            timeout_s: time-out of the request; None: no limit.

        Raises:
            QueueFull: try again later.
            DeadlineExceeded: no answer within `timeout_s`.
        """
        self.batching.require_capacity(len(texts), timeout_s)  # before any work is done
        loop = asyncio.get_running_loop()
        began = loop.time()
        tokens: list[Tokens] = []
        for start in range(0, len(texts), SLICE):
            part = slice(start, start + SLICE)
            of_part = None if instructions is None else instructions[part]
            tokens += await loop.run_in_executor(self._thread, self._tokenize, texts[part], of_part)
        left = None if timeout_s is None else timeout_s - (loop.time() - began)
        try:
            vectors = await self.batching.embed(tokens, left)
        except DeadlineExceeded:
            raise DeadlineExceeded(timeout_s or 0.0) from None
        return Embedded(vectors, sum(map(len, tokens)))

    def _tokenize(self, texts: Sequence[str], instructions: Sequence[str | None] | None) -> list[Tokens]:
        try:
            if instructions is None:
                return self._tokenizer.tokenize_passages(texts)
            return self._tokenizer.tokenize_queries(texts, instructions)
        except BaseException as error:  # a panic of the tokenizer is not an Exception
            raise error if isinstance(error, Exception) else RuntimeError(repr(error)) from error


def _load(model: str, settings: ServeSettings, dimensions: int | None) -> InstructionEncoder:
    """Load a model; with `onnx` without its weights, to tokenise only."""
    import torch

    from infembed_ray.modeling.encoder import InstructionEncoder

    torch.set_num_threads(_threads(settings))
    gpu = settings.gpus_per_encoder > 0
    low = settings.dtype == "bfloat16" or (settings.dtype == "auto" and (gpu or cpu_has_bf16()))
    return InstructionEncoder.from_pretrained(
        model,
        dimensions=dimensions,
        device="meta" if settings.onnx is not None else "cuda" if gpu else "cpu",
        dtype=torch.bfloat16 if low else torch.float32,
    ).eval()


def _threads(settings: ServeSettings) -> int:
    return max(1, int(settings.cpus_per_encoder))


def _prefix_cache(encoder: InstructionEncoder) -> PrefixCache | None:
    from infembed_ray.modeling import prefix_cache

    if not encoder.causal:
        return None
    if obstacle := prefix_cache.obstacle(encoder):
        say(f"serve: the prefix cache is off, every query encodes its instruction: {obstacle}")
        return None
    return prefix_cache.PrefixCache(encoder, PREFIX_CACHE_BYTES)


# ------------------------------------------------------------------------------------------------------------ ONNX


class OnnxGraphs:
    """ONNX Runtime on the CPU, on the graph of each side of an encoder; the same for both if they share a backbone."""

    def __init__(self, files: Mapping[Side, Path], threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Threads that spin between two runs would take CPU time from the tokenizer and the event loop.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        sessions: dict[Path, Any] = {
            file: onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
            for file in set(files.values())
        }
        self._sessions = {side: sessions[file] for side, file in files.items()}

    def embed(self, sequences: Sequence[Tokens]) -> np.ndarray:
        """Embed a batch: (len(sequences), d) float32 unit vectors."""
        vectors: dict[int, np.ndarray] = {}
        for session in dict.fromkeys(self._sessions.values()):
            rows = [row for row, tokens in enumerate(sequences) if self._sessions[tokens.side] is session]
            if rows:
                vectors |= zip(rows, self._run(session, [sequences[row].ids for row in rows]), strict=True)
        return np.stack([vectors[row] for row in range(len(sequences))])

    @staticmethod
    def _run(session: Any, texts: list[list[int]]) -> np.ndarray:
        lengths = np.array([len(ids) for ids in texts])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = np.zeros(real.shape, dtype=np.int64)  # masked positions may hold any token
        ids[real] = np.concatenate(texts)
        vectors: np.ndarray = session.run(None, {"input_ids": ids, "attention_mask": real.astype(np.int64)})[0]
        return vectors


def onnx_files(onnx: str, fingerprint: str) -> dict[Side, Path]:
    """Return the graph of each side in an output of `infembed export`.

    Raises:
        InputError: there is no such output, it is of another encoder, or onnxruntime is not installed.
    """
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        remedy = "pip install 'infembed-ray[onnx]', or leave out onnx"
        raise InputError.of("onnx", onnx, "onnxruntime is not installed", remedy) from None
    folder = resolve_input(onnx, "onnx")
    exported = read_manifest(folder, "onnx").get("encoder")
    if exported != fingerprint:
        fault = f"is the export of the encoder {exported}, and {fingerprint} is served"
        raise InputError.of("onnx", onnx, fault, "export the served model with `infembed export`")
    shared = folder / "model.onnx"
    if shared.is_file():
        return {"query": shared, "passage": shared}
    return {"query": folder / "query.onnx", "passage": folder / "passage.onnx"}
