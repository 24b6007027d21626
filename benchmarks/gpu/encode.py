"""Offline encoding against sentence-transformers, and FAISS on the GPU against brute force."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel

from benchmarks.gpu import measure
from benchmarks.gpu.suite import Context, Result, Skipped
from infembed_ray.errors import InputError

BATCH_SIZES = (32, 128, 512)
"""Of sentence-transformers; the fastest counts."""
COSINE = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
"""Largest 1 - cosine of our embedding with that of sentence-transformers."""
RECALL_LOST = {"Flat": 1e-3, "IVF256,Flat": 0.1}
"""FAISS type -> largest share of the exact ten nearest that it may miss; ties of a flat index are rounded."""


def encode(context: Context) -> Iterator[Result]:
    """Encode passages of mean length 75 with one checkpoint in both libraries."""
    from sentence_transformers import SentenceTransformer

    from infembed_ray.modeling.encoder import InstructionEncoder

    rng = random.Random(0)
    lengths = [len(t) for t in measure.texts(16 if context.tiny else 4096, measure.PASSAGE, measure.WORDS)]
    passages = [" ".join(str(rng.randrange(measure.WORDS)) for _ in range(length)) for length in lengths]
    dtype = measure.dtype_of(context)
    for name, backbone in (
        ("e5-base shape", _bert(context)),
        ("Qwen2.5-0.5B shape", measure.backbone_of("0.5B", context)),
    ):
        with tempfile.TemporaryDirectory() as directory:
            plain, ours = Path(directory, "plain"), Path(directory, "ours")
            backbone.save_pretrained(plain)
            measure.tokenizer().save_pretrained(plain)
            encoder = InstructionEncoder.from_pretrained(plain, device=context.device, dtype=dtype)
            encoder.save_pretrained(ours)
            theirs = SentenceTransformer(str(ours), device=context.device, model_kwargs={"dtype": dtype})
        encoder.eval()
        found: dict[str, Any] = {}

        def run_ours(encoder: Any = encoder, found: dict[str, Any] = found) -> None:
            found["ours"] = encoder.encode_passages(passages, batch_tokens=16384)

        def run_theirs(size: int, theirs: Any = theirs, found: dict[str, Any] = found) -> None:
            found["theirs"] = theirs.encode(passages, batch_size=size, show_progress_bar=False)

        taken = measure.seconds(run_ours, context, rounds=3)
        of_theirs = {
            size: measure.seconds(lambda size=size, run=run_theirs: run(size), context, rounds=2)
            for size in BATCH_SIZES[: 1 if context.tiny else None]
        }
        best = min(of_theirs, key=of_theirs.__getitem__)
        off = 1 - (found["ours"] * _unit(found["theirs"])).sum(axis=1)
        yield Result(
            f"{name}, {len(passages)} passages",
            {
                "texts/s": len(passages) / taken,
                "tokens/s": sum(lengths) / taken,
                "sentence-transformers' batch": best,
                "sentence-transformers / ours, time": of_theirs[best] / taken,
            },
            {"1 - cosine": (float(off.max()), COSINE[dtype])},
        )
        del encoder, theirs
        measure.free()


def faiss(context: Context) -> Iterator[Result]:
    """Build indexes as the product does, search them on the device, and compare with exact search."""
    try:
        from infembed_ray.retrieval import faiss_index
    except InputError as error:
        raise Skipped(str(error)) from error
    gpu = context.device == "cuda"
    if gpu:
        try:
            faiss_index.require_gpu_faiss()
        except InputError as error:
            raise Skipped(str(error)) from error
    count, dimension, width = (20_000, 32, 50) if context.tiny else (500_000, 896, 1000)
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((256, dimension), dtype=np.float32)
    noise = generator.standard_normal((count + width, dimension), dtype=np.float32)
    vectors = _unit(centres[generator.integers(256, size=count + width)] + noise)
    vectors, queries = vectors[:count], vectors[count:]
    scores = torch.from_numpy(queries).to(context.device) @ torch.from_numpy(vectors).to(context.device).T
    exact = scores.topk(10).indices.cpu().numpy()
    for kind, bound in RECALL_LOST.items():
        index = faiss_index.build(kind, vectors)
        if hasattr(index, "nprobe"):
            index.nprobe = 32
        index = faiss_index.on_gpus(index) if gpu else index
        taken = measure.seconds(lambda index=index: index.search(queries, 10), context, rounds=3)
        hits = index.search(queries, 10)[1]
        recall = float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(hits.tolist(), exact.tolist(), strict=True)]))
        yield Result(
            f"{kind}, {count} x {dimension}", {"queries/s": width / taken}, {"1 - recall@10": (1 - recall, bound)}
        )


def _bert(context: Context) -> BertModel:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=512, **sizes) if context.tiny else BertConfig())


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
