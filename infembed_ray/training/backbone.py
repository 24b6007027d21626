"""The encoder that a run starts from. It does not import DeepSpeed, so that a driver can check the model first."""

from typing import cast

import torch

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling import adapters
from infembed_ray.modeling.checkpoint import Overrides
from infembed_ray.modeling.cross_encoder import CrossEncoder
from infembed_ray.modeling.encoder import InstructionEncoder

_OVERRIDES = Overrides.__annotations__.keys() & TrainSettings.model_fields.keys()
"""Settings that replace what the model says of itself."""


def precision_of(settings: TrainSettings) -> torch.dtype:
    """Return the precision of the passes."""
    return torch.bfloat16 if settings.precision == "bf16" else torch.float32


def load_encoder(
    settings: TrainSettings, device: torch.device | str = "cpu", quantized: bool = False
) -> InstructionEncoder:
    """Load the encoder of a run in fp32, or in bf16 on a GPU if the run computes in it; DeepSpeed keeps fp32 master weights.

    On the device `meta` no weights are read, to check the settings against the model. `quantized` loads the backbone in 4
    bits under the adapters (QLoRA); on export they are merged into the full weights. `head=score` loads a cross-encoder.
    """
    in_passes = torch.device(device).type == "cuda" and not quantized
    dtype = precision_of(settings) if in_passes else torch.float32
    if settings.head == "score":
        return CrossEncoder.load(settings.model, device, dtype, settings.passage_length)
    encoder = InstructionEncoder.from_pretrained(
        settings.model,
        device=device,
        dtype=dtype,
        quantized=quantized,
        **cast(Overrides, {name: getattr(settings, name) for name in _OVERRIDES}),
    )
    if settings.lora is not None:
        adapters.add(encoder.backbones, settings.lora)
    return encoder
