"""Floating-point operations that a training step needs, and what devices can do a second: the two halves of MFU.

Model FLOPs (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B): a multiply and an add for each weight of a linear
layer and token forwards, twice that backwards, which is 6 N a token; and 12 d for each attended pair and layer of width
d = heads x head size, of which PaLM writes 12 L d T a token. What an implementation does beyond that is not useful work:
padding, tokens that a shared prefix spares, GradCache's second forward pass, recomputed activations, passes for nobody.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout

PEAKS: tuple[tuple[str, float, float], ...] = (
    (r"\bB200\b", 2250, 75),
    (r"\bH200\b", 989, 67),
    (r"\bGH200\b", 989, 67),
    (r"\bH100 NVL\b", 835, 60),
    (r"\bH100 PCIe\b", 756, 51),
    (r"\bH100\b", 989, 67),
    (r"\bA100\b", 312, 19.5),
    (r"\bA30\b", 165, 10.3),
    (r"\bA10\b", 125, 31.2),
    (r"\bL40S\b", 362, 91.6),
    (r"\bL4\b", 121, 30.3),
)
"""Name of a GPU, as torch gives it -> dense TFLOP/s of its tensor cores in bf16, and in fp32 without TF32 (torch's
default). NVIDIA's data sheets as of November 2025, of which those that give figures with sparsity are halved."""


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s at most of the GPU of that name, in bf16 or fp32; None if it is not in `PEAKS`."""
    for pattern, bf16, fp32 in PEAKS:
        if re.search(pattern, name):
            return 1e12 * (bf16 if dtype == torch.bfloat16 else fp32)
    return None


@dataclass(frozen=True)
class BackboneFlops:
    """What a training step's forward and backward pass over a backbone costs.

    Attributes:
        token: FLOPs a token, of the linear layers: 6 N where all N of their weights are trained; 4 N for those that are
            frozen under adapters, which need no gradient of their own.
        pair: FLOPs an attended pair of tokens and layer: 12 d.
        windows: of each layer, how far a token attends to either side; None: to the end of the text.
        causal: a token attends only those before it, and itself.
    """

    token: float
    pair: float
    windows: tuple[int | None, ...]
    causal: bool

    @classmethod
    def of(cls, backbone: Any, causal: bool) -> BackboneFlops:
        """Of a Hugging Face backbone; before ZeRO-3 divides it or after, in 4 bits or not.

        Its embeddings are looked up and its pooler's output is not used: neither counts. Nor do experts that are no
        linear layers of their own: of a mixture, this is too little.
        """
        config = backbone.config
        token = 0.0
        for name, module in backbone.named_modules():
            if isinstance(module, nn.Linear) and "pooler" not in name.split("."):
                weights = module.in_features * module.out_features
                token += (6 if module.weight.requires_grad else 4) * weights
        head_size = getattr(config, "head_dim", None)
        width = config.num_attention_heads * head_size if head_size else config.hidden_size
        layers = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        window = getattr(config, "sliding_window", None)
        if window is not None and causal:
            window -= 1  # backwards transformers' windows hold the token itself, to both sides they do not
        return cls(
            token, 12.0 * width, tuple(window if kind == "sliding_attention" else None for kind in layers), causal
        )

    def pairs(self, layout: Layout) -> Tensor:
        """Pairs of tokens that attend one another in a forward pass, padding left out, summed over the layers."""
        if layout.ends is not None and layout.position_ids is not None:  # of a tree: a token and those above it
            return (layout.position_ids + 1).sum() * len(self.windows)
        lengths = layout.lengths
        pairs = lengths.new_zeros(())
        for reach in set(self.windows):
            beyond = torch.zeros_like(lengths) if reach is None else (lengths - 1 - reach).clamp(min=0)
            before = (lengths * (lengths - 1) - beyond * (beyond + 1)) // 2  # (q, k) with k < q, within reach
            attended = lengths + before * (1 if self.causal else 2)
            pairs = pairs + attended.sum() * self.windows.count(reach)
        return pairs


class Workload:
    """What the forward passes of a step hold, and the model FLOPs of the step that they are the forward passes of.

    The cross-attention of `Interaction II`, one layer beside a whole backbone, is left out.
    """

    def __init__(self, encoder: InstructionEncoder) -> None:
        self._queries = BackboneFlops.of(encoder.backbone_of("query"), encoder.causal)
        self._passages = BackboneFlops.of(encoder.backbone_of("passage"), encoder.causal)
        self._device = encoder.device
        self._begin()

    def _begin(self) -> None:
        self._slots = self._tokens = 0
        self._flops = 0.0
        self._attention: list[Tensor] = []  # on the device: to read it would wait for the passes

    def add(self, layout: Layout, idle: bool = False) -> None:
        """Count a pass; an idle one is for nobody, and nothing but slots."""
        self._slots += layout.input_ids.numel()
        if idle:
            return
        tokens = layout.input_ids.numel() if layout.attention_mask is None else layout.tokens.numel()
        backbone = self._passages if layout.side == "passage" else self._queries
        self._tokens += tokens
        self._flops += tokens * backbone.token
        self._attention.append(backbone.pairs(layout) * backbone.pair)

    def take(self) -> Tensor:
        """(3,) float64 on the encoder's device: slots, tokens and FLOPs, counted anew from now on.

        Slots are places in the input of the passes, tokens are those that hold one, of a shared prefix once.
        """
        counted = torch.tensor([self._slots, self._tokens, self._flops], dtype=torch.float64, device=self._device)
        counted[2] += sum(self._attention)
        self._begin()
        return counted
