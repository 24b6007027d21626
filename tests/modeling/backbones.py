"""Tiny random backbones of the families that people use, each with a tokenizer that behaves as theirs does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    Gemma4TextConfig,
    Gemma4TextModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
)

SPECIAL = ["<s>", "</s>", "<pad>"]
DECODERS = ["qwen2", "llama", "llama3", "mistral"]
FAMILIES = ["modernbert", *DECODERS]
_WORDS = "For nurses , in plain words ; no brand names . how is aspirin dosed what does a passage about bread say"
_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def alone(encoder: Any, sequences: Sequence[Any], dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Embed by transformers' eager attention, one text at a time: no packing, no padding, no cache."""
    model = AutoModel.from_pretrained(encoder.source, attn_implementation="eager", dtype=dtype).eval()
    vectors = []
    for tokens in sequences:
        with torch.no_grad():
            states = model(torch.tensor([tokens.ids])).last_hidden_state[0]
        pooled = {"last": states[-1], "mean": states.mean(dim=0), "cls": states[0]}[encoder.pooling]
        vectors.append(torch.nn.functional.normalize(pooled, dim=0))
    return torch.stack(vectors).numpy()


def write(family: str, path: Path) -> str:
    """Write a model of a family as a plain Hugging Face directory; returns it."""
    backend = _byte_level_bpe()
    begin, end = ("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))
    options = {"eos_token": "</s>", "model_max_length": 512}
    if family == "modernbert":
        template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[begin, end])
        backend.post_processor = template
        options |= {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
    elif family == "qwen2":  # begins with nothing, ends with nothing
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        options |= {"pad_token": "<pad>"}
    elif family == "llama3":  # no padding token
        template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[begin])
        backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
        options |= {"bos_token": "<s>"}
    else:  # Llama 2 and Mistral: flags say what is added, padding is on the left
        options |= {"bos_token": "<s>", "padding_side": "left", "add_bos_token": True, "add_eos_token": False}
        options |= {"pad_token": "<pad>"} if family == "mistral" else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    torch.manual_seed(0)
    _model(family, len(tokenizer) + 1).save_pretrained(path)  # Qwen2's class adds a token of its own when it is loaded
    tokenizer.save_pretrained(path)
    if "add_bos_token" in options:
        file = path / "tokenizer_config.json"
        flags = {"add_bos_token": True, "add_eos_token": False}
        file.write_text(json.dumps(json.loads(file.read_text()) | flags))
    return str(path)


def _model(family: str, vocabulary: int) -> torch.nn.Module:
    if family == "modernbert":
        tokens = {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, "cls_token_id": 0, "sep_token_id": 1}
        config = ModernBertConfig(vocab_size=vocabulary, local_attention=16, **_SMALL, **tokens)
        return ModernBertModel(config)
    small = {"vocab_size": vocabulary, "num_key_value_heads": 2, "max_position_embeddings": 512, **_SMALL}
    if family == "gemma4":  # with saved buffers
        heads = {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 1}
        model = Gemma4TextModel(Gemma4TextConfig(**small, **heads))
        for layer in model.layers:
            layer.layer_scalar.fill_(0.5)
        return model
    if family == "qwen2":
        return Qwen2Model(Qwen2Config(**small))
    if family == "mistral":
        return MistralModel(MistralConfig(sliding_window=None, **small))
    return LlamaModel(LlamaConfig(**small))


def _byte_level_bpe() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator([_WORDS] * 8, trainer)
    return backend
