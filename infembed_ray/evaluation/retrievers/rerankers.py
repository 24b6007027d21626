"""Rerankers: models that read a query and a passage together and say how relevant the one is to the other.

Scores are logit differences, relevant - not relevant: they order as the probabilities that are usually given, which
round to 1.0 for many passages at once.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from infembed_ray.config import RetrieverSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import formats
from infembed_ray.evaluation.retrievers.encoders import with_adapters
from infembed_ray.evaluation.retrievers.retriever import Reranker
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling import checkpoint
from infembed_ray.modeling.layout import length_sorted_batches
from infembed_ray.progress import say


def load(settings: RetrieverSettings, device: str, batch_tokens: int, identity: str) -> Reranker:
    """The reranker of resolved settings of kind `seq2seq`, `classifier` or `causal`.

    Raises:
        InputError: the model cannot be loaded, or is not one of this kind.
    """
    kinds: dict[str, type[_ModelReranker]] = {"seq2seq": Seq2Seq, "classifier": Classifier, "causal": Causal}
    return kinds[settings.kind](settings, device, batch_tokens, identity)


class Chance:
    """Scores by chance: what any reranker has to beat. The same pair always has the same score.

    Args:
        settings: its `seed`.
        identity: hash of all that decides its scores.
    """

    def __init__(self, settings: RetrieverSettings, identity: str) -> None:
        self.identity = identity
        self._seed = settings.seed

    def score(self, pairs: Sequence[tuple[Query, str]]) -> np.ndarray:
        """(n) float32 in [0, 1), from a hash of the texts."""
        return np.array([self._draw(query, passage) for query, passage in pairs], dtype=np.float32)

    def _draw(self, query: Query, passage: str) -> float:
        texts = "\0".join((str(self._seed), query.query, query.instruction or "", passage))
        return int.from_bytes(hashlib.sha256(texts.encode()).digest()[:3], "big") / 2**24  # all that float32 can hold


class _ModelReranker(ABC):
    """A reranker with a Hugging Face model; its kinds differ in the text it reads and in where its answer is."""

    model_class: Any
    model: Any
    tokenizer: Any

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int, identity: str) -> None:
        assert settings.model is not None
        self.identity = identity
        self._settings = settings
        self._device = device
        self._batch_tokens = batch_tokens
        self._told_cut = False
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(settings.model, revision=settings.revision)
            self.model, loaded = self.model_class.from_pretrained(
                settings.model,
                revision=settings.revision,
                dtype=getattr(torch, settings.dtype),
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise checkpoint.unloadable(f"kind={settings.kind}, model={settings.model}", error) from error
        if missing := sorted(loaded["missing_keys"]):  # transformers fills them in by chance
            raise InputError(
                f"kind={settings.kind}, model={settings.model}: has no weights for {missing[0]}, so it was not trained as "
                "such a reranker; correct kind, or give another model"
            )
        if not self.tokenizer.is_fast:
            raise InputError(f"model={settings.model}: its tokenizer is not a fast one; convert it to a tokenizer.json")
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is not None and settings.pair_length > positions:
            raise InputError(
                f"pair_length={settings.pair_length}: model={settings.model} has {positions} positions; set at most that"
            )
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if getattr(self.model.config, "pad_token_id", None) is None:  # by it, a classifying decoder finds a text's end
            self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.model.to(device).eval()

    @torch.inference_mode()
    def score(self, pairs: Sequence[tuple[Query, str]]) -> np.ndarray:
        """(n) float32.

        Raises:
            InputError: a score is not finite.
        """
        asked = {query: self._fitted(query) for query in {query for query, _ in pairs}}
        inputs = self._read([(asked[query], formats.passage_text(self._settings, text)) for query, text in pairs])
        scores = np.zeros(len(pairs), dtype=np.float32)
        for rows in length_sorted_batches([len(each["input_ids"]) for each in inputs], self._batch_tokens):
            batch = self.tokenizer.pad([inputs[row] for row in rows], return_tensors="pt").to(self._device)
            scores[rows] = self._relevance(batch).float().cpu().numpy()
        if not np.isfinite(scores).all():
            row = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise InputError(
                f"model={self._settings.model}: the score of {pairs[row][0].query[:60]!r} with {pairs[row][1][:60]!r} is "
                f"not finite; the weights are damaged, or dtype={self._settings.dtype} is too small for it: try float32"
            )
        return scores

    @abstractmethod
    def _read(self, pairs: Sequence[tuple[str, str]]) -> list[dict[str, list[int]]]:
        """What the tokenizer makes of (query, passage) pairs, at most `pair_length` tokens of each."""

    @abstractmethod
    def _relevance(self, batch: Any) -> Tensor:
        """(n) logit differences of a padded batch."""

    def _fitted(self, query: Query) -> str:
        """The text of a query with its instruction, cut at `query_length`."""
        text = formats.query_text(self._settings, query)
        return text if self._settings.query_length is None else self._cut(text, self._settings.query_length)

    def _cut(self, text: str, tokens: int) -> str:
        """The beginning of a text that is so many tokens long, or less by the tokens of a character they would cut."""
        places = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if len(places) <= tokens:
            return text
        # Of bytes, several tokens lie at the place of one character.
        return text[: min(places[tokens - 1][1], places[tokens][0])] if tokens > 0 else ""

    def _tell_cut(self) -> None:
        if not self._told_cut:
            say(
                f"rerank: a query alone is longer than pair_length={self._settings.pair_length} leaves room for and is "
                "cut; raise it, if the model can read more"
            )
            self._told_cut = True


class _Answering(_ModelReranker):
    """Reads a prompt and answers with one of two tokens."""

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int, identity: str) -> None:
        super().__init__(settings, device, batch_tokens, identity)
        assert settings.answers is not None
        vocabulary = self.tokenizer.get_vocab()
        for token in settings.answers:
            if token not in vocabulary:
                raise InputError(
                    f"answers={list(settings.answers)}: {token!r} is no token of model={settings.model}; give tokens as "
                    "its vocabulary has them, for example ▁true or Ġyes"
                )
        self._answers = [vocabulary[token] for token in settings.answers]

    def _read(self, pairs: Sequence[tuple[str, str]]) -> list[dict[str, list[int]]]:
        most = self._settings.pair_length
        read = self._prompts(pairs)
        return [
            each if len(each["input_ids"]) <= most else self._shortened(*pair)
            for each, pair in zip(read, pairs, strict=True)
        ]

    def _shortened(self, query: str, passage: str) -> dict[str, list[int]]:
        """The prompt of a pair without the end of its passage, and of the query if that does not do.

        Raises:
            InputError: the prompt around them is too long already.
        """
        most = self._settings.pair_length
        (read,) = self._prompts([(query, passage)])
        # Tokens at a cut may come out otherwise than before it, so that one cut need not be enough.
        while (over := len(read["input_ids"]) - most) > 0 and passage:
            passage = self._cut(passage, self._length(passage) - over)
            (read,) = self._prompts([(query, passage)])
        while (over := len(read["input_ids"]) - most) > 0 and query:
            self._tell_cut()
            query = self._cut(query, self._length(query) - over)
            (read,) = self._prompts([(query, passage)])
        if over > 0:
            raise InputError(f"pair_length={most}: the format `pair` alone is longer by {over} tokens; raise it")
        return read

    def _prompts(self, pairs: Sequence[tuple[str, str]]) -> list[dict[str, list[int]]]:
        assert self._settings.pair is not None
        texts = [formats.fill(self._settings.pair, query=query, passage=passage) for query, passage in pairs]
        return _rows(self.tokenizer(texts), "input_ids", "attention_mask") if texts else []

    def _length(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _difference(self, logits: Tensor) -> Tensor:
        """(n, vocabulary) -> (n)"""
        relevant, irrelevant = self._answers
        wide = logits.float()
        return wide[:, relevant] - wide[:, irrelevant]


class Seq2Seq(_Answering):
    """An encoder-decoder whose first token is the answer: monoT5 (arXiv 2003.06713), FLAN-T5."""

    model_class = AutoModelForSeq2SeqLM

    def _relevance(self, batch: Any) -> Tensor:
        start = torch.full((len(batch["input_ids"]), 1), self.model.config.decoder_start_token_id, device=self._device)
        return self._difference(self.model(**batch, decoder_input_ids=start, use_cache=False).logits[:, 0])


class Causal(_Answering):
    """A decoder whose next token is the answer: FollowIR-7B (arXiv 2403.15246), Qwen3-Reranker."""

    model_class = AutoModelForCausalLM

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int, identity: str) -> None:
        super().__init__(settings, device, batch_tokens, identity)
        self.tokenizer.padding_side = "left"  # so that the last token of all rows is in the last column
        if settings.adapter is not None:
            adapter = checkpoint.at_revision(settings.adapter, settings.adapter_revision)
            self.model = with_adapters(self.model, adapter).eval()

    def _relevance(self, batch: Any) -> Tensor:
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = self.model(**batch, position_ids=positions, use_cache=False, logits_to_keep=1).logits
        return self._difference(logits[:, -1])


class Classifier(_ModelReranker):
    """A sequence classifier over the pair: monoBERT (arXiv 1910.14424) and other cross-encoders.

    With two classes the second is relevance, as in monoBERT; with one, its logit is the score.
    """

    model_class = AutoModelForSequenceClassification

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int, identity: str) -> None:
        super().__init__(settings, device, batch_tokens, identity)
        if self.model.config.num_labels > 2:
            raise InputError(
                f"model={settings.model}: has {self.model.config.num_labels} classes, a reranker has one or two; "
                "give a model that was trained as one"
            )

    def _read(self, pairs: Sequence[tuple[str, str]]) -> list[dict[str, list[int]]]:
        most = self._settings.pair_length
        room = most - self.tokenizer.num_special_tokens_to_add(pair=True) - 1
        queries = {query: self._cut(query, room) for query in {query for query, _ in pairs}}
        if any(query != cut for query, cut in queries.items()):
            self._tell_cut()
        if not pairs:
            return []
        # Lists, not single texts: of those, the tokenizer takes an empty passage for none, and leaves out its [SEP].
        firsts, seconds = [queries[query] for query, _ in pairs], [passage for _, passage in pairs]
        encoded = self.tokenizer(firsts, seconds, truncation="only_second", max_length=most)
        return _rows(encoded, *encoded)

    def _relevance(self, batch: Any) -> Tensor:
        logits = self.model(**batch).logits.float()
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]


def _rows(encoded: Any, *names: str) -> list[dict[str, list[int]]]:
    """Text by text, some of what a tokenizer made of several."""
    return [dict(zip(names, row, strict=True)) for row in zip(*(encoded[name] for name in names), strict=True)]
