"""Load a model directly into the partitions of ZeRO-3: no worker holds more than its partition and one parameter.

The model is built without weights. Worker 0 reads one parameter after the other from the safetensors files, in the run's
precision, and broadcasts it; each worker keeps its part. With `from_pretrained` every worker of a node would hold a
whole model first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from transformers import AutoModel

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling import adapters, checkpoint
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import say
from infembed_ray.training import deepspeed_compat
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.collectives import from_first, world
from infembed_ray.training.deepspeed_config import deepspeed_config
from infembed_ray.training.engine import connect, precision_of

Source = tuple[Path, str]
"""File of a parameter, and its name there."""


def load_for_training(settings: TrainSettings, device: torch.device) -> InstructionEncoder:
    """Load the encoder of a run on this worker; every worker must call it.

    Under ZeRO-3, its parameters are partitioned already. A model whose files do not hold every parameter under its own
    name, or that has the cross-attention of Interaction II, is loaded whole: DeepSpeed partitions it later.
    """
    quantized = settings.lora is not None and settings.lora.quantized
    if settings.zero_stage < 3 or quantized:
        return load_encoder(settings, device, quantized=quantized)
    encoder = load_encoder(settings.model_copy(update={"lora": None}), "meta")
    connect(settings)
    found = sources_of(encoder, checkpoint.local(settings.model)) if world()[0] == 0 else None
    sources = from_first(found)
    if sources is None:
        if world()[0] == 0:
            say(f"train: model={settings.model}: its files do not have every parameter, so each worker loads it whole")
        return load_encoder(settings, device)
    restore_buffers(encoder)
    _partition(encoder, sources, settings, device)
    encoder.to(device)
    if settings.lora is not None:
        adapters.add(encoder.backbones, settings.lora)
    return encoder


def sources_of(encoder: InstructionEncoder, model: str) -> list[Source] | None:
    """Return where the files of a model have each parameter of an encoder; None if they do not have all of them."""
    if encoder.interaction is not None:
        return None
    towers = checkpoint.describe(model, with_pooling=False).towers
    found: list[Source] = []
    for number, backbone in enumerate(encoder.backbones):
        stored = checkpoint.weight_files(model, towers[min(number, len(towers) - 1)])
        own = {name.removeprefix(f"{backbone.base_model_prefix}."): name for name in stored}
        for name, parameter in backbone.named_parameters():
            if name not in own:
                return None
            source = stored[own[name]], own[name]
            with safe_open(source[0], "pt") as file:
                if tuple(file.get_slice(source[1]).get_shape()) != tuple(parameter.shape):
                    return None
            found.append(source)
    return found


def restore_buffers(encoder: InstructionEncoder) -> None:
    """Replace buffers on the meta device, such as rotary frequencies: files of weights do not have them."""
    for backbone in encoder.backbones:
        with init_empty_weights(include_buffers=False):
            built = AutoModel.from_config(backbone.config)
        for name, buffer in built.named_buffers():
            module, _, own = name.rpartition(".")
            backbone.get_submodule(module)._buffers[own] = buffer


def _partition(
    encoder: InstructionEncoder, sources: Sequence[Source], settings: TrainSettings, device: torch.device
) -> None:
    dtype = precision_of(settings)
    partition = deepspeed_compat.partitioner(deepspeed_config(settings), dtype)
    with ExitStack() as opened:
        paths = {path for path, _ in sources} if world()[0] == 0 else ()
        files = {path: opened.enter_context(safe_open(path, "pt")) for path in paths}
        for parameter, (path, name) in zip(encoder.parameters(), sources, strict=True):
            if files:
                value = files[path].get_tensor(name).to(device, dtype)
            else:
                value = torch.empty(parameter.shape, dtype=dtype, device=device)
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(value))
            del value
            partition(parameter)
