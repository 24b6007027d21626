"""Local encoders. Code that comes with a model never runs."""

from collections.abc import Sequence

import numpy as np
import torch

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling import checkpoint, pretrained
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.formats import passage_text, query_text


class CheckpointEncoder:
    """An `InstructionEncoder` that reads texts by its own template or by formats. Embeddings are unit vectors.

    `settings` are from `baselines.resolve`, `batch_tokens` bound a forward pass with its padding; InputError if the model
    cannot be loaded or does not fit the settings.
    """

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int | None) -> None:
        self._settings = settings
        self._batch_tokens = batch_tokens
        formatted = settings.instructed_query is not None
        self.encoder = InstructionEncoder.from_pretrained(
            checkpoint.at_revision(settings.model, settings.revision),
            pooling=settings.pooling,
            query_prefix="" if formatted else None,
            passage_prefix="" if settings.passage is not None else None,
            query_length=settings.query_length,
            passage_length=settings.passage_length,
            append_eos=settings.append_eos,
            bidirectional=settings.bidirectional,
            dimensions=settings.dimensions,
            dtype=getattr(torch, settings.dtype),
        )
        if any(backbone.config.is_encoder_decoder for backbone in self.encoder.backbones):
            remedy = "set kind=seq2seq for a reranker, or serve an embedder behind /v1/embeddings and set kind=api"
            fault = "kind=encoder does not load an encoder-decoder model"
            raise InputError.of("model", settings.model, fault, remedy)
        if settings.adapter is not None:
            self.encoder.backbone = pretrained.with_adapters(self.encoder.backbone, settings.adapter)
        if formatted and self.encoder.interaction is not None:
            fault = "reads instruction and query separately, so it cannot use formats"
            raise InputError.of("model", settings.model, fault, "drop instructed_query and plain_query")
        self.encoder.to(device)

    def encode_queries(self, queries: Sequence[Query]) -> np.ndarray:
        """Embed queries with their instructions: (n, d) float32."""
        if self._settings.instructed_query is None:
            texts, instructions = [query.query for query in queries], [query.instruction for query in queries]
            return self.encoder.encode_queries(texts, instructions, batch_tokens=self._batch_tokens)
        formatted = [query_text(self._settings, query) for query in queries]
        return self.encoder.encode_queries(formatted, batch_tokens=self._batch_tokens)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Embed passages: (n, d) float32."""
        formatted = [passage_text(self._settings.passage, text) for text in texts]
        return self.encoder.encode_passages(formatted, batch_tokens=self._batch_tokens)
