"""What autograd keeps of a forward pass, counted on the meta device rather than estimated by a formula of each family.

All that a backbone saves for its backward pass grows with the number of tokens, where attention is computed by a kernel
of the flash kind: that saves queries, keys, values, output and one number a token and head, and never the weights
(FlashAttention, arXiv 2205.14135; the linear terms of Korthikanti et al., arXiv 2205.05198, section 4.1, are such
counts for one family). So one pass over a few tokens, without weights and without arithmetic, says it for any number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from infembed_ray.modeling.encoder import InstructionEncoder

_TOKENS = 64
_ATTENTION = "counted"


@dataclass(frozen=True)
class Saved:
    """Bytes that a backbone saves for its backward pass.

    Attributes:
        token: of each token, all layers together.
        checkpointed: the same under activation checkpointing.
        layer: of each token, by one layer: what checkpointing computes anew, and what a backward pass has in hand.
    """

    token: float
    checkpointed: float
    layer: float


class _Kernel(torch.autograd.Function):
    """Saves what a flash kernel saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("nothing is computed on the meta device")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    return _Kernel.apply(query, key, value).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attention)


def saved(encoder: InstructionEncoder, dtype: torch.dtype) -> Saved:
    """Count what the backbone of an encoder on the meta device saves. It is of no other use afterwards.

    Args:
        encoder: with its adapters, if it has any.
        dtype: that the backbone computes in.
    """
    backbone: Any = encoder.backbone.to(dtype)
    backbone.set_attn_implementation(_ATTENTION)
    backbone.train()
    plain = _count(backbone, dtype)
    encoder.checkpoint_activations()
    checkpointed = _count(backbone, dtype)
    return Saved(plain, checkpointed, plain / backbone.config.num_hidden_layers)


def _count(backbone: Any, dtype: torch.dtype) -> float:
    """Bytes a token: storages that are saved, each once, but for the model's own."""
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
