"""Memory of a training step by component, as DeepSpeed 0.19 allocates it.

States follow ZeRO (arXiv 1910.02054, section 3.1): 2 + 2 + 12 bytes per parameter in bf16. DeepSpeed differs from the paper:
gradients accumulate in fp32; ZeRO-1 and 2 copy an fp32 model to flat fp32 master weights; gradients travel in a buffer of
`reduce_bucket_size` elements and are copied once more, flat, when it is reduced.

Activations are counted: with flash attention (arXiv 2205.14135), what a backbone saves for its backward pass is linear in the
tokens, so a pass over a few tokens on the meta device gives the bytes per token of any architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.storage.steps import GIB

FLOAT = 4
FRAMEWORK_GIB = 2.5
"""CUDA context, NCCL and cuBLAS buffers per GPU."""
FRAGMENTATION = 0.05
"""Share of the tensors' bytes that the caching allocator loses."""
_MOMENTS = 8
_ALLREDUCE = 500_000_000
"""Elements that ZeRO-0 reduces at once (DeepSpeed's `numel_per_bucket`)."""
_BUCKET = 500_000_000
"""DeepSpeed's default `reduce_bucket_size`."""
_MAX_LIVE = 1_000_000_000
"""DeepSpeed's default `stage3_max_live_parameters`."""

_NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes per weight in NF4 with double quantisation: 4 bits, and the scales of blocks of 64 (QLoRA, arXiv 2305.14314)."""
_TOKENS = 64
"""Tokens of the counted pass."""
_COMPILED = 1.37
"""Counted bytes / those that compiled layers keep: 1.40 to 1.42 for Qwen2.5 of 0.5B to 3B and 1.33 for 7B with LoRA on an H200."""
_ATTENTION = "counted"


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model: P and T parameters, those of the largest tensor, bytes of the frozen ones, and b per trained one."""

    parameters: int
    trained: int
    largest: int
    frozen_bytes: float
    nbytes: int
    mixed: bool = False  # whether the first weights are kept, for a `validation` of those of `interpolation`

    @property
    def whole(self) -> float:
        """Bytes of all parameters on one worker."""
        return self.trained * self.nbytes + self.frozen_bytes

    @property
    def largest_trained(self) -> int:
        """An upper bound of the parameters of the largest trained tensor: `largest` counts frozen ones too."""
        return min(self.largest, self.trained)

    def at_start(self, workers: int, stage: int) -> float:
        """Bytes on one GPU while the model is loaded: twice, as it arrives and flat; under ZeRO-3 of its partition only."""
        return 2 * self.whole / workers + self.largest * self.nbytes if stage == 3 else 2 * self.whole

    @classmethod
    def of(cls, encoder: InstructionEncoder, settings: TrainSettings) -> ModelSize:
        """Count the parameters of an encoder, on any device."""
        nbytes = 2 if settings.precision == "bf16" else 4
        quantized = settings.lora is not None and settings.lora.quantized
        linear = {id(m.weight) for m in encoder.modules() if isinstance(m, nn.Linear) and quantized}
        parameters = list(encoder.parameters())
        frozen = [p for p in parameters if not p.requires_grad]
        return cls(
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            largest=max(p.numel() for p in parameters),
            frozen_bytes=sum(p.numel() * (_NF4_BYTES if id(p) in linear else nbytes) for p in frozen),
            nbytes=nbytes,
            mixed=settings.interpolation < 1 and settings.validation is not None,
        )


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one GPU at one moment; the components add up.

    `gradients` and `master` are the worker's fp32 share, `optimizer` Adam's moments, `framework` what is outside the tensors.
    """

    parameters: float = 0.0
    copies: float = 0.0  # of the first and, in a validation, of the trained weights, which `interpolation` mixes
    gradients: float = 0.0
    master: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    communication: float = 0.0
    framework: float = 0.0

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(getattr(self, f.name) for f in fields(self))

    def with_framework(self) -> StepMemory:
        """Add what a GPU holds besides the tensors."""
        return replace(self, framework=FRAMEWORK_GIB * GIB + FRAGMENTATION * self.total)


def step_memory(
    weights: ModelSize, activations: float, workers: int, config: Mapping[str, Any], backward_passes: int = 1
) -> StepMemory:
    """Memory of one GPU at the peak of a step: at the start or the end of the backward pass, or in update and validation.

    Args:
        activations: bytes of `SavedBytes.held`.
        config: the DeepSpeed JSON.
        backward_passes: of a step; the later ones find gradients of the earlier ones.
    """
    zero = config["zero_optimization"]
    stage = zero["stage"]
    optimizer_on, parameters_on = (  # whether they are outside the GPU
        zero.get(key, {}).get("device", "none") != "none" for key in ("offload_optimizer", "offload_param")
    )
    share = workers if stage else 1
    trained = weights.trained / share
    bucket = int(zero.get("reduce_bucket_size", _BUCKET))
    separate_master = not optimizer_on and stage > 0 and not (stage == 3 and weights.nbytes == FLOAT)
    master = trained * FLOAT if separate_master else 0.0
    moments = trained * _MOMENTS if not optimizer_on else 0.0
    if stage == 3:
        live = min(weights.parameters, int(zero.get("stage3_max_live_parameters", _MAX_LIVE)))
        gathered = weights.whole * live / weights.parameters + weights.largest * weights.nbytes
        own = 0.0 if parameters_on else weights.whole / workers
        idle = float(bucket * weights.nbytes)
        flat = float(min(bucket, weights.trained) * weights.nbytes)
        sent = _Gradients(0.0 if optimizer_on else trained * FLOAT, idle, flat, early=True)
    else:
        own, gathered, idle = weights.whole, 0.0, 0.0
        sent = _gradients(weights, stage, workers, optimizer_on, bucket, bool(zero.get("overlap_comm")))
        if optimizer_on:  # the buffer of a gradient on its way to the host
            own += weights.largest_trained * weights.nbytes
    states = StepMemory(own + gathered, kept := weights.whole * weights.mixed, sent.held, master, moments)
    several = backward_passes > 1
    present = sent.held * (sent.early or several) + sent.later * several
    at_first = replace(states, gradients=present, activations=activations, communication=sent.buckets)
    at_last = replace(states, communication=sent.buckets + sent.flat)
    in_update = replace(states, parameters=own, copies=2 * kept, communication=idle)
    return max(at_first, at_last, in_update, key=lambda memory: memory.total)


@dataclass(frozen=True)
class _Gradients:
    """Bytes of the gradients of a step at its end, of the buckets that send them, and of copies at the end.

    `early`: they are there from the first pass on. `later`: bytes of those in lower precision in all passes but the first.
    """

    held: float
    buckets: float
    flat: float
    early: bool = False
    later: float = 0.0


def _gradients(
    weights: ModelSize, stage: int, workers: int, optimizer_on: bool, bucket: int, overlaps: bool
) -> _Gradients:
    """Gradients under ZeRO-0 to 2, as DeepSpeed 0.19 holds them; `optimizer_on`: whether the host holds the optimizer."""
    whole, share, low = weights.trained * FLOAT, weights.trained * FLOAT / workers, weights.nbytes != FLOAT
    nbytes = FLOAT if stage == 1 else weights.nbytes
    buckets, flat = float((1 + overlaps) * bucket * nbytes), float(min(bucket, weights.trained) * nbytes)
    if stage == 0:
        return _Gradients(whole, 0.0, float(min(_ALLREDUCE, weights.trained) * FLOAT))
    if stage == 1 and low and not optimizer_on:
        # The fp32 sum stays from step to step. It is sent as one copy in bf16 while all gradients in bf16 are there.
        half = float(weights.trained * weights.nbytes)
        return _Gradients(whole, 0.0, 2 * half, early=True, later=half)
    if stage == 1 and low:
        return _Gradients(whole + share, buckets, flat)  # all in fp32, and the reduced share
    if low and workers == 1 and not optimizer_on:
        # They are added to their sum without buckets (`deepspeed_compat.lighten`).
        return _Gradients(share, 0.0, 0.0, early=True)
    if low:
        return _Gradients(share, buckets, flat + weights.largest_trained * FLOAT)
    if optimizer_on:
        return _Gradients(whole if stage == 1 else 0.0, buckets, flat)  # ZeRO-2: one at a time
    # At the end the worker's share is copied into one piece.
    return _Gradients(whole if stage == 1 else share, buckets, flat + share)


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per token that a backbone saves for its backward pass: all layers without and with checkpointing, and one."""

    token: float
    checkpointed: float
    layer: float

    def held(self, slots: float, checkpointing: bool) -> float:
        """Return the bytes of graphs over `slots` tokens, with those of the layer in the backward pass."""
        return slots * (self.checkpointed + 2 * self.layer if checkpointing else self.token + self.layer)


