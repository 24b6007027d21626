"""Offline encoding against sentence-transformers and plain transformers, and FAISS on the GPU against brute force."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel

from benchmarks.gpu import measure
from benchmarks.gpu.suite import Context, Result, Skipped
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder

BATCH_SIZES = (32, 128, 512)
"""Texts of a batch of sentence-transformers: its default, and others of which the fastest counts."""
BATCH_TOKENS: tuple[dict[str, int], ...] = ({}, {"batch_tokens": 16384})
"""Tokens of a pass of the package: its default, and another."""
TRANSFORMERS_BATCH = 128
COSINE = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
"""Largest 1 - cosine of our embedding with that of sentence-transformers."""
RECALL_LOST = {"Flat": 1e-3, "IVF256,Flat": 0.1}
"""FAISS type -> largest share of the exact ten nearest that it may miss; ties of a flat index are rounded."""


def encode(context: Context) -> Iterator[Result]:
    """Encode passages of mean length 75 with one model in three libraries, which read the same ids."""
    for name, family, count, make in (
        ("Qwen2.5-0.5B shape", "qwen2", 2048, lambda: measure.backbone_of("0.5B", context)),
        ("e5-base shape", "bert", 4096, lambda: _bert(context)),
    ):
        rng = random.Random(0)
        lengths = [len(t) for t in measure.texts(16 if context.tiny else count, measure.PASSAGE, 2)]
        yield _compared(name, family, make(), [measure.sentence(length, rng) for length in lengths], context)
        measure.free()


def _compared(name: str, family: str, backbone: Any, passages: list[str], context: Context) -> Result:
    from sentence_transformers import SentenceTransformer

    dtype = measure.dtype_of(context)
    with tempfile.TemporaryDirectory() as directory:
        plain, ours = Path(directory, "plain"), Path(directory, "ours")
        backbone.save_pretrained(plain)
        measure.tokenizer(family).save_pretrained(plain)
        encoder = InstructionEncoder.from_pretrained(plain, device=context.device, dtype=dtype)
        encoder.save_pretrained(ours)
        theirs = SentenceTransformer(str(ours), device=context.device, model_kwargs={"dtype": dtype})
    encoder.eval()
    found: dict[str, np.ndarray] = {}

    def run_theirs(size: int) -> None:
        found["theirs"] = theirs.encode(passages, batch_size=size, show_progress_bar=False)

    def run_ours(number: int) -> None:
        found["ours"] = encoder.encode_passages(passages, **BATCH_TOKENS[number])

    def run_transformers() -> None:
        found["transformers"] = _with_transformers(encoder, passages)

    sequences = encoder.tokenize_passages(passages)
    read = measure.read_by(theirs, lambda: run_theirs(BATCH_SIZES[0]))
    of_theirs = {size: _seconds(run_theirs, size, context) for size in BATCH_SIZES[: 1 if context.tiny else None]}
    of_ours = [_seconds(run_ours, number, context) for number in range(len(BATCH_TOKENS))]
    plain_taken = measure.seconds(run_transformers, context, rounds=2)
    batch, taken = min(of_theirs, key=of_theirs.__getitem__), min(of_ours)
    figures: dict[str, float | str] = {
        "texts/s": len(passages) / taken,
        "tokens/s": sum(map(len, sequences)) / taken,
        **measure.mfu(measure.forward_flops(encoder, sequences), taken, context),
        "tokens of a pass": BATCH_TOKENS[of_ours.index(taken)].get("batch_tokens", "default"),
        "sentence-transformers' batch": batch,
        "sentence-transformers / ours, time": of_theirs[batch] / taken,
        "both by default": of_theirs[BATCH_SIZES[0]] / of_ours[0],
        "transformers / ours": plain_taken / taken,
    }
    off = {
        peer: float(1 - (found["ours"] * _unit(found[peer])).sum(axis=1).min()) for peer in ("theirs", "transformers")
    }
    checks = {f"1 - cosine, {peer}": (value, COSINE[dtype]) for peer, value in off.items()}
    checks |= measure.same_ids(read, measure.of_tokens(sequences))
    return Result(f"{name}, {len(passages)} passages", figures, checks)


def _seconds(run: Callable[[int], None], size: int, context: Context) -> float:
    return measure.seconds(lambda: run(size), context, rounds=2)


@torch.inference_mode()
def _with_transformers(encoder: InstructionEncoder, passages: list[str]) -> np.ndarray:
    """Embed texts as a plain loop does: sorted by length, padded, one copy to the host a batch."""
    order = sorted(range(len(passages)), key=lambda row: -len(passages[row]))
    caching = {"use_cache": False} if hasattr(encoder.backbone.config, "use_cache") else {}
    parts = []
    for first in range(0, len(order), TRANSFORMERS_BATCH):
        batch = [passages[row] for row in order[first : first + TRANSFORMERS_BATCH]]
        inputs = encoder.tokenizer(batch, padding=True, return_tensors="pt").to(encoder.device)
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        states = encoder.backbone(**inputs, **caching).last_hidden_state
        mask = inputs["attention_mask"]
        if encoder.pooling == "last":
            pooled = states[torch.arange(len(batch), device=states.device), mask.cumsum(1).argmax(1)]
        else:
            pooled = (states * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        parts.append(torch.nn.functional.normalize(pooled.float(), dim=-1).cpu().numpy())
    embeddings = np.concatenate(parts)
    embeddings[order] = embeddings.copy()
    return embeddings


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
    return BertModel(BertConfig(vocab_size=2048, **sizes) if context.tiny else BertConfig())


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
