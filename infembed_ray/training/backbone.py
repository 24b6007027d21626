"""The encoder that a run starts from. Without DeepSpeed, so that a driver can look at it before any work."""

from __future__ import annotations

import torch

from infembed_ray.config import TrainSettings
from infembed_ray.modeling import adapters
from infembed_ray.modeling.encoder import InstructionEncoder


def load_encoder(
    settings: TrainSettings, device: torch.device | str = "cpu", quantized: bool = False
) -> InstructionEncoder:
    """The encoder of a run, in fp32: DeepSpeed casts it and keeps fp32 master weights.

    Args:
        settings: of the run.
        device: where it goes; `meta`: no weights are read, for a look at whether all settings fit the model.
        quantized: the backbone in 4 bits, under adapters. What is exported is not: adapters are merged into all bits.
    """
    encoder = InstructionEncoder.from_pretrained(
        settings.model,
        template=settings.template,
        interaction=settings.interaction,
        pooling=settings.pooling,
        query_length=settings.query_length,
        passage_length=settings.passage_length,
        query_prefix=settings.query_prefix,
        passage_prefix=settings.passage_prefix,
        append_eos=settings.append_eos,
        bidirectional=settings.bidirectional,
        share_encoder=settings.share_encoder,
        device=device,
        quantized=quantized,
    )
    if settings.lora is not None:
        adapters.add(encoder, settings.lora)
    return encoder