class _FlashAttention(torch.autograd.Function):
    """Saves the tensors that a flash-attention kernel saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("only the forward pass is counted")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    return _FlashAttention.apply(query, key, value).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attention)


def saved_bytes(encoder: InstructionEncoder, dtype: torch.dtype, compiled: bool = False) -> SavedBytes:
    """Count what the backbone of an encoder on the meta device saves. Do not use the encoder afterwards.

    `compiled` layers compute parts of the forward pass again; of those with checkpointing, nothing was measured.
    """
    backbone: Any = encoder.backbone.base_model.to(dtype)
    backbone.set_attn_implementation(_ATTENTION)
    backbone.train()
    plain = _count(backbone, dtype)
    encoder.checkpoint_activations()
    checkpointed = _count(backbone, dtype)
    kept = plain / _COMPILED if compiled else plain
    return SavedBytes(kept, checkpointed, plain / backbone.config.num_hidden_layers)


def _count(backbone: Any, dtype: torch.dtype) -> float:
    """Bytes per token of the saved storages, each counted once, without the model's own."""
    own = {t.untyped_storage()._cdata for t in [*backbone.parameters(), *backbone.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.zeros((1, _TOKENS), dtype=torch.long)
        caching = {"use_cache": False} if hasattr(backbone.config, "use_cache") else {}
        states = backbone(input_ids=ids, attention_mask=torch.ones_like(ids), **caching).last_hidden_state
    assert states.dtype == dtype
    return sum(storage.nbytes() for storage in storages.values()) / _TOKENS
