"""The encoder to plan for: a model directory or hub model, or a listed architecture without either."""

import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.checkpoint import locate
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.storage import durable
from infembed_ray.training.backbone import load_encoder

VOCABULARY = 4096
"""Words of the stand-in tokenizer; enough that texts rarely share a prefix by chance."""


@cache
def architectures() -> dict[str, dict[str, Any]]:
    """Hub name -> architecture (`config`) and published number of parameters; see backbones.yaml."""
    text = files("infembed_ray.planning").joinpath("backbones.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def load(settings: TrainSettings) -> InstructionEncoder:
    """Load the encoder on the meta device, with the checks of training.

    Raises:
        InputError: there is no such model, or the settings do not fit it.
    """
    architecture = architectures().get(settings.model)
    if architecture is None or Path(settings.model).exists():
        path = locate(settings.model, "model").path
        return load_encoder(settings.model_copy(update={"model": path}), "meta")
    with tempfile.TemporaryDirectory() as directory:
        durable.replace_json(Path(directory) / "config.json", architecture["config"])
        tokenizer = _tokenizer(architecture["config"]["max_position_embeddings"])
        tokenizer.save_pretrained(directory)
        encoder = load_encoder(settings.model_copy(update={"model": directory}), "meta")
        encoder.tokenizer = tokenizer  # transformers would load a class for Qwen2 that splits words
        return encoder


def _tokenizer(positions: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the words w0, w1, ... that splits at spaces; one token per word."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(VOCABULARY))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=positions
    )
