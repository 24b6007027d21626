"""Low-rank adapters (LoRA, arXiv 2106.09685), also for a backbone in 4 bits (QLoRA, arXiv 2305.14314)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infembed_ray.config.training import Lora
from infembed_ray.errors import InputError
from infembed_ray.modeling.checkpoint_writer import Stored
from infembed_ray.storage import durable


def add(backbones: Sequence[Any], lora: Lora) -> None:
    """Add adapters to backbones and freeze their other parameters. The embeddings do not change yet.

    Raises:
        InputError: the backbone has no layers with the given names.
    """
    from peft import LoraConfig, inject_adapter_in_model

    for backbone in backbones:
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=list(lora.target_modules) or "all-linear",
        )
        try:
            inject_adapter_in_model(config, backbone)
        except ValueError as error:
            fault = f"not in this backbone ({' '.join(str(error).split())[:160]})"
            remedy = "name its linear layers, or [] for all"
            raise InputError.of("lora.target_modules", list(lora.target_modules), fault, remedy) from error


def has(backbones: Sequence[Any]) -> bool:
    """Return whether the backbones have adapters."""
    return any(_layers(backbone) for backbone in backbones)


def save(backbones: Sequence[Any], path: Path) -> None:
    """Write the adapters in peft's format, for `PeftModel.from_pretrained(backbone, path)`.

    The adapters of separate encoders go to the folders `query` and `passage`.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    names = [""] if len(backbones) == 1 else ["query", "passage"]
    for name, backbone in zip(names, backbones, strict=True):
        folder = path / name
        folder.mkdir(parents=True, exist_ok=True)
        weights = get_peft_model_state_dict(backbone)
        # The prefix of a PeftModel, which does not wrap these layers.
        tensors = {f"base_model.model.{key}": value.contiguous() for key, value in weights.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = backbone.peft_config["default"].to_dict()
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        plain |= {"base_model_name_or_path": None, "inference_mode": True}
        durable.replace_json(folder / "adapter_config.json", plain)


class MergedWeight(NamedTuple):
    """A weight with its adapter, merged when it is read."""

    weight: Stored
    layer: Any

    @torch.no_grad()
    def contiguous(self) -> Tensor:
        """Read it."""
        return self.weight.contiguous() + self.layer.get_delta_weight("default")


def merged(backbone: Any, weights: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the weights of a backbone, by their names without adapters, merged with the adapters of its layers."""
    layers = {f"{name}.weight": layer for name, layer in _layers(backbone)}
    return {name: MergedWeight(weight, layers[name]) if name in layers else weight for name, weight in weights.items()}


def merge(backbones: Sequence[Any]) -> None:
    """Merge the adapters into the weights of their layers, and remove them."""
    for backbone in backbones:
        for name, layer in _layers(backbone):
            layer.merge(safe_merge=True)
            parent, _, own = name.rpartition(".")
            setattr(backbone.get_submodule(parent), own, layer.get_base_layer())
        del backbone.peft_config
        backbone.requires_grad_(True)


def four_bits(device: str | torch.device) -> dict[str, Any]:
    """Return the options of `AutoModel.from_pretrained` for 4 bits; InputError without a GPU or bitsandbytes."""
    from importlib.util import find_spec

    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise InputError("lora.quantized=true: needs a CUDA GPU; set gpus_per_worker=1 on one, or lora.quantized=false")
    if find_spec("bitsandbytes") is None:
        raise InputError("lora.quantized=true: bitsandbytes is not installed; pip install bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config, "device_map": {"": torch.device(device)}}


def _layers(backbone: nn.Module) -> list[tuple[str, Any]]:
    """Return name and module of all layers with adapters."""
    if not hasattr(backbone, "peft_config"):
        return []
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in backbone.named_modules() if isinstance(module, LoraLayer)]
