"""Packed sequences: texts one after another in one row, without padding; each attends to itself only.

The attention function is registered with transformers as `ATTENTION`. A layout whose texts share one row gives the
backbone an `attend` function, and the registered function calls it in every layer. Padded rows go to transformers' own
SDPA function. Kernels of a packed row:

    CUDA, bf16 or fp16, no attention dropout    torch's variable-length flash-attention, one call
    anything else                               SDPA without a mask, one call per run of texts of equal length
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from infembed_ray.modeling.layout import Layout, flattened, padded
from infembed_ray.modeling.tokenizer import Tokens

ATTENTION = "packed_sdpa"
_VERIFIED = {"bert", "gemma3_text", "llama", "mistral", "modernbert", "qwen2", "qwen3", "roberta", "xlm-roberta"}
"""Types of models whose packed states the tests compare with padded ones; others are compared once when they are loaded."""
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
Attend = Callable[..., Tensor]
"""Attention of a layout with one row: (module, query, key, value, **options) -> (1, tokens, heads, head size).

Query, key and value are (1, heads, tokens, head size); keys and values may have fewer heads. Options are `is_causal`,
`sliding_window`, `dropout` and `scaling`, as of transformers' SDPA function.
"""


@dataclass(frozen=True)
class PackedLayout(Layout):
    """Texts one after another in a single row.

    Attributes:
        borders: (texts + 1) int32 places where texts start and end.
        longest: tokens of the longest text.
    """

    borders: Tensor = field(kw_only=True)
    longest: int = field(kw_only=True)

    def backbone_inputs(self, backbone: Any) -> dict[str, Any]:
        return super().backbone_inputs(backbone) | {"attend": PackedAttention(self.lengths, self.borders, self.longest)}


@dataclass(frozen=True)
class PackedAttention:
    """Attention within the texts of a packed row (an `Attend`); see `PackedLayout`."""

    lengths: Tensor
    borders: Tensor
    longest: int

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(tokens, texts) of each run of neighbouring texts of equal length."""
        lengths = self.lengths[self.lengths > 0].numpy()
        starts = np.flatnonzero(np.diff(lengths, prepend=0))
        return list(zip(lengths[starts].tolist(), np.diff(starts, append=len(lengths)).tolist(), strict=True))

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        sliding_window: int | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **others: Any,
    ) -> Tensor:
        """Attend by one variable-length kernel where CUDA has it, else run by run."""
        if query.is_cuda and dropout == 0 and query.dtype in (torch.bfloat16, torch.float16) and varlen_attention():
            window = -1 if sliding_window is None else sliding_window - 1
            states = varlen_attention()(
                *(t.squeeze(0).transpose(0, 1) for t in (query, key, value)),
                *(self.borders, self.borders, self.longest, self.longest),
                scale=scaling,
                window_size=(window, 0 if is_causal else window),
                enable_gqa=query.shape[1] != key.shape[1],
            )
            return cast(Tensor, states).unsqueeze(0)
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
        sizes = [length * count for length, count in self.runs]
        parts = zip(self.runs, *(t.squeeze(0).split(sizes, dim=1) for t in (query, key, value)), strict=True)
        attended = []
        for (length, count), *states in parts:
            batch = [s.unflatten(1, (count, length)).transpose(0, 1) for s in states]  # (count, heads, length, size)
            mask = _window(length, sliding_window, is_causal, query.device)
            attended.append(sdpa_attention_forward(module, *batch, mask, **options)[0].flatten(0, 1))
        return torch.cat(attended).unsqueeze(0)


def packed(sequences: Sequence[Tokens], first_position: int | Sequence[int] = 0) -> PackedLayout:
    """Lay out texts of one side, best longest first, one after another in one row.

    `first_position` is the position of the first token: of all texts (see the function `first_position`) or of each.
    """
    ids, lengths = flattened(sequences)
    borders = np.concatenate([[0], lengths.cumsum()])
    places = np.arange(borders[-1])
    return PackedLayout(
        input_ids=torch.from_numpy(ids).unsqueeze(0),
        attention_mask=None,
        tokens=torch.from_numpy(places),
        lengths=torch.from_numpy(lengths),
        side=sequences[0].side,
        position_ids=torch.from_numpy(places + np.repeat(first_position - borders[:-1], lengths)).unsqueeze(0),
        borders=torch.from_numpy(borders.astype(np.int32)),
        longest=int(lengths.max()),
    )


