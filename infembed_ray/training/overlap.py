"""Overlap dropout: drops or replaces words that an instruction shares with its record's passages."""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.tuples import Example, TrainingRecord

CHOICES = 5
"""Number of similar words that one is drawn from. One alone would make the same replacement at each step."""
LEAST_SIMILARITY = 0.4
"""Least cosine similarity of a word to the one that it replaces. With MiniLM, 99 % of the words have five such words."""
_KEPT = 8
"""Similar words kept of each word, because the passages of a record may have some of them, too."""
_NEAREST = 40
"""Nearest words among which those with another beginning are looked for."""
_BLOCK = 256
"""Words that are compared with the vocabulary at once."""

_LONG_WORD = re.compile(r"\w{4,}")
_REPLACEABLE = re.compile(r"[^\W\d_]{4,}")


@dataclass(frozen=True)
class OverlapDropout:
    """Drops or replaces words of the instructions of a record that its passages have, too.

    Words of at least four letters count as equal if their first five letters are, without a final s.

    Attributes:
        share: Probability that such a word does not stay.
        replaced: Probability that a similar word replaces one that does not stay.
        similar: Word in lower case -> similar words, the nearest first.
    """

    share: float
    replaced: float = 0.0
    similar: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __call__(self, record: TrainingRecord, rng: random.Random) -> TrainingRecord:
        """Return a record with fewer of its passages' words in its instructions. An instruction never becomes empty."""
        names, common = _parts(record)

        def draw(word: re.Match[str]) -> str:
            if _stem(word[0]) not in common or rng.random() >= self.share:
                return word[0]
            if self.replaced and rng.random() < self.replaced:
                similar = [s for s in self.similar.get(word[0].lower(), ()) if _stem(s) not in common][:CHOICES]
                if similar:
                    return rng.choice(similar)
            return ""

        changed: dict[str, Any] = {}
        for name in names:
            instruction = getattr(record, name)
            changed[name] = " ".join(_LONG_WORD.sub(draw, instruction or "").split()) or instruction
        return replace(record, **changed)


def check(settings: TrainSettings) -> None:
    """Check that the settings fit each other; InputError otherwise."""
    if settings.overlap_synonyms and not settings.overlap_dropout:
        raise InputError(
            f"overlap_synonyms={settings.overlap_synonyms}: replaces words that overlap_dropout drops, and that is 0; set "
            "overlap_dropout=0.7, or leave overlap_synonyms out"
        )


def similar_words(encoder: InstructionEncoder, records: Iterable[TrainingRecord]) -> dict[str, tuple[str, ...]]:
    """Find what can replace the words that instructions share with their records' passages.

    Returns:
        Word in lower case -> words of the tokenizer's vocabulary that begin with other letters and have a similarity of at
        least `LEAST_SIMILARITY`, as queries without an instruction, the nearest first.
    """
    words: set[str] = set()
    for record in records:
        names, common = _parts(record)
        instructions = [getattr(record, name) or "" for name in names]
        words |= {w.lower() for text in instructions for w in _REPLACEABLE.findall(text) if _stem(w) in common}
    vocabulary = whole_words(encoder.tokenizer)
    ours = sorted(words)
    if not vocabulary or not ours:
        return {}
    theirs = encoder.encode_queries(vocabulary)
    similar = {}
    for start in range(0, len(ours), _BLOCK):
        block = ours[start : start + _BLOCK]
        similarities = encoder.encode_queries(block) @ theirs.T
        for word, row in zip(block, similarities, strict=True):
            near = [vocabulary[n] for n in np.argsort(-row)[:_NEAREST] if row[n] >= LEAST_SIMILARITY]
            similar[word] = tuple(other for other in near if _stem(other)[:4] != _stem(word)[:4])[:_KEPT]
    return similar


def whole_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the words of at least four letters, all in lower case, that are one token at the beginning of a word."""
    # Byte-level and SentencePiece tokenizers mark the beginning of a word, WordPiece marks its continuation.
    tokens = tokenizer.get_vocab()
    beginnings = [token for token in tokens if token[:1] in ("Ġ", "▁")] or tokens
    words = {tokenizer.convert_tokens_to_string([token]).strip() for token in beginnings}
    return sorted(word for word in words if _REPLACEABLE.fullmatch(word) and word.islower())


def _parts(record: TrainingRecord) -> tuple[tuple[str, ...], set[str]]:
    """Return the names of the fields with a record's instructions, and the stems of the words of its passages."""
    if isinstance(record, Example):
        names, passages = ("instruction", "negative_instruction"), record.positives + record.negatives
    else:
        names = ("instruction_positive", "instruction_negative")
        passages = (record.document_positive, record.hard_negative_document_1, record.hard_negative_document_2)
    return names, {_stem(word) for passage in passages for word in _LONG_WORD.findall(passage)}


def _stem(word: str) -> str:
    return word.casefold().rstrip("s")[:5]
