"""Local encoders: checkpoints through `InstructionEncoder`, others through sentence-transformers.

`InstructionEncoder` loads most models and gives the same numbers. sentence-transformers serves models with modules of its
own (Dense layers: INSTRUCTOR) and models whose embeddings are not normalized (Contriever). Code that comes with a model
never runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling import checkpoint, pretrained
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.formats import passage_text, query_format, query_text, split
from infembed_ray.modeling.layout import Layout, length_sorted_batches, padded
from infembed_ray.modeling.tokenizer import Tokens


class CheckpointEncoder:
    """An `InstructionEncoder` that reads texts by its own template or by formats. Embeddings are unit vectors.

    Args:
        settings: from `baselines.resolve`.
        device: torch device.
        batch_tokens: tokens of a forward pass, with padding.
        identity: hash of all that decides its embeddings.

    Raises:
        InputError: the model cannot be loaded, or does not fit the settings.
    """

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int, identity: str) -> None:
        self.identity = identity
        self._settings = settings
        self._batch_tokens = batch_tokens
        path = checkpoint.at_revision(settings.model, settings.revision)
        formatted = settings.instructed_query is not None
        self.encoder = InstructionEncoder.from_pretrained(
            path,
            template=None if checkpoint.is_own(path) else settings.template,
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
            raise InputError(
                f"kind=encoder, model={settings.model}: is an encoder-decoder model; set kind=sentence_transformers if that "
                "library made it an embedder, or kind=seq2seq for a reranker"
            )
        if settings.adapter is not None:
            adapter = checkpoint.at_revision(settings.adapter, settings.adapter_revision)
            self.encoder.backbone = pretrained.with_adapters(self.encoder.backbone, adapter)
        if formatted and self.encoder.interaction is not None:
            raise InputError(
                f"model={settings.model}: reads instruction and query separately, so it cannot use formats; "
                "drop instructed_query and plain_query"
            )
        if not settings.pool_prompt and self.encoder.pooling != "mean":
            raise InputError(
                f"pool_prompt=false: model={settings.model} pools by {self.encoder.pooling}; set pooling=mean"
            )
        self.encoder.to(device)

    def encode_queries(self, queries: Sequence[Query]) -> np.ndarray:
        """Embed queries with their instructions: (n, d) float32."""
        if self._settings.instructed_query is None:
            texts, instructions = [query.query for query in queries], [query.instruction for query in queries]
            return self.encoder.embed(self.encoder.tokenize_queries(texts, instructions), self._batch_tokens)
        inputs = [query_text(self._settings, query) for query in queries]
        tokens = self.encoder.tokenize_queries(inputs, [None] * len(inputs))
        if self._settings.pool_prompt:
            return self.encoder.embed(tokens, self._batch_tokens)
        formats = [query_format(self._settings, query) for query in queries]
        prompts = [split(f, "query", instruction=q.instruction or "")[0] for f, q in zip(formats, queries, strict=True)]
        return self._embed_without_prompts(prompts, inputs, tokens, self.encoder.text.query_length)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Embed passages: (n, d) float32."""
        inputs = [passage_text(self._settings.passage, text) for text in texts]
        tokens = self.encoder.tokenize_passages(inputs)
        if self._settings.pool_prompt or self._settings.passage is None:
            return self.encoder.embed(tokens, self._batch_tokens)
        prompt, _ = split(self._settings.passage or "{passage}", "passage")
        return self._embed_without_prompts([prompt] * len(inputs), inputs, tokens, self.encoder.text.passage_length)

    @torch.inference_mode()
    def _embed_without_prompts(
        self, prompts: Sequence[str], texts: Sequence[str], tokens: Sequence[Tokens], length: int
    ) -> np.ndarray:
        """Embed texts whose prompts are attended to but not pooled (GritLM, arXiv 2402.09906)."""
        if not texts:
            return np.zeros((0, self.encoder.dimension), dtype=np.float32)
        encoded = self.encoder.tokenizer(list(texts), truncation=True, max_length=length)
        left_out = [_prompt_tokens(encoded, row, prompt, len(tokens[row])) for row, prompt in enumerate(prompts)]
        embeddings = np.zeros((len(texts), self.encoder.dimension), dtype=np.float32)
        self.encoder.eval()
        for rows in length_sorted_batches([len(text) for text in tokens], self._batch_tokens):
            layout = padded([tokens[row] for row in rows], int(self.encoder.tokenizer.pad_token_id))
            layout = _pooled_after(layout, torch.tensor([left_out[row] for row in rows]))
            embeddings[rows] = self.encoder(layout.to(self.encoder.device)).cpu().numpy()
        return embeddings


def _prompt_tokens(encoded: Any, row: int, prompt: str, length: int) -> int:
    """Count the tokens of a text up to the end of its prompt, special tokens included; at least one is left."""
    if not prompt:
        return 0
    first = encoded.char_to_token(row, len(prompt))
    if first is None:  # a space that no token covers, or the text was truncated within its prompt
        first = encoded.char_to_token(row, len(prompt) + 1)
    return min(length - 1, length if first is None else first)


def _pooled_after(layout: Layout, left_out: torch.Tensor) -> Layout:
    """Exclude the first `left_out` tokens of each text of a padded layout from pooling."""
    starts = torch.repeat_interleave(layout.lengths.cumsum(0) - layout.lengths, layout.lengths)
    within = torch.arange(len(layout.tokens)) - starts
    kept = within >= torch.repeat_interleave(left_out, layout.lengths)
    return replace(layout, tokens=layout.tokens[kept], lengths=layout.lengths - left_out)


class SentenceTransformersEncoder:
    """A model that sentence-transformers loads, with our prompts.

    Args:
        settings: from `baselines.resolve`.
        device: torch device.
        batch_tokens: tokens of a forward pass, if all texts had the maximum length.
        identity: hash of all that decides its embeddings.

    Raises:
        InputError: the model cannot be loaded, or only with code of its own.
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
        self.model.set_pooling_include_prompt(settings.pool_prompt)
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
            rows.setdefault("" if self._settings.pool_prompt else prompt, []).append(row)
        embeddings: np.ndarray | None = None
        for prompt, of_prompt in rows.items():
            encoded = self.model.encode(
                [inputs[row][1] if prompt else "".join(inputs[row]) for row in of_prompt],
                prompt=prompt,
                batch_size=max(1, self._batch_tokens // self.model.max_seq_length),
                normalize_embeddings=self._settings.normalize,
                show_progress_bar=False,
                convert_to_tensor=True,
            )
            if embeddings is None:
                embeddings = np.empty((len(inputs), encoded.shape[1]), dtype=np.float32)
            embeddings[of_prompt] = encoded.float().cpu().numpy()
        return np.empty((0, 0), dtype=np.float32) if embeddings is None else embeddings
