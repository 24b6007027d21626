"""Rerankers: models that score the relevance of a passage to a query; those here read both together.

Scores are logit differences, relevant - irrelevant. They order as the usual probabilities do, without the ties of
probabilities that round to 1.0.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling import checkpoint, pretrained
from infembed_ray.modeling.formats import Asked, fill, passage_text, query_text
from infembed_ray.modeling.layout import length_sorted_batches
from infembed_ray.modeling.pipeline import batch_tokens_of
from infembed_ray.modeling.tokenizer import TextFormat, only_texts


class PairScorer(ABC):
    """Scores pairs of a query, perhaps with an instruction, and a passage; higher is more relevant."""

    source: str | None
    """Directory or hub name of the model."""
    batch_tokens: int
    """Tokens of a pass of `score`, with padding."""

    def score(self, pairs: Sequence[tuple[Asked, str]]) -> np.ndarray:
        """Score pairs: (n) float32; InputError if a score is not finite."""
        inputs = self.tokenized(pairs)
        scores = np.zeros(len(pairs), dtype=np.float32)
        for rows in length_sorted_batches(list(map(self.cost, inputs)), self.batch_tokens):
            scores[rows] = self.relevance([inputs[row] for row in rows])
        for row in np.flatnonzero(~np.isfinite(scores)).tolist():
            fault = f"the score of {pairs[row][0].query[:60]!r} with {pairs[row][1][:60]!r} is not finite"
            remedy = "the weights are damaged or their dtype overflows: try dtype=float32"
            raise InputError.of("model", self.source, fault, remedy)
        return scores

    @abstractmethod
    def tokenized(self, pairs: Sequence[tuple[Asked, str]]) -> list[Any]:
        """Return the input of `relevance` for every pair."""

    @abstractmethod
    def cost(self, pair: Any) -> int:
        """Return the number of tokens that the model has to compute for a tokenized pair."""

    @abstractmethod
    def relevance(self, inputs: Sequence[Any]) -> np.ndarray:
        """Score tokenized pairs of any queries in one forward pass: (n) float32."""


class ModelReranker(PairScorer):
    """A reranker with a Hugging Face model. Subclasses differ in the input and in the logits that are the answer.

    On the device `meta` no weights are read: the constructor checks that model, kind and settings fit.
    """

    model_class: str
    """Auto class of transformers."""
    model: Any
    tokenizer: Any

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int | None) -> None:
        self._settings = settings
        self._device = device
        self.source = settings.model
        setting = f"kind={settings.kind}, model={settings.model}"
        self.tokenizer = pretrained.tokenizer(settings.model, setting, revision=settings.revision)
        self.model = pretrained.weights(
            self.model_class,
            settings.model,
            setting,
            revision=settings.revision,
            config=pretrained.config(settings.model, setting, revision=settings.revision),
            dtype=getattr(torch, settings.dtype),
            use_safetensors=True,
            device_map=device if device == "meta" else None,
        )
        pretrained.require_embedded(self.tokenizer, self.model, setting)
        text = checkpoint.pair_format(settings.model, settings.revision)
        positions = getattr(self.model.config, "max_position_embeddings", None) or 10**9
        self.text = replace(text, passage_length=settings.pair_length or min(text.passage_length, positions))
        if self.text.passage_length > positions:
            fault = f"model={settings.model} has only {positions} positions"
            raise InputError.of("pair_length", self.text.passage_length, fault, "set it to that or less")
        if getattr(self.model.config, "pad_token_id", None) is None:
            # A decoder with a classification head finds the last token by it.
            self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.model.to(device).eval()
        self.batch_tokens = batch_tokens or batch_tokens_of(self.model)

    def cost(self, pair: dict[str, list[int]]) -> int:
        """As `PairScorer.cost`."""
        return len(pair["input_ids"])

    def tokenized(self, pairs: Sequence[tuple[Asked, str]]) -> list[dict[str, list[int]]]:
        """Format and tokenize pairs for `relevance`, truncated to `pair_length` tokens."""
        with only_texts(text for query, passage in pairs for text in (query.query, query.instruction or "", passage)):
            texts = {query: query_text(self._settings, query) for query in {query for query, _ in pairs}}
            if (limit := self._settings.query_length) is not None:
                texts = {query: _truncated(self.tokenizer, text, limit) for query, text in texts.items()}
            return self._tokenize([(texts[query], passage_text(self._settings.passage, text)) for query, text in pairs])

    @torch.inference_mode()
    def relevance(self, inputs: Sequence[dict[str, list[int]]]) -> np.ndarray:
        """Score tokenized pairs in one forward pass: (n) float32."""
        batch = self.tokenizer.pad(list(inputs), return_tensors="pt").to(self._device)
        return self._relevance(batch).float().cpu().numpy()

    @abstractmethod
    def _tokenize(self, pairs: Sequence[tuple[str, str]]) -> list[dict[str, list[int]]]:
        """Tokenize (query, passage) pairs, truncated to `pair_length` tokens."""

    @abstractmethod
    def _relevance(self, batch: Any) -> Tensor:
        """Return the logit differences of a padded batch: (n)."""


class _Answering(ModelReranker):
    """Reads a prompt and answers with one of two tokens."""

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int | None) -> None:
        super().__init__(settings, device, batch_tokens)
        vocabulary = self.tokenizer.get_vocab()
        answers = settings.answers or ()
        for token in answers:
            if token not in vocabulary:
                fault = f"{token!r} is not in the vocabulary of model={settings.model}"
                remedy = "write tokens as the vocabulary does, for example ▁true or Ġyes"
                raise InputError.of("answers", list(answers), fault, remedy)
        self._answers = [vocabulary[token] for token in answers]

    def _tokenize(self, pairs: Sequence[tuple[str, str]]) -> list[dict[str, list[int]]]:
        most = self.text.passage_length
        tokenized = zip(self._prompts(pairs), pairs, strict=True)
        return [each if len(each["input_ids"]) <= most else self._shortened(*pair) for each, pair in tokenized]

    def _shortened(self, query: str, passage: str) -> dict[str, list[int]]:
        """Tokenize a prompt with the passage truncated, and the query too if that is not enough; else InputError."""
        texts = {"passage": passage, "query": query}
        for part in texts:
            while True:
                (tokens,) = self._prompts([(texts["query"], texts["passage"])])
                excess = len(tokens["input_ids"]) - self.text.passage_length
                if excess <= 0:
                    return tokens
                if not texts[part]:
                    break
                # Truncation can change the tokens at the cut, so one pass may not be enough.
                length = len(self.tokenizer(texts[part], add_special_tokens=False)["input_ids"])
                texts[part] = _truncated(self.tokenizer, texts[part], length - excess)
        fault = f"the format `pair` alone is longer by {excess} tokens"
        raise InputError.of("pair_length", self.text.passage_length, fault, "raise it")

    def _prompts(self, pairs: Sequence[tuple[str, str]]) -> list[dict[str, list[int]]]:
        prompt = self._settings.pair or "{query} {passage}"
        texts = [fill(prompt, query=query, passage=passage) for query, passage in pairs]
        return _rows(self.tokenizer(texts), "input_ids", "attention_mask") if texts else []

    def _difference(self, logits: Tensor) -> Tensor:
        """Subtract the logits of the two answers: (n, vocabulary) -> (n)."""
        relevant, irrelevant = self._answers
        return logits[:, relevant].float() - logits[:, irrelevant].float()


class Seq2Seq(_Answering):
    """An encoder-decoder whose first token is the answer: monoT5 (arXiv 2003.06713), FLAN-T5."""

    model_class = "AutoModelForSeq2SeqLM"

    def _relevance(self, batch: Any) -> Tensor:
        start = torch.full((len(batch["input_ids"]), 1), self.model.config.decoder_start_token_id, device=self._device)
        return self._difference(self.model(**batch, decoder_input_ids=start, use_cache=False).logits[:, 0])


class Causal(_Answering):
    """A decoder whose next token is the answer: FollowIR-7B (arXiv 2403.15246), Qwen3-Reranker."""

    model_class = "AutoModelForCausalLM"

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int | None) -> None:
        super().__init__(settings, device, batch_tokens)
        self.tokenizer.padding_side = "left"  # the last column then holds the last token of every row
        if settings.adapter is not None and device != "meta":
            self.model = pretrained.with_adapters(self.model, settings.adapter).eval()

    def _relevance(self, batch: Any) -> Tensor:
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = self.model(**batch, position_ids=positions, use_cache=False, logits_to_keep=1).logits
        return self._difference(logits[:, -1])


class Classifier(ModelReranker):
    """A sequence classifier over the pair: monoBERT (arXiv 1910.14424) and other cross-encoders.

    With two classes the second is relevance, as in monoBERT; with one, its logit is the score.
    """

    model_class = "AutoModelForSequenceClassification"

    def __init__(self, settings: RetrieverSettings, device: str, batch_tokens: int | None) -> None:
        super().__init__(settings, device, batch_tokens)
        if self.model.config.num_labels > 2:
            fault = f"has {self.model.config.num_labels} classes, but a reranker has one or two"
            raise InputError.of("model", settings.model, fault, "give a model that was trained as a reranker")

    def _tokenize(self, pairs: Sequence[tuple[str, str]]) -> list[dict[str, list[int]]]:
        return tokenized_pairs(self.tokenizer, pairs, self.text)

    def _relevance(self, batch: Any) -> Tensor:
        logits = self.model(**batch).logits.float()
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]


KINDS: dict[str, type[ModelReranker]] = {"classifier": Classifier, "causal": Causal, "seq2seq": Seq2Seq}
"""Kind of the settings -> class."""


def tokenized_pairs(tokenizer: Any, pairs: Sequence[tuple[str, str]], text: TextFormat) -> list[dict[str, list[int]]]:
    """Tokenize (query, passage) pairs for a classifier, truncated to `passage_length`: the query only if it leaves no place."""
    if not pairs:
        return []
    mark = len(tokenizer(text.passage_prefix, add_special_tokens=False)["input_ids"])
    limit = text.passage_length - tokenizer.num_special_tokens_to_add(pair=True) - mark - 1
    queries = {query: _truncated(tokenizer, query, limit) for query in {query for query, _ in pairs}}
    # Lists, not single texts: the tokenizer takes a single empty passage for none and leaves out its [SEP].
    firsts, seconds = [queries[query] for query, _ in pairs], [text.passage_prefix + passage for _, passage in pairs]
    encoded = tokenizer(firsts, seconds, truncation="only_second", max_length=text.passage_length)
    return _rows(encoded, *encoded)


def _truncated(tokenizer: Any, text: str, tokens: int) -> str:
    """Return the beginning of a text, at most `tokens` tokens long; characters are never divided."""
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(places) <= tokens:
        return text
    # A byte-level tokenizer may have several tokens at the place of one character.
    return text[: min(places[tokens - 1][1], places[tokens][0])] if tokens > 0 else ""


def _rows(encoded: Any, *names: str) -> list[dict[str, list[int]]]:
    """Split fields of a tokenizer's batch into one mapping per text."""
    return [dict(zip(names, row, strict=True)) for row in zip(*(encoded[name] for name in names), strict=True)]
