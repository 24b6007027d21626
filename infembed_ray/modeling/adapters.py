"""Low-rank adapters (LoRA, arXiv 2106.09685), also over a backbone in 4 bits (QLoRA, arXiv 2305.14314)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infembed_ray.config import Lora
from infembed_ray.errors import InputError
from infembed_ray.storage import write_json

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder


def add(encoder: InstructionEncoder, lora: Lora) -> None:
    """Give every backbone adapters, which start as no change at all. Nothing else of the backbone is trained then.

    Raises:
        InputError: the backbone has no layers of the given names.
    """
    from peft import LoraConfig, inject_adapter_in_model

    for backbone in encoder.backbones:
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=list(lora.target_modules) or "all-linear",
        )
        try:
            inject_adapter_in_model(config, backbone)
        except ValueError as error:
            raise InputError(
                f"lora.target_modules={list(lora.target_modules)}: not in this backbone "
                f"({' '.join(str(error).split())[:160]}); name its linear layers, or [] for all"
            ) from error


def has(encoder: InstructionEncoder) -> bool:
    """Are there adapters?"""
    return any(_layers(backbone) for backbone in encoder.backbones)


def save(encoder: InstructionEncoder, path: Path) -> None:
    """Write the adapters alone, as peft does: `PeftModel.from_pretrained(backbone, path)` reads them.

    Those of separate encoders go to the folders `query` and `passage`.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    names = [""] if len(encoder.backbones) == 1 else ["query", "passage"]
    for name, backbone in zip(names, encoder.backbones, strict=True):
        folder = path / name
        folder.mkdir(parents=True, exist_ok=True)
        weights = get_peft_model_state_dict(backbone)
        # The prefix is that of a PeftModel, which these layers have been spared.
        save_file(
            {f"base_model.model.{key}": value.contiguous() for key, value in weights.items()},
            folder / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        config = backbone.peft_config["default"].to_dict()
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        write_json(folder / "adapter_config.json", plain | {"base_model_name_or_path": None, "inference_mode": True})


def merge(encoder: InstructionEncoder) -> None:
    """Put plain layers with the adapters' change in their weights where the adapters were."""
    for backbone in encoder.backbones:
        for name, layer in _layers(backbone):
            layer.merge(safe_merge=True)
            parent, _, own = name.rpartition(".")
            setattr(backbone.get_submodule(parent), own, layer.get_base_layer())
        del backbone.peft_config
        backbone.requires_grad_(True)


def four_bits(device: str | torch.device) -> dict[str, Any]:
    """What `AutoModel.from_pretrained` needs to load a backbone in 4 bits (NF4, double quantisation).

    Raises:
        InputError: no GPU, or no bitsandbytes.
    """
    from importlib.util import find_spec

    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise InputError("lora.quantized=true: needs a CUDA GPU; set gpus_per_worker=1 on one, or lora.quantized=false")
    if find_spec("bitsandbytes") is None:
        raise InputError("lora.quantized=true: bitsandbytes is not installed; pip install 'infembed-ray[qlora]'")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config, "device_map": {"": torch.device(device)}}


def _layers(backbone: nn.Module) -> list[tuple[str, Any]]:
    """Name and module of all layers with adapters."""
    if not hasattr(backbone, "peft_config"):
        return []
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in backbone.named_modules() if isinstance(module, LoraLayer)]
