"""Tiny random rerankers, each with a tokenizer of its kind."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

_TEXTS = [
    "Query: how is aspirin dosed for nurses, in plain words Document: aspirin is a drug Relevant: true false yes no",
    "Is the following passage relevant to the query? Passage: bread is baked from flour and water, no brand names",
] * 8
_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def t5(path: Path) -> str:
    """Write an encoder-decoder; pieces mark word starts by ▁, texts end with </s>."""
    tokenizer = _pieces(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    config = T5Config(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        initializer_factor=3.0,
    )
    return _save(path, T5ForConditionalGeneration, config, tokenizer, eos_token="</s>", pad_token="<pad>")


def llama(path: Path, labels: int = 0) -> str:
    """Write a decoder; texts begin with <s>, without a padding token. With labels, a classifier."""
    tokenizer = _pieces(["<s>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size(), initializer_range=0.3, **_SMALL)
    config.num_labels = max(labels, 1)
    kind = LlamaForSequenceClassification if labels else LlamaForCausalLM
    return _save(path, kind, config, tokenizer, bos_token="<s>", eos_token="</s>")


def byte_level(path: Path) -> str:
    """Write a decoder with a byte-level tokenizer: a rare character is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["yes no yes no", *_TEXTS], trainer)
    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size(), **_SMALL)
    return _save(path, LlamaForCausalLM, config, tokenizer, eos_token="</s>", pad_token="</s>")


def bert(path: Path, labels: int) -> str:
    """Write a sequence classifier over [CLS] query [SEP] passage [SEP]; with 0 labels, without a head."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        _TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    config = BertConfig(vocab_size=tokenizer.get_vocab_size(), initializer_range=0.3, **_SMALL)
    config.num_labels = max(labels, 1)
    kind = BertForSequenceClassification if labels else BertModel
    tokens = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return _save(path, kind, config, tokenizer, model_input_names=inputs, **tokens)


def _pieces(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def _save(path: Path, kind, config, tokenizer: Tokenizer, **tokens) -> str:
    torch.manual_seed(0)
    kind(config).eval().save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **tokens).save_pretrained(path)
    return str(path)


BM25 = {"kind": "bm25", "plain_query": "{query}", "instructed_query": "{instruction} {query}"}


def cross_encoder(root):
    """Write a classifier of one class; return its settings."""
    formats = {"instructed_query": "{query} {instruction}", "plain_query": "{query}"}
    return {"kind": "classifier", "model": bert(root / "cross", 1), **formats}
