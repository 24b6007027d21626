"""Load a model directly into the partitions of ZeRO-3: no worker holds more than its partition and one parameter.

The model is built without weights. Worker 0 reads one parameter after the other from the safetensors files, in the run's
precision, and broadcasts it; each worker keeps its part. With `from_pretrained` every worker of a node would hold a
whole model first.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling import adapters, checkpoint, pretrained
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import say
from infembed_ray.training import deepspeed_compat
from infembed_ray.training.backbone import load_encoder, precision_of
from infembed_ray.training.collectives import from_first, world
from infembed_ray.training.deepspeed_config import deepspeed_config
from infembed_ray.training.engine import connect


class StoredWeight(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    name: str

    def contiguous(self) -> Tensor:
        """Read it in fp32."""
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(self.name).float()


class StoredWeights(NamedTuple):
    """All parameters, and the saved buffers such as Gemma's layer scalars, of each backbone in a model's files, by name."""

    parameters: list[dict[str, StoredWeight]]
    buffers: list[dict[str, Tensor]]


def load_for_training(settings: TrainSettings, device: torch.device) -> InstructionEncoder:
    """Load the encoder of a run on this worker; every worker must call it.

    Under ZeRO-3, its parameters are partitioned already. A model whose files do not hold every parameter under its own
    name, or that has the cross-attention of Interaction II, is loaded whole: DeepSpeed partitions it later.
    """
    quantized = settings.lora is not None and settings.lora.quantized
    if settings.zero_stage < 3 or quantized:
        return load_encoder(settings, device, quantized=quantized)
    encoder = load_encoder(settings.model_copy(update={"lora": None}), "meta")
    if encoder.interaction is not None:
        return load_encoder(settings, device)
    connect(settings)
    stored = from_first(stored_weights(encoder, checkpoint.local(settings.model)) if world()[0] == 0 else None)
    if stored is None:
        if world()[0] == 0:
            lacks = "every parameter" + " (a new head is in none)" * (settings.head == "score")
            say(f"train: model={settings.model}: its files do not have {lacks}, so each worker loads it whole")
        return load_encoder(settings, device)
    restore_buffers(encoder, stored)
    _partition(encoder, stored, settings, device)
    encoder.to(device)
    if settings.lora is not None:
        adapters.add(encoder.backbones, settings.lora)
    return encoder


def stored_weights(encoder: InstructionEncoder, model: str) -> StoredWeights | None:
    """Return what a model's files have of the backbones of an encoder on the meta device; None if a parameter is missing."""
    towers = checkpoint.describe(model, with_pooling=False).towers
    stored = StoredWeights([], [])
    for number, backbone in enumerate(encoder.backbones):
        shapes: dict[StoredWeight, tuple[int, ...]] = {}
        for path in pretrained.weight_files(model, towers[min(number, len(towers) - 1)]):
            with safe_open(path, "pt") as file:
                names = sorted(file.keys())
                shapes |= {StoredWeight(path, name): tuple(file.get_slice(name).get_shape()) for name in names}
        prefix = f"{backbone.base_model_prefix}."  # of a head's files, and of a classifier's parameters
        by_name = {w.name.removeprefix(prefix): w for w in shapes}
        own = {n: by_name[short] for n in backbone.state_dict() if (short := n.removeprefix(prefix)) in by_name}
        parameters = dict(backbone.named_parameters(remove_duplicate=False))  # tied ones are loaded whole
        if any(name not in own or shapes[own[name]] != p.shape for name, p in parameters.items()):
            return None
        stored.parameters.append({name: own[name] for name in parameters})
        stored.buffers.append({name: own[name].contiguous() for name, _ in backbone.named_buffers() if name in own})
    return stored


def restore_buffers(encoder: InstructionEncoder, stored: StoredWeights) -> None:
    """Replace buffers on the meta device by those of the model's files, or as built, such as rotary frequencies."""
    for backbone, saved in zip(encoder.backbones, stored.buffers, strict=True):
        with init_empty_weights(include_buffers=False):
            built = type(backbone)._from_config(backbone.config)
        for name, buffer in built.named_buffers():
            module, _, own = name.rpartition(".")
            backbone.get_submodule(module)._buffers[own] = saved.get(name, buffer).to(buffer.dtype)


def _partition(
    encoder: InstructionEncoder, stored: StoredWeights, settings: TrainSettings, device: torch.device
) -> None:
    dtype = precision_of(settings)
    partition = deepspeed_compat.partitioner(deepspeed_config(settings), dtype)
    in_order = [weight for of_backbone in stored.parameters for weight in of_backbone.values()]
    with ExitStack() as opened:
        paths = {weight.path for weight in in_order} if world()[0] == 0 else ()
        files = {path: opened.enter_context(safe_open(path, "pt")) for path in paths}
        faults: list[str] = []
        for parameter, (path, name) in zip(encoder.parameters(), in_order, strict=True):
            if files:
                value = files[path].get_tensor(name).to(device, dtype)
                faults += [] if pretrained.is_finite(value) else [name]
            else:
                value = torch.empty(parameter.shape, dtype=dtype, device=device)
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(value))
            del value
            partition(parameter)
    if faults := from_first(faults):  # only now, because every parameter is a collective
        raise pretrained.not_finite(f"model={settings.model}", faults)