def enable_packing(backbone: Any) -> bool:
    """Let a Hugging Face model read packed rows; return False, and leave it as it is, if it cannot read them exactly.

    Tokens may depend on each other by attention only, as transformers asks of models for flash-attention.
    """
    config = backbone.config
    able = (
        getattr(backbone, "_supports_flash_attn", False)
        and getattr(backbone, "_supports_attention_backend", False)
        and config._attn_implementation == "sdpa"
        and "position_ids" in inspect.signature(backbone.forward).parameters
        and set(getattr(config, "layer_types", None) or ()) <= _SUPPORTED_LAYERS
        and getattr(config, "attention_chunk_size", None) is None
    )
    if able:
        backbone.set_attn_implementation(ATTENTION)
        able = config.model_type in _VERIFIED or _packs_exactly(backbone)
        if not able:
            backbone.set_attn_implementation("sdpa")
    return bool(able)


@torch.inference_mode()
def _packs_exactly(backbone: Any) -> bool:
    """Compare packed with padded states of two texts, one of them longer than a window of up to 256 tokens."""
    backbone = backbone.base_model  # without a head
    embeddings, config = backbone.get_input_embeddings().weight, backbone.config
    if embeddings.is_meta:
        return True
    pad, many = getattr(config, "pad_token_id", None) or 0, min(getattr(config, "sliding_window", None) or 0, 256) + 16
    ids = [token for token in (place % len(embeddings) for place in range(many)) if token != pad]
    texts, states = [Tokens(ids), Tokens(ids[:5])], []
    for layout in (packed(texts, first_position(backbone)), padded(texts, pad)):
        on = layout.to(embeddings.device)
        states.append(backbone(**on.backbone_inputs(backbone)).last_hidden_state.flatten(0, 1)[on.tokens].float())
    tolerance = 1e-3 if embeddings.dtype == torch.float32 else 5e-2
    return bool((states[0] - states[1]).abs().max() <= tolerance * states[1].std())


def packing_pays(device: torch.device, dtype: torch.dtype, drops: bool) -> bool:
    """Return whether packed rows are faster than padded ones: on a CPU, and with one CUDA kernel for a row.

    The CUDA kernel does not support attention dropout (`drops`).
    """
    if device.type == "cuda":
        return not drops and dtype in (torch.bfloat16, torch.float16) and varlen_attention() is not None
    return device.type == "cpu"


def first_position(backbone: nn.Module) -> int:
    """Return the position of a text's first token: 0, or padding_idx + 1 in the RoBERTa family."""
    for module in backbone.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and isinstance(getattr(module, "position_embeddings", None), nn.Embedding):
            return padding + 1
    return 0


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attend: Attend | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend by the layout's own function, or by SDPA (see transformers' AttentionInterface).

    Args:
        query, key, value: (rows, heads, width, head size); keys and values may have fewer heads.
        attend: attention of a layout with one row.
        is_causal: None: as the layer and its config say.
        options: `dropout` and `scaling`, as of transformers' SDPA function.

    Returns:
        (rows, width, heads, head size), and None for the weights.
    """
    if is_causal is None:
        config = getattr(module, "config", None)
        is_causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True) is not False
    if attend is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=is_causal, **options)
    if sliding_window is not None and not is_causal:
        # As in transformers' masks: a causal window includes the token itself, a bidirectional one does not, but Gemma 3's.
        inclusive = getattr(cast(Any, module).config, "use_bidirectional_attention", False)
        sliding_window = cast(Any, module).config.sliding_window + (not inclusive)
    return attend(module, query, key, value, is_causal=is_causal, sliding_window=sliding_window, **options), None


def _window(length: int, window: int | None, is_causal: bool, device: torch.device) -> Tensor | None:
    """Return the (1, 1, length, length) bool mask of a sliding window; None if the whole text lies within it."""
    if window is None or length <= window:
        return None
    ahead = torch.arange(length, device=device)
    ahead = ahead.unsqueeze(1) - ahead
    near = (ahead < window) & ((ahead >= 0) if is_causal else (ahead > -window))
    return near[None, None]


@cache
def varlen_attention() -> Any:
    """Return torch's variable-length flash-attention; None before torch 2.11, which has no windows.

    torch 2.11 takes fewer heads of keys than of queries without the argument `enable_gqa` of later versions.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    accepted = inspect.signature(varlen_attn).parameters
    if "window_size" not in accepted:
        return None
    if "enable_gqa" not in accepted:
        return lambda *states, enable_gqa, **options: varlen_attn(*states, **options)
    return varlen_attn


def _mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Return no mask for layouts with one row, which come without; else that of SDPA."""
    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **options)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, _mask)
