"""Export of a training checkpoint as a model directory."""

from __future__ import annotations

from pathlib import Path

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling import checkpoint as models
from infembed_ray.training import deepspeed_compat
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.zero_init import restore_buffers, sources_of

_ENCODER = "encoder."
"""Prefix of the encoder's parameters in `engine.Trained`."""


def export(checkpoint: Path, settings: TrainSettings, path: Path) -> None:
    """Write the fp32 master weights of a training checkpoint, of any ZeRO stage, as a model directory.

    Where every trained parameter is one tensor of the model's files, they are read and written file by file. Otherwise, as
    with adapters, which are merged into the backbone, the model is loaded whole.

    Args:
        checkpoint: Directory that `Engine.save` wrote.
        settings: Settings of the run.
        path: Directory of the model.
    """
    found = deepspeed_compat.master_weights(checkpoint)
    weights = {name.removeprefix(_ENCODER): w for name, w in found.items() if name.startswith(_ENCODER)}
    if settings.lora is None:
        encoder = load_encoder(settings, "meta")
        if sources_of(encoder, models.local(settings.model)) is not None:
            restore_buffers(encoder)
            towers = ("backbone.", "passage_backbone.")[: len(encoder.backbones)]
            of_towers = [{n.removeprefix(t): w for n, w in weights.items() if n.startswith(t)} for t in towers]
            encoder.save_pretrained(path, of_towers)
            return
    encoder = load_encoder(settings)
    frozen = {name for name, parameter in encoder.named_parameters() if not parameter.requires_grad}
    loaded = encoder.load_state_dict({k: w.contiguous() for k, w in weights.items() if k not in frozen}, strict=False)
    mismatched = {*loaded.unexpected_keys, *loaded.missing_keys} - frozen
    assert not mismatched, mismatched
    encoder.save_pretrained(path)
