"""Leave-one-out explanation of a ranking: which phrases of the instruction moved a passage.

The effect of a phrase is the passage's score under the whole instruction minus its score under the instruction without it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise

import numpy as np
from pydantic import BaseModel, Field

MAX_PHRASES = 8
"""Most phrases of an instruction: each costs one more text for the encoder."""
MAX_EXPLAINED_HITS = 20
"""Largest `top_k` of a search that is explained."""
MAX_EXPLAINED_CHARACTERS = 4_000
"""Characters of an instruction that is explained: more than most encoders read."""
EXPLAINED_DEPTH = 100
"""Ranks without the instruction that are known; a passage beyond them has none."""
_LONG_WORDS = 5
"""Words from which a clause is halved while there are few phrases."""
_CONJUNCTIONS = "and|or|but|nor|not|no|except|excluding|unless|without|although|because|while|whereas|which|that|who"
_BREAKS = re.compile(
    r"(?:(?<=\w\w)|(?<=[)\]\"”’']))[.,;:!?…]+[)\]\"”’']*\s+"  # not within 3.5, and not after e.g.
    r"|[。，、；：！？]+\s*"
    r"|(?<!\s)(?:\s*\n\s*|\s+[-–—]\s+|\s+(?=[(\[]))"
    rf"|(?<!\s)(?<!\band)(?<!\bbut)(?<!\bor)\s+(?=(?:{_CONJUNCTIONS})\b)",  # and no: one clause
    re.IGNORECASE,
)
"""What separates two clauses; the next one begins at its end."""


class Phrase(BaseModel):
    """A part of the instruction."""

    text: str
    start: int = Field(description="offset of its first character in the instruction, in code points")
    end: int = Field(description="offset after its last character")


class ExplainedPassage(BaseModel):
    """What the instruction and its phrases did to one passage. All scores are cosines with the stored vector."""

    id: str
    rank: int | None = Field(description="rank with the instruction, from 1; null: not among the hits")
    rank_without: int | None = Field(
        description=f"rank without the instruction; null: not among the first {EXPLAINED_DEPTH}"
    )
    score: float = Field(description="score with the instruction")
    score_without: float = Field(description="score without it")
    effects: list[float] = Field(
        description="effect of each phrase: the score with the instruction minus the score without the phrase"
    )


class Explanation(BaseModel):
    """What the instruction did to the hits, and which of its phrases did it (leave-one-out)."""

    phrases: list[Phrase] = Field(description=f"parts of the instruction, in its order; at most {MAX_PHRASES}")
    passages: list[ExplainedPassage] = Field(
        description="the hits, then the passages that would be hits without the instruction and are none with it"
    )
    excluded: str = Field(
        "", description="what the instruction excludes, if the encoder has an `exclusion_weight`: it lowers scores"
    )


def require_explainable(instruction: str | None, top_k: int) -> None:
    """Raise ValueError unless a search can be explained."""
    if instruction is None or not instruction.strip():
        raise ValueError("there is no instruction whose effect could be explained; send one, or explain=false")
    if len(instruction) > MAX_EXPLAINED_CHARACTERS:
        raise ValueError(f"the instruction has {len(instruction)} characters; send up to {MAX_EXPLAINED_CHARACTERS}")
    if top_k > MAX_EXPLAINED_HITS:
        raise ValueError(f"top_k={top_k}; ask for up to {MAX_EXPLAINED_HITS} hits")


def phrases_of(instruction: str) -> list[Phrase]:
    """Split an instruction into at most `MAX_PHRASES` phrases, which cover all of it but white space.

    Clauses end at punctuation, at line breaks and before conjunctions. If there are too many, neighbours become one phrase. If
    there are few, clauses of `_LONG_WORDS` words or more are halved, the longest first.
    """
    starts = [0, *(end.end() for end in _BREAKS.finditer(instruction)), len(instruction)]
    spans = _trimmed(instruction, pairwise(starts))
    if len(spans) > MAX_PHRASES:  # those that begin in the same eighth of the instruction
        eighths = groupby(spans, lambda span: MAX_PHRASES * span[0] // len(instruction))
        grouped = [list(group) for _, group in eighths]
        spans = [(group[0][0], group[-1][1]) for group in grouped]
    while 0 < len(spans) < MAX_PHRASES:
        words = [[word.start() for word in re.finditer(r"\S+", instruction[a:b])] for a, b in spans]
        longest = max(range(len(spans)), key=lambda number: len(words[number]))
        if len(words[longest]) < _LONG_WORDS:
            break
        start, end = spans[longest]
        middle = start + words[longest][(len(words[longest]) + 1) // 2]
        spans[longest : longest + 1] = _trimmed(instruction, [(start, middle), (middle, end)])
    return [Phrase(text=instruction[a:b], start=a, end=b) for a, b in spans]


def variants(instruction: str, phrases: Sequence[Phrase]) -> list[str | None]:
    """Return the instructions whose scores explain a ranking: the whole, None, and one without each phrase (None if empty)."""
    left = (instruction[: phrase.start] + instruction[phrase.end :].lstrip() for phrase in phrases)
    return [instruction, None, *(text.strip() or None for text in left)]


def explanation(
    phrases: Sequence[Phrase], hits: Sequence[str], plain: Sequence[str], top_k: int, scores: Mapping[str, np.ndarray]
) -> Explanation:
    """Explain a ranking by p phrases of the instruction.

    Args:
        hits: ids with the instruction, best first.
        plain: ids without it, best first, up to `EXPLAINED_DEPTH`.
        scores: id -> (2 + p,) scores under `variants`; passages without scores are left out.
    """
    ranks = {id: rank for rank, id in enumerate(hits, start=1)}
    plain_ranks = {id: rank for rank, id in enumerate(plain, start=1)}
    passages = [
        ExplainedPassage(
            id=id,
            rank=ranks.get(id),
            rank_without=plain_ranks.get(id),
            score=float(whole),
            score_without=float(without),
            effects=(whole - left_out).tolist(),
        )
        for id in explained_ids(hits, plain, top_k)
        if id in scores
        for whole, without, left_out in [(scores[id][0], scores[id][1], scores[id][2:])]
    ]
    return Explanation(phrases=list(phrases), passages=passages)


def explained_ids(hits: Sequence[str], plain: Sequence[str], top_k: int) -> list[str]:
    """Return the ids of the hits, and then of those that would be hits without the instruction and are none with it."""
    return list(dict.fromkeys([*hits, *plain[:top_k]]))


def _trimmed(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans of a text without the white space around them; empty ones are left out."""
    trimmed = []
    for start, end in spans:
        if part := text[start:end].strip():
            start += text[start:end].index(part)
            trimmed.append((start, start + len(part)))
    return trimmed
