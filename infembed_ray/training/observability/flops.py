"""FLOPs of a training step and peak FLOP/s of devices: the two halves of model FLOPs utilization (MFU).

Model FLOPs (PaLM, arXiv 2204.02311, appendix B): 6 N per token for N weights of linear layers, and 12 d for each attended
pair and layer of width d. Padding, GradCache's second forward pass, recomputed activations and idle passes do not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infembed_ray.modeling.attention.flex import FlexTreeLayout
from infembed_ray.modeling.attention.prefix_tree import TreeLayout
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout, on_device

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
"""GPU name, as torch gives it -> dense TFLOP/s of its tensor cores in bf16, and in fp32 without TF32 (torch's default).

From NVIDIA's data sheets as of November 2025; figures with sparsity are halved.
"""


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a GPU in bf16 or fp32; None if it is not in `PEAKS`."""
    for pattern, bf16, fp32 in PEAKS:
        if re.search(pattern, name):
            return 1e12 * (bf16 if dtype == torch.bfloat16 else fp32)
    return None


@dataclass(frozen=True)
class BackboneFlops:
    """FLOPs of the forward and backward pass over a backbone.

    Attributes:
        token: FLOPs per token in the linear layers: 6 N for N trained weights, 4 N for frozen ones under adapters, which
            need no gradient of their own.
        pair: FLOPs per attended pair of tokens and layer: 12 d.
        windows: Per layer, how far a token attends to either side; None: to the end of the text.
        causal: Whether a token attends only to itself and those before it.
    """

    token: float
    pair: float
    windows: tuple[int | None, ...]
    causal: bool

    @classmethod
    def count(cls, backbone: Any, causal: bool) -> BackboneFlops:
        """Count a Hugging Face backbone, before or after ZeRO-3 divides it, quantized or not.

        Embeddings are lookups and the output of the pooler is not used, so neither counts. Experts that are not linear
        layers of their own are not counted: for a mixture of experts the result is too low.
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
            window -= 1  # a causal window of transformers includes the token itself, a bidirectional one does not
        windows = tuple(window if kind == "sliding_attention" else None for kind in layers)
        return cls(token, 12.0 * width, windows, causal)

    def pairs(self, layout: Layout) -> Tensor:
        """Count the attended pairs of tokens in a forward pass, without padding, summed over the layers."""
        if isinstance(layout, TreeLayout | FlexTreeLayout) and layout.position_ids is not None:
            # A token attends to itself and its ancestors.
            return (layout.position_ids[0, : layout.size] + 1).sum() * len(self.windows)
        lengths = layout.lengths
        pairs = lengths.new_zeros(())
        for reach in set(self.windows):
            beyond = torch.zeros_like(lengths) if reach is None else (lengths - 1 - reach).clamp(min=0)
            before = (lengths * (lengths - 1) - beyond * (beyond + 1)) // 2  # (q, k) with k < q, within reach
            attended = lengths + before * (1 if self.causal else 2)
            pairs = pairs + attended.sum() * self.windows.count(reach)
        return pairs


class Workload:
    """Counts the work of a step from its forward passes.

    The cross-attention of `Interaction II`, one layer beside a whole backbone, is not counted.
    """

    def __init__(self, encoder: InstructionEncoder) -> None:
        self._queries = BackboneFlops.count(encoder.backbone_of("query"), encoder.causal)
        self._passages = BackboneFlops.count(encoder.backbone_of("passage"), encoder.causal)
        self._device = encoder.device
        self._begin()

    def _begin(self) -> None:
        self._slots = self._tokens = 0
        self._flops = 0.0

    def add(self, layout: Layout, idle: bool = False) -> None:
        """Count a pass, whose layout is on the CPU; of an idle one, whose result is ignored, only the slots."""
        self._slots += layout.input_ids.numel()
        if idle:
            return
        backbone = self._passages if layout.side == "passage" else self._queries
        self._tokens += layout.size
        self._flops += layout.size * backbone.token + float(backbone.pairs(layout)) * backbone.pair

    def take(self) -> Tensor:
        """Return slots, tokens and FLOPs, (3,) float64 on the encoder's device, and start counting anew.

        Slots are the places in the input of the passes; tokens are those that hold a token, once for a shared prefix.
        """
        counted = torch.tensor([self._slots, self._tokens, self._flops], dtype=torch.float64)
        self._begin()
        return on_device(counted, self._device)
