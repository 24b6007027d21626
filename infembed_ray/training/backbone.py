"""The encoder that a run starts from. It does not import DeepSpeed, so that a driver can check the model first."""

from __future__ import annotations

import torch

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling import adapters
from infembed_ray.modeling.encoder import InstructionEncoder


def load_encoder(
    settings: TrainSettings, device: torch.device | str = "cpu", quantized: bool = False
) -> InstructionEncoder:
    """Load the encoder of a run in fp32, or in bf16 on a GPU if the run computes in it; DeepSpeed keeps fp32 master weights.

    Args:
        settings: Settings of the run.
        device: Device to load it to; on `meta`, no weights are read, to check the settings against the model.
        quantized: Whether to quantize the backbone to 4 bits under the adapters (QLoRA). The exported model is not
            quantized: the adapters are merged into the full weights.
    """
    on_gpu = torch.device(device).type == "cuda"
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
        attention_dropout=settings.attention_dropout,
        device=device,
        dtype=torch.bfloat16 if on_gpu and settings.precision == "bf16" and not quantized else torch.float32,
        quantized=quantized,
    )
    if settings.lora is not None:
        adapters.add(encoder.backbones, settings.lora)
    return encoder
