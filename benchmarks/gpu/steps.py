"""Training steps of one GPU: full weights, LoRA and QLoRA, through the package's encoder, adapters and loss.

A step embeds the pairs of instruction and query and the passages, computes multi{P,I}, back-propagates, clips to norm 1 and
runs AdamW on fp32 master weights. Five I-negatives are shared by all rows. `zero` runs the same texts under DeepSpeed.

MFU is model FLOPs / time / the peak of the data sheet (`training/observability/flops.py`). Activations are what the forward
pass keeps for the backward pass; the plan is that of `infembed plan train`.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.gpu import measure
from benchmarks.gpu.suite import Context, Result, Skipped
from infembed_ray.config.training import Lora
from infembed_ray.modeling import adapters
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout
from infembed_ray.modeling.tokenizer import TextFormat, Tokens
from infembed_ray.planning.memory import saved_bytes
from infembed_ray.training.losses import Negatives, Objective, marginal_loss
from infembed_ray.training.observability.flops import Workload

OBJECTIVE = Objective.parse("multi{P,I}")
TEMPERATURE = 0.05
SHARED = 5
"""I-negatives, the same for all rows."""
TUPLES = 12
"""Rows of a device in the paper: four records of three tuples."""
ONE_PASS = 1 << 40
Sides = tuple[list[Tokens], list[Tokens]]
"""Pairs of instruction and query, and passages."""


class NoTokenizer:
    """Stands in for a tokenizer: the texts are token ids already."""

    pad_token_id = 0


def texts(count: int, vocabulary: int, full: bool = False) -> Sides:
    """Make the texts of a step: each query under its own instruction and under the shared ones, and the passages.

    Args:
        count: rows.
        vocabulary: token ids.
        full: whether every text has the largest length, instead of the published records' mean.

    Returns:
        (1 + SHARED) x count pairs, by instruction, and count passages.
    """
    query, instruction, passage = (0, 0, 0) if full else (measure.QUERY, measure.INSTRUCTION, measure.PASSAGE)
    most = measure.QUERY_LENGTH - (measure.QUERY if full else 40)
    queries = measure.texts(count, query, vocabulary, most=measure.QUERY if full else 40, seed=1)
    own, shared = (measure.texts(n, instruction, vocabulary, most=most, seed=2 + n) for n in (count, SHARED))
    pairs = [Tokens(i.ids + q.ids, "query", len(i)) for i, q in zip(own, queries, strict=True)]
    pairs += [Tokens(i.ids + q.ids, "query", len(i)) for i in shared for q in queries]
    return pairs, measure.texts(count, passage, vocabulary, seed=4)


def loss_of(queries: Tensor, passages: Tensor) -> Tensor:
    """Return multi{P,I} of the embeddings of `texts`."""
    count = len(passages)
    own, others = queries[:count], queries[count:].unflatten(0, (SHARED, count))
    cosines = own @ passages.T
    negatives = {
        "P": Negatives(cosines, ~torch.eye(count, dtype=torch.bool, device=cosines.device)),
        "I": Negatives(torch.einsum("jid,id->ij", others, passages), cosines.new_ones(count, SHARED, dtype=torch.bool)),
    }
    return marginal_loss(OBJECTIVE, cosines.diagonal(), negatives, TEMPERATURE)


class MasterAdamW:
    """AdamW on fp32 copies of parameters in lower precision, as ZeRO keeps them."""

    def __init__(self, parameters: list[nn.Parameter], rate: float = 1e-4) -> None:
        self._low = parameters
        self._gradients = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        self._master = [p.detach().float().clone().requires_grad_() for p in parameters]
        self._adam = torch.optim.AdamW(self._master, lr=rate, weight_decay=0.0, fused=parameters[0].is_cuda)

    def step(self) -> None:
        """Clip to norm 1, update, and round the weights."""
        given = [(g, low.grad) for g, low in zip(self._gradients, self._low, strict=True) if low.grad is not None]
        torch._foreach_copy_(*map(list, zip(*given, strict=True)))
        for low, master, gradient in zip(self._low, self._master, self._gradients, strict=True):
            master.grad = None if low.grad is None else gradient
            low.grad = None
        nn.utils.clip_grad_norm_(self._master, 1.0, foreach=True)
        self._adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self._low, self._master)
        for master in self._master:
            master.grad = None


def step(context: Context) -> Iterator[Result]:
    """Time full steps of a size."""
    encoder = encoder_of(measure.backbone_of(context.argument, context))
    yield from _steps(encoder, context, f"{context.argument} full")


def lora(context: Context) -> Iterator[Result]:
    """Time steps of adapters over a frozen backbone."""
    backbone = measure.backbone_of(context.argument, context)
    adapters.add([backbone], Lora(dropout=0.0))
    yield from _steps(encoder_of(backbone.to(measure.dtype_of(context))), context, f"{context.argument} LoRA")


def qlora(context: Context) -> Iterator[Result]:
    """Load a checkpoint in 4 bits as training does, and time steps of its adapters."""
    if context.device != "cuda":
        raise Skipped("4-bit weights need a CUDA device")
    import bitsandbytes  # noqa: F401  (named if it is missing)

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        backbone = measure.backbone_of(context.argument, context, torch.bfloat16)
        backbone.save_pretrained(path)
        whole = sum(p.nbytes for p in backbone.parameters())
        del backbone
        measure.free()
        measure.tokenizer().save_pretrained(path)
        encoder = InstructionEncoder.from_pretrained(path, device="cuda", dtype=torch.bfloat16, quantized=True)
    held = sum(p.nbytes for p in encoder.parameters())
    adapters.add(encoder.backbones, Lora(dropout=0.0, quantized=True))
    yield Result(f"{context.argument} in 4 bits", {"bytes / bytes in bf16": held / whole})
    yield from _steps(encoder, context, f"{context.argument} QLoRA")


def encoder_of(backbone: nn.Module) -> InstructionEncoder:
    return InstructionEncoder(backbone, NoTokenizer(), "last", TextFormat())


def _steps(encoder: InstructionEncoder, context: Context, name: str) -> Iterator[Result]:
    """Time steps of the paper's batch, of the same at full lengths, and of a larger one, without and with recomputation."""
    optimizer = MasterAdamW([p for p in encoder.parameters() if p.requires_grad])
    if hasattr(encoder, "compile_layers"):  # as the engine of versions that compile
        encoder.compile_layers()
    vocabulary = encoder.backbone.config.vocab_size
    large = TUPLES if context.tiny else 96
    batches = [(TUPLES, False, False), (large, False, False), (TUPLES, not context.tiny, False)]
    batches += [(large, False, True), (TUPLES, not context.tiny, True)]
    encoder.train()
    for count, full, recompute in batches:
        if recompute:
            encoder.checkpoint_activations()
        lengths = f"{measure.QUERY_LENGTH} + {measure.PASSAGE_LENGTH} tokens each" if full else "mean lengths"
        what = f"{name}, {count} tuples, {lengths}{', activation checkpointing' * recompute}"
        if context.left < 0:
            yield Result(what, {"note": "no time left"})
            continue
        try:
            sides = texts(count, vocabulary, full)
            yield _measured(encoder, optimizer, sides, context, what, recompute)
            if context.profile and what == "0.5B full, 12 tuples, mean lengths":
                yield _divided(encoder, optimizer, sides, context)
        except torch.OutOfMemoryError:
            encoder.zero_grad()
            yield Result(what, {"note": "does not fit"})
        measure.free()


