"""Latency of queries: the package's ways to embed them against the backbone alone, eager and as a CUDA graph.

Each query has 64 tokens and its own instruction, and no two calls share texts, so the prefix cache finds nothing. The CUDA
graph of the backbone with static inputs is a lower bound: it has no tokenization, no copies and no pooling.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import measure
from benchmarks.gpu.suite import Context, Result
from infembed_ray.config.serving import ServeSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.serving.encoder.engine import EncodingEngine

LENGTH, INSTRUCTION = 64, 52
BATCHES = (1, 8, 32)
SIZES = ("0.5B", "1.5B")
COSINE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""Largest 1 - cosine with the eager backbone."""
CALLS = 24
Asked = tuple[list[str], list[str | None]]
"""Queries and their instructions."""


def query(context: Context) -> Iterator[Result]:
    """Time batches of queries in every way that there is."""
    for size in SIZES:
        with tempfile.TemporaryDirectory() as directory:
            measure.backbone_of(size, context).save_pretrained(directory)
            measure.tokenizer().save_pretrained(directory)
            measure.free()
            dtype = measure.dtype_of(context)
            encoder = InstructionEncoder.from_pretrained(directory, device=context.device, dtype=dtype).eval()
            ways = {"encode_queries": encoder.encode_queries, **_served(directory, context), **_graphed(encoder)}
        for count in BATCHES:
            if context.left < 0:
                return
            yield _measured(encoder, ways, f"{size}, batch {count}", count, context)
        del encoder, ways
        measure.free()


def _measured(
    encoder: InstructionEncoder, ways: dict[str, Callable[..., np.ndarray]], name: str, count: int, context: Context
) -> Result:
    rng = random.Random(count)
    rounds = 3 if context.tiny else CALLS - 4
    asked = [_asked(encoder, count, rng) for _ in range(rounds + 4)]
    sequences = [encoder.tokenize_queries(*each) for each in asked]
    ids = torch.tensor([tokens.ids for tokens in sequences[0]], device=context.device)  # all have one length
    mask = torch.ones_like(ids)

    def eager() -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask}
        states: Tensor = encoder.backbone(**inputs, use_cache=False).last_hidden_state
        return states[:, -1]

    with torch.inference_mode():
        expected = torch.nn.functional.normalize(eager().float(), dim=-1).cpu().numpy()
        figures: dict[str, float | str] = {"eager, ms": 1e3 * measure.seconds(eager, context, rounds, warm_up=3)}
    checks = {"tokens of a query - 64": (float(max(abs(len(t) - LENGTH) for each in sequences for t in each)), 0.0)}
    for way, embed in ways.items():
        off = 1 - (embed(*asked[0]) * expected).sum(axis=1)
        checks[f"1 - cosine, {way}"] = (float(off.max()), COSINE[measure.dtype_of(context)])
        calls = cycle(asked[1:])
        figures[f"{way}, ms"] = 1e3 * measure.seconds(lambda e=embed, c=calls: e(*next(c)), context, rounds, warm_up=3)
    try:
        replay, states = _graph(encoder, ids)
        if context.device == "cuda":
            figures["CUDA graph, ms"] = 1e3 * measure.seconds(replay, context, rounds, warm_up=3)
        found = torch.nn.functional.normalize(states[:, -1].float(), dim=-1).cpu().numpy()
        checks["1 - cosine, CUDA graph"] = (float(1 - (found * expected).sum(axis=1).min()), COSINE[encoder.dtype])
    except RuntimeError as error:
        figures["CUDA graph"] = str(error).splitlines()[0][:80]
    return Result(name, figures, checks)


def _asked(encoder: InstructionEncoder, count: int, rng: random.Random) -> Asked:
    rest = LENGTH - INSTRUCTION - (len(encoder.tokenize_queries(["a"], [None])[0]) - 1)  # without EOS
    instructions = [measure.sentence(INSTRUCTION, rng) for _ in range(count)]
    return [measure.sentence(rest, rng) for _ in range(count)], [*instructions]


def _served(model: str, context: Context) -> dict[str, Callable[..., np.ndarray]]:
    """Load the engine of a serving replica."""
    cuda = context.device == "cuda"
    dtype = "bfloat16" if cuda else "float32"
    engine = EncodingEngine.load(model, ServeSettings(index="-", gpus_per_encoder=float(cuda), dtype=dtype))
    loop = asyncio.new_event_loop()
    return {"serving engine": lambda *asked: loop.run_until_complete(engine.embed(*asked)).vectors}


def _graphed(encoder: InstructionEncoder) -> dict[str, Callable[..., np.ndarray]]:
    """Return the package's own CUDA graphs of small batches, if this version has them and the device runs them."""
    try:
        graphs: Any = importlib.import_module("infembed_ray.modeling.graphs")
    except ModuleNotFoundError:
        return {}
    if not encoder.packs:
        return {}
    graphed = graphs.GraphedEncoder(encoder, encoder.embed)
    return {"GraphedEncoder": lambda *asked: graphed.embed(encoder.tokenize_queries(*asked))}


def _graph(encoder: InstructionEncoder, ids: Tensor) -> tuple[Callable[[], object], Tensor]:
    """Capture the backbone, without a mask, which texts of one length do not need; return its replay and its states.

    On a CPU, the pass runs once.
    """
    inputs = {"input_ids": ids, "attention_mask": {"full_attention": None}, "use_cache": False}
    with torch.no_grad():
        if ids.device.type == "cpu":
            states: Tensor = encoder.backbone(**inputs).last_hidden_state
            return (lambda: None), states
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                encoder.backbone(**inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            states = encoder.backbone(**inputs).last_hidden_state
    return graph.replay, states
