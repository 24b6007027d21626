"""Chunks of long passages: where each begins and ends."""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Encoding

    from infembed_ray.modeling.tokenizer import TextTokenizer

Bounds = list[int]
"""Begin and end of the first chunk of a passage, then of the second, and so on, in code points."""
_ENDS = (re.compile(r"""[.!?…]["'”’)\]]*\s+|[。！？]["”’」』）]*\s*|\n\s*"""), re.compile(r"\s+"))
"""What a chunk ends after: a sentence or a line; else a word."""


@dataclass(frozen=True)
class Chunk:
    """A part of a passage, `text[start:end]` of its text, in code points."""

    text: str
    start: int
    end: int


def as_chunks(text: str, bounds: Bounds) -> list[Chunk]:
    """The chunks of a passage."""
    return [Chunk(text[start:end], start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=True)]


@dataclass(frozen=True)
class Cutter:
    """Cuts passages into chunks that the encoder reads whole.

    A chunk ends after a sentence, or else a word, in the second half of its window of tokens, and begins with a word.

    Attributes:
        tokenizer: of the encoder. Not thread-safe, as that is not.
        tokens: maximum tokens of a chunk, with prefix and special tokens.
        overlap: tokens that neighbours share.
        until: `time.monotonic()` from which it raises TimeoutError before it tokenizes.
    """

    tokenizer: TextTokenizer
    tokens: int
    overlap: int
    until: float = float("inf")

    @classmethod
    def of(cls, tokenizer: TextTokenizer, settings: IndexSettings) -> Cutter | None:
        """The cutter of an index; None: passages are not cut. InputError if the encoder would truncate chunks, or their prefix fills them."""
        if settings.chunk_tokens is None:
            return None
        if settings.chunk_tokens > (most := tokenizer.text.passage_length):
            fault = f"the encoder reads {most} tokens of a passage"
            raise InputError.of("chunk_tokens", settings.chunk_tokens, fault, f"set at most {most}")
        cutter = cls(tokenizer, settings.chunk_tokens, settings.chunk_overlap)
        prefix = len(cutter._encoded([tokenizer.text.passage_prefix])[0].ids)
        if prefix > settings.chunk_tokens // 2:
            fault = f"passage_prefix and special tokens take {prefix} of them"
            remedy = f"set at least {2 * prefix}" if 2 * prefix <= most else "shorten the encoder's passage_prefix"
            raise InputError.of("chunk_tokens", settings.chunk_tokens, fault, remedy)
        return cutter

    def cut(self, text: str) -> Bounds:
        """Cut a passage, which is not empty; one that the encoder reads whole is one chunk."""
        prefix = self.tokenizer.text.passage_prefix
        if len(self._encoded([prefix + text])[0].ids) <= self.tokens:
            return [0, len(text)]
        begins = [begin for begin, _ in self._encoded([text], special=False)[0].offsets]
        begins = [*np.clip(np.maximum.accumulate([0, *begins[1:]]), 0, len(text) - 1).tolist(), len(text)]
        room = self.tokens - len(self._encoded([prefix])[0].ids)
        while True:
            bounds = [place for span in self._spans(text, begins, room) for place in span]
            read = [prefix + chunk.text for chunk in as_chunks(text, bounds)]
            # Cut off from its context, a text can have more tokens.
            excess = max(len(one.ids) for one in self._encoded(read)) - self.tokens
            if excess <= 0 or room <= self.tokens // 2:
                return bounds
            room -= excess

    def _encoded(self, texts: Sequence[str], special: bool = True) -> list[Encoding]:
        if time.monotonic() >= self.until:
            raise TimeoutError
        self.tokenizer.backend.no_truncation()
        self.tokenizer.backend.no_padding()
        return self.tokenizer.backend.encode_batch(texts, add_special_tokens=special)

    def _spans(self, text: str, begins: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each chunk of at most `room` tokens, which begin at `begins`."""
        first, end, tokens = 0, 0, len(begins) - 1
        while end < tokens:
            end = _end(text, begins, first, first + room) if first + room < tokens else tokens
            yield begins[first], begins[end]
            first = end - min(self.overlap, (end - first) // 2)
            if first < end and (space := _ENDS[1].search(text, max(0, begins[first] - 1), begins[end] + 1)):
                first = min(bisect_right(begins, space.end()) - 1, end)


def _end(text: str, begins: Sequence[int], first: int, last: int) -> int:
    """The token before which a chunk of the tokens from `first` to `last` ends."""
    middle = (first + last) // 2
    for pattern in _ENDS:
        ends = [match.end() for match in pattern.finditer(text, begins[middle], begins[last] + 1)]
        if ends and (place := min(bisect_right(begins, ends[-1]) - 1, last)) > middle:
            last = place
            break
    return max(last, bisect_right(begins, begins[first]))  # at least a character, which can be several tokens
