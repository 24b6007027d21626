"""vLLM as the runtime of a large decoder, with tensor parallelism over the GPUs of an encoder replica.

vLLM gets the token ids that the encoder makes. So template, truncation and special tokens are those of every other runtime.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.tokenizer import Tokens

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder
    from infembed_ray.modeling.prefix_cache import PrefixCache

log = logging.getLogger(__name__)


class VllmRuntime:
    """vLLM's pooling runner in processes of its own. Blocks until the model is loaded.

    Args:
        encoder: on the meta device; it tokenises.
        settings: GPUs, precision and batches.
        model: directory or hub name of the weights.

    Raises:
        InputError: vLLM is not installed, or cannot run this encoder.
    """

    name = "vllm"
    padded = False
    prefixes: PrefixCache | None = None  # vLLM has its own prefix cache

    def __init__(self, encoder: InstructionEncoder, settings: ServeSettings, model: str) -> None:
        require_vllm(encoder, settings, model)
        if importlib.util.find_spec("vllm") is None:
            raise InputError("runtime=vllm: vllm is not installed on this node; pip install vllm, or set runtime=torch")
        from vllm import LLM
        from vllm.config import PoolerConfig

        options = engine_arguments(encoder, settings, model)
        self.dtype: str = options["dtype"]
        self._dimension = encoder.dimension
        earlier = set(multiprocessing.active_children())
        self._llm = LLM(**options | {"pooler_config": PoolerConfig(**options["pooler_config"])})
        engine = [process.sentinel for process in set(multiprocessing.active_children()) - earlier]
        threading.Thread(target=_end_with, args=(weakref.ref(self), engine), name="watch-vllm", daemon=True).start()

    def embed(self, sequences: Sequence[Tokens]) -> np.ndarray:
        """As `Runtime.embed`."""
        found = self._llm.embed([{"prompt_token_ids": tokens.ids} for tokens in sequences], use_tqdm=False)
        vectors = np.array([one.outputs.embedding[: self._dimension] for one in found], dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def cost(self, tokens: Tokens) -> int:
        """As `Runtime.cost`."""
        return len(tokens)


def _end_with(runtime: weakref.ref[VllmRuntime], engine: list[int]) -> None:
    """End this process if vLLM's has ended: a call in flight would wait for ever. Serve starts another replica."""
    connection.wait(engine)
    if runtime() is not None and threading.main_thread().is_alive():  # otherwise vLLM was closed, or this process ends
        log.error("vLLM's engine ended; the replica ends too, and Serve starts another one")
        os._exit(1)


def engine_arguments(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`, with those of its `PoolerConfig` as a mapping."""
    gpus = int(settings.gpus_per_encoder)
    low = settings.dtype == "bfloat16" or (settings.dtype == "auto" and gpus > 0)
    longest = max(encoder.text.query_length, encoder.text.passage_length)
    return {
        "model": model,
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": {"pooling_type": encoder.pooling.upper()},
        "dtype": "bfloat16" if low else "float32",
        "max_model_len": longest,
        "max_num_batched_tokens": max(settings.batch_tokens, longest),  # a batch of ours is one step of vLLM
        "tensor_parallel_size": max(1, gpus),
        "distributed_executor_backend": "mp",  # Ray has reserved the GPUs for the replica, which starts the workers itself
    }


def require_vllm(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> None:
    """Check that vLLM can give this encoder's embeddings. Starts nothing and does not need vLLM.

    Raises:
        InputError: it cannot.
    """
    if fault := next(_faults(encoder, settings, model), None):
        raise InputError(f"runtime=vllm: {fault}")


def _faults(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> Iterator[str]:
    """Yield why vLLM cannot run an encoder, each with a remedy."""
    gpus, heads = settings.gpus_per_encoder, int(encoder.backbone.config.num_attention_heads)  # type: ignore[union-attr, arg-type]
    if settings.dtype == "int8":
        yield "dtype=int8: vLLM runs float32 and bfloat16 here; set dtype=auto"
    if gpus != int(gpus):
        yield f"gpus_per_encoder={gpus:g}: a model is split over whole GPUs; give a whole number"
    if gpus and heads % int(gpus):
        yield f"gpus_per_encoder={gpus:g}: does not divide the {heads} attention heads of {model}; give a divisor"
    if encoder.interaction is not None:
        yield f"model={model}: has interaction=cross_attention, which vLLM does not have; set runtime=torch"
    if len(encoder.backbones) > 1:
        yield f"model={model}: has separate encoders of queries and passages, and vLLM runs one; set runtime=torch"
    if not encoder.causal:
        yield f"model={model}: its attention is bidirectional, and vLLM's decoders are causal; set runtime=torch"
    if (Path(model) / "adapter_config.json").is_file():
        yield f"model={model}: has adapters that are not merged into its weights; merge them, or set runtime=torch"
