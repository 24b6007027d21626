"""The encoder to plan for: a model directory or hub model, or a known architecture without either."""

from __future__ import annotations

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

TOKENS_PER_WORD = 1.35
"""Approximate tokens per English word in the vocabularies of the paper's backbones."""
_VOCABULARY = 4096
"""Words of the stand-in tokenizer; enough that texts rarely share a prefix by chance."""


@cache
def architectures() -> dict[str, dict[str, Any]]:
    """Hub name -> architecture (`config`) and published number of parameters; see backbones.yaml."""
    text = files("infembed_ray.planning").joinpath("backbones.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def stands_in(model: str) -> bool:
    """Whether the model is a hub name with a known architecture, which needs neither the hub nor its tokenizer."""
    return model in architectures() and not Path(model).exists()


def load(settings: TrainSettings) -> InstructionEncoder:
    """Load the encoder on the meta device, with the checks of training.

    Raises:
        InputError: there is no such model, or the settings do not fit it.
    """
    if not stands_in(settings.model):
        path = locate(settings.model, "model").path
        return load_encoder(settings.model_copy(update={"model": path}), "meta")
    with tempfile.TemporaryDirectory() as directory:
        config = architectures()[settings.model]["config"]
        durable.replace_json(Path(directory) / "config.json", config)
        tokenizer = _tokenizer(config["max_position_embeddings"])
        tokenizer.save_pretrained(directory)
        encoder = load_encoder(settings.model_copy(update={"model": directory}), "meta")
        encoder.tokenizer = tokenizer  # transformers would load a class for Qwen2 that splits words
        return encoder


def _word(number: int) -> str:
    return f"w{number % _VOCABULARY}"


def _tokenizer(positions: int) -> PreTrainedTokenizerFast:
    """A tokenizer that splits at spaces; one token per word."""
    words = ["<pad>", "<eos>", "<unk>", *map(_word, range(_VOCABULARY))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=positions
    )
