"""A cross-encoder in training. `rerankers.Classifier` and sentence-transformers' `CrossEncoder` load what it saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infembed_ray.errors import InputError
from infembed_ray.modeling import checkpoint, pretrained
from infembed_ray.modeling.attention.packing import first_position
from infembed_ray.modeling.checkpoint_writer import Stored, write_backbone
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout, length_sorted_batches, padded
from infembed_ray.modeling.rerankers import tokenized_pairs
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.storage import durable

PASSAGE_MARK = "\nPassage:\n"
"""Text before a passage under a new head of a decoder, whose tokenizer puts no separator between the two texts."""


class CrossEncoder(InstructionEncoder):
    """Reads a query and a passage together and gives one score: a sequence classifier of transformers with one label.

    A training runs it as an encoder whose texts are pairs and whose vectors are scores. Build it with `load`.
    """

    @classmethod
    def load(cls, model: str, device: str | torch.device, dtype: torch.dtype, length: int | None) -> CrossEncoder:
        """Load a backbone under a new, random head of one label, or a classifier of one label with its own.

        Args:
            model: directory, URI of a folder in an object store, or hub name.
            device, dtype: device and precision of the parameters; on `meta` no weights are read.
            length: maximum tokens of a pair; None: the model's own, else 512. Never more than the backbone has positions.

        Raises:
            InputError: no such model, a classifier of several classes, separate encoders, or an encoder-decoder.
        """
        with_weights, setting = torch.device(device).type != "meta", f"model={model}"
        path = checkpoint.local(model, with_weights=with_weights)
        tower, *others = checkpoint.describe(path, with_pooling=False).towers
        if others:
            raise InputError.of("model", model, "has separate encoders", "give a backbone that reads both texts")
        config, tokenizer = (part(path, setting, tower) for part in (pretrained.config, pretrained.tokenizer))
        pretrained.require_one_backbone(config, model, "give an encoder or a decoder, such as BERT or Qwen2")
        is_classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
        if is_classifier and config.num_labels != 1:
            fault = f"is a classifier of {config.num_labels} classes"
            raise InputError.of("model", model, fault, "give a backbone, or a reranker of one class")
        config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id  # by which a decoder's head finds the end
        options = {"subfolder": tower, "config": config, "dtype": dtype}
        kind = "AutoModelForSequenceClassification"
        classifier = pretrained.weights(kind, path, setting, not is_classifier, with_weights, **options)
        pretrained.require_embedded(tokenizer, classifier, setting)
        positions = getattr(config, "max_position_embeddings", 10**9) - first_position(classifier.base_model)
        text = checkpoint.pair_format(path)
        most = min(length or text.passage_length, tokenizer.model_max_length, positions)
        encoder = cls(classifier, tokenizer, "cls", replace(text, passage_length=most)).to(device)
        if encoder.causal and not is_classifier:
            encoder.text = replace(encoder.text, passage_prefix=PASSAGE_MARK)
        return encoder

    def tokenize_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Tokens]:
        """Tokenize (query with its instruction, passage) pairs as `rerankers.Classifier` does, to `passage_length`."""
        rows = tokenized_pairs(self.tokenizer, pairs, self.text)
        return [Tokens(row["input_ids"], segments=row.get("token_type_ids", ())) for row in rows]

    def lay_out(
        self, sequences: Sequence[Tokens], batch_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> Iterator[tuple[list[int], Layout]]:
        """As `InstructionEncoder.lay_out`, padded: the heads of transformers find a text's place by its row."""
        for rows in length_sorted_batches(list(map(len, sequences)), batch_tokens):
            yield rows, padded([sequences[row] for row in rows], self._pad_id)

    @property
    def _reads_trees(self) -> bool:
        return False

    def forward(self, layout: Layout) -> Tensor:
        """Score the pairs of a layout: (pairs,) logits, in fp32 at least."""
        inputs = layout.backbone_inputs(self.backbone) | ({"use_cache": False} if self.causal else {})
        logits: Tensor = self.backbone(**inputs).logits[:, 0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def save_pretrained(self, path: str | Path, weights: Sequence[Mapping[str, Stored]] | None = None) -> None:
        """Write a directory of `AutoModelForSequenceClassification`; its scores are the logits, not their sigmoids.

        InputError if parameters are not finite.
        """
        pretrained.require_finite(f"path={path}", self.named_parameters())
        config: Any = self.backbone.config
        config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
        length, given = self.text.passage_length, weights[0] if weights else None
        write_backbone(Path(path), self.backbone, self.tokenizer, length, given)
        own = {"passage_length": length, "passage_prefix": self.text.passage_prefix}
        durable.replace_json(Path(path) / checkpoint.OWN_CONFIG, {"head": "score"} | own)
