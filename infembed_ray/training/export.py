"""Export of a training checkpoint as a model directory."""

from collections.abc import Mapping
from pathlib import Path

import torch

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling import adapters, pretrained
from infembed_ray.modeling import checkpoint as models
from infembed_ray.modeling.checkpoint_writer import Stored
from infembed_ray.training import deepspeed_compat
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.zero_init import restore_buffers, stored_weights


def export(checkpoint: Path, settings: TrainSettings, path: Path, exclusion_weight: float = 0.0) -> None:
    """Write the fp32 master weights of a training checkpoint, of any ZeRO stage, as a model directory.

    The setting `interpolation` mixes them with the model's own weights, as WiSE-FT does (arXiv 2109.01903). Adapters are
    merged into the weights of the model's files. Without interpolation, and where every parameter is one tensor of these
    files, weights are read and written file by file; otherwise the model is loaded whole. `exclusion_weight` is that of
    the model. InputError if weights are not finite.
    """
    weights = deepspeed_compat.master_weights(checkpoint)
    pretrained.require_finite(f"output={settings.output}", ((name, w.contiguous()) for name, w in weights.items()))
    encoder = load_encoder(settings.model_copy(update={"lora": None}), "meta")
    encoder.exclusion_weight = exclusion_weight
    stored = stored_weights(encoder, models.local(settings.model))
    if stored is None or settings.interpolation < 1:
        _export_whole(weights, settings, path, exclusion_weight)
        return
    restore_buffers(encoder, stored)
    towers = ("backbone.", "passage_backbone.")[: len(encoder.backbones)]
    of_towers = [{n.removeprefix(t): w for n, w in weights.items() if n.startswith(t)} for t in towers]
    if settings.lora is not None:
        adapted = load_encoder(settings, "meta")
        adapted.load_state_dict({name: w.contiguous() for name, w in weights.items()}, strict=False, assign=True)
        adapters.save(adapted.backbones, path / models.ADAPTERS)
        of_towers = list(map(adapters.merged, adapted.backbones, stored.parameters))
    if encoder.interaction is not None:
        own = {name: weights[f"interaction.{name}"].contiguous() for name in encoder.interaction.state_dict()}
        encoder.interaction.load_state_dict(own, assign=True)
    encoder.save_pretrained(path, of_towers)


def _export_whole(weights: Mapping[str, Stored], settings: TrainSettings, path: Path, exclusion_weight: float) -> None:
    encoder = load_encoder(settings)
    encoder.exclusion_weight = exclusion_weight
    frozen = {name for name, parameter in encoder.named_parameters() if not parameter.requires_grad}
    share, own = settings.interpolation, encoder.state_dict()
    trained = {k: w.contiguous() for k, w in weights.items() if k not in frozen}
    if share < 1:  # a new `interaction` has no weights of the model's own
        trained |= {k: torch.lerp(own[k], w, share) for k, w in trained.items() if not k.startswith("interaction.")}
    loaded = encoder.load_state_dict(trained, strict=False)
    mismatched = {*loaded.unexpected_keys, *loaded.missing_keys} - frozen
    assert not mismatched, mismatched
    encoder.save_pretrained(path)
