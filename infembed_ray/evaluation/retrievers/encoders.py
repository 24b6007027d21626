"""Local encoders: checkpoints through `InstructionEncoder`, others through sentence-transformers.

sentence-transformers serves models with modules of its own (Dense layers: INSTRUCTOR). Code that comes with a model never
runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling import checkpoint, pretrained
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.formats import passage_text, query_format, query_text, split


class CheckpointEncoder:
    """An `InstructionEncoder` that reads texts by its own template or by formats. Embeddings are unit vectors.

    `settings` are from `baselines.resolve`, `batch_tokens` bound a forward pass with its padding; InputError if the model
    cannot be loaded or does not fit the settings.
    """

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int, identity: str) -> None:
        self.identity = identity
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
            raise InputError.of(
                "model",
                settings.model,
                "kind=encoder does not load an encoder-decoder model",
                "set kind=sentence_transformers if that library made it an embedder, or kind=seq2seq for a reranker",
            )
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


class SentenceTransformersEncoder:
    """A model that sentence-transformers loads, with our prompts. Embeddings are unit vectors, except of a model whose own
    similarity is the inner product.

    Args and errors are those of `CheckpointEncoder`; the prompt is pooled as the model describes it.
    """

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int, identity: str) -> None:
        self.identity = identity
        self._settings = settings
        self._batch_tokens = batch_tokens
        self.model = pretrained.sentence_transformer(
            settings.model,
            f"model={settings.model}",
            device,
            getattr(torch, settings.dtype),
            settings.revision,
            truncate_dim=settings.dimensions,
        )
        self._normalize = self.model.similarity_fn_name != "dot"
        self._pools_prompts = all(getattr(module, "include_prompt", True) for module in self.model)
        self._max_length = self.model.max_seq_length or 512

    def encode_queries(self, queries: Sequence[Query]) -> np.ndarray:
        """Embed queries with their instructions: (n, d) float32."""
        inputs = []
        for query in queries:
            text_format = query_format(self._settings, query)
            prompt, rest = split(text_format, "query", instruction=query.instruction or "")
            inputs.append((prompt, query.query + rest))
        return self._encode(inputs, self._settings.query_length)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Embed passages: (n, d) float32."""
        prompt, rest = split(self._settings.passage or "{passage}", "passage")
        return self._encode([(prompt, text + rest) for text in texts], self._settings.passage_length)

    def _encode(self, inputs: Sequence[tuple[str, str]], length: int | None) -> np.ndarray:
        """Embed (prompt, text) pairs, grouped by prompt where prompts are not pooled."""
        self.model.max_seq_length = min(length or self._max_length, self._max_length)
        rows: dict[str, list[int]] = {}
        for row, (prompt, _) in enumerate(inputs):
            rows.setdefault("" if self._pools_prompts else prompt, []).append(row)
        embeddings = np.empty((len(inputs), 0), dtype=np.float32)
        for prompt, of_prompt in rows.items():
            encoded = self.model.encode(
                [inputs[row][1] if prompt else "".join(inputs[row]) for row in of_prompt],
                prompt=prompt,
                batch_size=max(1, self._batch_tokens // self.model.max_seq_length),
                normalize_embeddings=self._normalize,
                show_progress_bar=False,
                convert_to_tensor=True,
            )
            if not embeddings.shape[1]:
                embeddings = np.empty((len(inputs), encoded.shape[1]), dtype=np.float32)
            embeddings[of_prompt] = encoded.float().cpu().numpy()
        return embeddings