def _measured(
    encoder: InstructionEncoder,
    optimizer: MasterAdamW,
    sides: Sides,
    context: Context,
    name: str,
    recompute: bool,
) -> Result:
    """Measure a step. The last of some steps on the same texts must have a lower loss than the first."""
    work = Workload(encoder)
    for _, layout in encoder.lay_out([*sides[0], *sides[1]], ONE_PASS, encoder.device, encoder.dtype):
        work.add(layout)
    slots, tokens, flops = work.take().tolist()
    losses: list[float] = []

    def update() -> None:
        loss = _loss(encoder, sides, list(encoder.layouts([*sides[0], *sides[1]], ONE_PASS)))
        nonlocal kept
        kept = measure.allocated(context) - before
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()

    before = kept = 0.0
    update()  # the optimizer's states exist from here on
    before = measure.allocated(context)
    with measure.Peak(context) as whole:
        update()
    taken = measure.seconds(update, context, rounds=4, warm_up=0)
    figures: dict[str, float | str] = {"tokens": tokens, "step, ms": 1e3 * taken}
    figures["tokens/s"] = tokens / taken
    figures |= measure.mfu(flops, taken, context)
    planned = slots * _planned(encoder, recompute) / measure.GIB
    figures |= measure.if_measured(**{"peak, GiB": whole.most, "kept, GiB": kept, "planned / kept": planned / kept})
    return Result(name, figures, {"last loss - first": (losses[-1] - losses[0], 0.0)})


def _divided(
    encoder: InstructionEncoder,
    optimizer: MasterAdamW,
    sides: Sides,
    context: Context,
) -> Result:
    """Measure the host's time for the parts of a step: medians of five, without waiting for the device between them."""
    names = ("lay-out", "forward", "backward", "optimizer", "rest of the device")
    taken: list[list[float]] = []
    for _ in range(5):
        measure.synchronize(context)
        times = [time.perf_counter()]
        passes = list(encoder.layouts([*sides[0], *sides[1]], ONE_PASS))
        times.append(time.perf_counter())
        loss = _loss(encoder, sides, passes)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        measure.synchronize(context)
        times.append(time.perf_counter())
        taken.append([1e3 * (after - before) for before, after in pairwise(times)])
    medians = map(statistics.median, zip(*taken, strict=True))
    return Result("host's time", {f"{name}, ms": value for name, value in zip(names, medians, strict=True)})


def _loss(encoder: InstructionEncoder, sides: Sides, passes: list[tuple[list[int], Layout]]) -> Tensor:
    order = torch.tensor([row for rows, _ in passes for row in rows]).argsort()
    embeddings = torch.cat([encoder(layout) for _, layout in passes])[order.to(encoder.device)]
    return loss_of(*embeddings.split([len(side) for side in sides]))


def _planned(encoder: InstructionEncoder, recompute: bool) -> float:
    """Return the planner's bytes per token that a forward pass keeps."""
    with torch.device("meta"):
        backbone = type(encoder.backbone)(copy.deepcopy(encoder.backbone.config))  # counting changes its attention
    if adapters.has(encoder.backbones):
        adapters.add([backbone], Lora(dropout=0.0))
    bytes_of = saved_bytes(encoder_of(backbone), encoder.dtype, encoder.compiles_on(encoder.device))
    return bytes_of.checkpointed if recompute else bytes_of.token
