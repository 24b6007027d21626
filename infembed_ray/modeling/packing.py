"""Packed sequences: texts one after the other in one row, no padding, each attending to itself only.

Positions start anew with every text. What tells the texts apart is not a mask (its size would be the square of the
row's) but where each of them starts, handed to the attention function as transformers hands it to the kernels of
flash-attention: `cu_seq_lens_q`, and so on. Linear layers, norms and activations see one dense row of real tokens.

The attention function is registered with transformers under `ATTENTION`. Which kernel it calls for a packed row:

    CUDA, bf16 or fp16, no attention dropout    torch's variable-length flash-attention, one call
    anything else                               SDPA without mask, one call for each run of texts of equal length

Texts are packed longest first, so such runs are the rule where there are many, and a view of the row serves as a batch
of them: nothing is copied, no pad token is read. Rows that are not packed go to transformers' own SDPA function.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from infembed_ray.errors import InputError
from infembed_ray.modeling.layout import Layout, Tokens

if TYPE_CHECKING:
    from infembed_ray.modeling.prefix_cache import Branches
    from infembed_ray.modeling.prefix_tree import Trees

ATTENTION = "packed_sdpa"
_ATTENDED_AS_GIVEN = {"full_attention", "sliding_attention"}


def packed(sequences: Sequence[Tokens], first_position: int = 0) -> Layout:
    """Texts one after the other in one row, longest first where they come so.

    Args:
        sequences: texts of one side.
        first_position: of every text; see `first_position`.
    """
    lengths = [len(s) for s in sequences]
    ids = torch.tensor([[token for s in sequences for token in s.ids]])
    positions = torch.cat([torch.arange(first_position, first_position + length) for length in lengths])
    return Layout(
        ids,
        None,
        torch.arange(ids.shape[1]),
        torch.tensor(lengths),
        sequences[0].side,
        position_ids=positions.unsqueeze(0),
    )


def boundaries(lengths: Tensor) -> dict[str, Any]:
    """Where the texts of a packed row start and end, as transformers' attention functions are told."""
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def enable_packing(backbone: Any) -> bool:
    """Let a Hugging Face model read packed rows; False, and nothing done, where it would not read them exactly.

    It must hand its attention functions what it is given and attend in every layer as those are told (no position
    bias, no chunks, no recurrence), which is what transformers asks of models for flash-attention too.
    """
    config = backbone.config
    able = (
        getattr(backbone, "_supports_flash_attn", False)
        and getattr(backbone, "_supports_attention_backend", False)
        and config._attn_implementation == "sdpa"
        and "position_ids" in inspect.signature(backbone.forward).parameters
        and set(getattr(config, "layer_types", None) or ()) <= _ATTENDED_AS_GIVEN
        and getattr(config, "attention_chunk_size", None) is None
    )
    if able:
        backbone.set_attn_implementation(ATTENTION)
    return bool(able)


def packing_pays(device: torch.device, dtype: torch.dtype, drops: bool) -> bool:
    """Are packed rows faster than padded ones? On CPU, and where CUDA has one kernel for them; see the module.

    Args:
        device, dtype: of the backbone.
        drops: there is attention dropout, which that kernel does not know.
    """
    if device.type == "cuda":
        return not drops and dtype in (torch.bfloat16, torch.float16) and _varlen_attention() is not None
    return device.type == "cpu"


def first_position(backbone: nn.Module) -> int:
    """The position of a text's first token: 0, but padding_idx + 1 in RoBERTa's family."""
    for module in backbone.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and isinstance(getattr(module, "position_embeddings", None), nn.Embedding):
            return padding + 1
    return 0


def compile_layers(backbone: nn.Module) -> None:
    """Compile the layers of a Hugging Face model by torch.compile, but not `attention`.

    Which kernels that one calls, and how often, depends on the lengths of the texts in a row: each row would be
    compiled anew. Dropout draws what it draws uncompiled, so that a pass repeated with a graph drops the same.

    Raises:
        InputError: the model is not made of layers as transformers builds them.
    """
    layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise InputError(f"compile=true: {type(backbone).__name__} has no layers that compile one by one; set false")
    AttentionInterface.register(ATTENTION, torch.compiler.disable(attention))
    for layer in layers:
        layer.compile(dynamic=True, options={"fallback_random": True})


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    trees: Trees | None = None,
    branches: Branches | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row, or of any other (see transformers' AttentionInterface).

    Args:
        module: the attention layer.
        query, key, value: (rows, heads, width, head size), of keys and values maybe fewer heads.
        attention_mask: of rows that are not packed.
        dropout: of the attention weights.
        scaling: of the products of queries and keys; None: 1 / sqrt(head size).
        is_causal: None: as the layer and its config say.
        sliding_window: a token may attend those less than so many places away; None: all.
        cu_seq_lens_q: (texts + 1,) where the texts of the one row start and end; None: the row is not packed.
        max_length_q: tokens of the longest text.
        trees: of a row of prefix trees.
        branches: of a row of texts that follow encoded prefixes.

    Returns:
        (rows, width, heads, head size), and None for the weights.
    """
    if is_causal is None:
        config = getattr(module, "config", None)
        is_causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True) is not False
    if sliding_window is not None and not is_causal:
        # As transformers' masks have it: backwards the window holds the token itself, to both sides it does not.
        sliding_window = cast(Any, module).config.sliding_window + 1
    shared = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
    if trees is not None:
        return trees.attend(module, query, key, value, **shared)
    if branches is not None:
        return branches.attend(module, query, key, value, **shared)
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **shared)
    if query.is_cuda and dropout == 0 and query.dtype in (torch.bfloat16, torch.float16) and _varlen_attention():
        window = -1 if sliding_window is None else sliding_window - 1
        states = _varlen_attention()(
            *(t.squeeze(0).transpose(0, 1) for t in (query, key, value)),
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(window, 0 if is_causal else window),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return states.unsqueeze(0), None
    runs = [(length, len(list(same))) for length, same in groupby(cu_seq_lens_q.diff().tolist())]
    sizes = [length * count for length, count in runs]
    parts = zip(runs, *(t.squeeze(0).split(sizes, dim=1) for t in (query, key, value)), strict=True)
    attended = []
    for (length, count), *states in parts:
        batch = [s.unflatten(1, (count, length)).transpose(0, 1) for s in states]  # (count, heads, length, head size)
        mask = _window(length, sliding_window, is_causal, query.device)
        attended.append(sdpa_attention_forward(module, *batch, mask, **shared)[0].flatten(0, 1))
    return torch.cat(attended).unsqueeze(0), None


def _window(length: int, window: int | None, is_causal: bool, device: torch.device) -> Tensor | None:
    """(1, 1, length, length) bool mask of a sliding window; None where all of a text lies within it."""
    if window is None or length <= window:
        return None
    ahead = torch.arange(length, device=device)
    ahead = ahead.unsqueeze(1) - ahead
    near = (ahead < window) & ((ahead >= 0) if is_causal else (ahead > -window))
    return near[None, None]


def _varlen_attention() -> Any:
    """torch's variable-length flash-attention; None before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """No mask for packed rows, the only ones that come without; for the others that of SDPA."""
    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **options)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, _mask)
