"""Training steps of the product's engine against those of sentence-transformers: the same weights, token ids and loss.

sentence-transformers steps as its trainer does: a padded forward pass for each column of the data, AdamW, clipping to norm 1;
in fp32 weights under autocast to bf16 (`bf16=True`), and in bf16 weights. Negatives of I are columns of pairs, because it
has no prefix trees; `uni{P}`, its MultipleNegativesRankingLoss, has none. What a data loader does beforehand (padding;
laying out) is outside the time of both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import measure, steps, zero
from benchmarks.gpu.steps import Sides
from benchmarks.gpu.suite import Context, Result
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.tokenizer import TextFormat, Tokens
from infembed_ray.training.observability.flops import Workload
from infembed_ray.training.preparation import passes

COUNTS = (12, 96)
LOSS = 3e-2
"""Relative difference of the loss before the first update."""
NOISE = 1e-2
"""The loss may rise by this: that of uni{P} is about 0 after the steps of multi{P,I} on the same texts."""


def peers(context: Context) -> Iterator[Result]:
    """Time steps of the engine, then those of sentence-transformers in both precisions."""
    size, vocabulary = str(context.argument), measure.config_of(context.argument, context).vocab_size
    work: dict[str, Sides] = {}
    for count in COUNTS[: 1 if context.tiny else None]:
        pairs, passages = steps.texts(count, vocabulary)
        work[f"multi{{P,I}}, {count} tuples"] = pairs, passages
        work[f"uni{{P}}, {count} tuples"] = pairs[:count], passages
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        backbone = measure.backbone_of(size, context)
        InstructionEncoder(backbone, measure.tokenizer(), "last", TextFormat()).save_pretrained(model)
        del backbone
        measure.free()
        found: dict[str, dict[str, float]] = {}
        yield from _engine(size, model, work, found, context)
        measure.free()
        for weights in (torch.bfloat16, torch.float32):
            yield from _peer(size, model, work, found, weights, context)
            measure.free()


def _engine(
    size: str, model: Path, work: dict[str, Sides], found: dict[str, dict[str, float]], context: Context
) -> Iterator[Result]:
    settings = zero.settings_of(context).model_copy(update={"model": str(model)})
    engine = zero.engine_of(settings, context)
    for name, sides in work.items():
        texts = [*sides[0], *sides[1]]
        laid_out = passes(engine.encoder, texts, None)
        counted = Workload(engine.encoder)
        for _, layout in laid_out:
            counted.add(layout)
        _, tokens, flops = counted.take().tolist()

        def update(texts: list[Tokens] = texts, laid_out: Any = laid_out, count: int = len(sides[0])) -> float:
            loss = loss_of(*engine.encode(texts, laid_out).tensor_split([count]))
            engine.backward(loss)
            engine.update(1e-4)
            return float(loss.detach())

        yield _timed(f"{size}, engine, {name}", update, found.setdefault(name, {}), context, flops, tokens)
    engine.close()


def _peer(
    size: str,
    model: Path,
    work: dict[str, Sides],
    found: dict[str, dict[str, float]],
    dtype: torch.dtype,
    context: Context,
) -> Iterator[Result]:
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(model), device=context.device, model_kwargs={"dtype": dtype}).train()
    parameters = list(theirs.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=context.device == "cuda")
    low = dtype == torch.bfloat16
    label = "bf16 weights" if low else "fp32 weights, autocast"
    for name, (pairs, passages) in work.items():
        if context.left < 0:
            return
        count = len(passages)
        columns = [_padded(pairs[n : n + count], context) for n in range(0, len(pairs), count)]
        columns.append(_padded(passages, context))

        def precision() -> AbstractContextManager[Any]:
            return nullcontext() if low else torch.autocast(context.device, torch.bfloat16)

        def update(columns: list[dict[str, Tensor]] = columns) -> float:
            with precision():
                *queries, last = (_embed(theirs, column, context) for column in columns)
                loss = loss_of(torch.cat(queries), last)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        with precision(), torch.no_grad():
            read = measure.read_by(theirs, lambda columns=columns: [_embed(theirs, c, context) for c in columns])
        title, ours = f"{size}, sentence-transformers, {label}, {name}", found[name]
        try:
            result = _timed(title, update, {}, context, None, read[0], ours)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            yield Result(title, {"note": "does not fit"})
            measure.free()
            continue
        if name == next(iter(work)):
            result.checks["first loss"] = (abs(float(result.figures["first loss"]) / ours["first"] - 1), LOSS)
        result.checks.update(measure.same_ids(read, measure.of_tokens([*pairs, *passages])))
        yield result


def _timed(
    name: str,
    update: Callable[[], float],
    found: dict[str, float],
    context: Context,
    flops: float | None,
    tokens: float,
    ours: dict[str, float] | None = None,
) -> Result:
    """Time a step; compare it with that of the engine."""
    with measure.Peak(context) as peak:
        first = update()
    taken = measure.seconds(update, context, rounds=4, warm_up=2)
    last = update()
    found |= {"taken": taken, "first": first}
    figures = {"tokens": tokens, "step, ms": 1e3 * taken, "tokens/s": tokens / taken, "first loss": first}
    figures |= measure.if_measured(**{"peak, GiB": peak.most}) | (measure.mfu(flops, taken, context) if flops else {})
    if ours is not None:
        figures["sentence-transformers / engine, time"] = taken / ours["taken"]
    return Result(name, {**figures}, {"last loss - first": (last - first, NOISE)})


def loss_of(queries: Tensor, passages: Tensor) -> Tensor:
    """Return multi{P,I}, or uni{P} if there are no pairs under other instructions."""
    if len(queries) > len(passages):
        return steps.loss_of(queries, passages)
    labels = torch.arange(len(queries), device=queries.device)
    return nn.functional.cross_entropy(queries @ passages.T / steps.TEMPERATURE, labels)


def _padded(side: list[Tokens], context: Context) -> dict[str, Tensor]:
    """Return the features of a column: ids padded to its longest text; on a GPU's host in pinned memory."""
    width = max(map(len, side))
    features = {
        "input_ids": torch.tensor([tokens.ids + [0] * (width - len(tokens)) for tokens in side]),
        "attention_mask": torch.tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in side]),
    }
    return {name: values.pin_memory() if context.device == "cuda" else values for name, values in features.items()}


def _embed(theirs: Any, column: dict[str, Tensor], context: Context) -> Tensor:
    features = {name: values.to(context.device, non_blocking=True) for name, values in column.items()}
    embeddings: Tensor = theirs(features)["sentence_embedding"]
    return embeddings.float()
