"""What an instruction excludes, and how it moves the vector of its query.

Dense retrieval hardly reads negation: "no dosage tables" brings passages with dosage tables nearer. So a rule for English finds
the unwanted part, which is embedded on its own, and a query is searched with normalize(whole - weight * unwanted). The weight is
the checkpoint's.

A cue opens an unwanted part ("no", "except for", "leave out"), which ends with its clause; or it closes one ("... can be
ignored"). Limits of time and number ("no later than 2020"), additions ("not only"), double negations ("do not leave out") and
descriptions ("patients who have no insurance") exclude nothing.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from infembed_ray.modeling.formats import Question

MAX_CHARACTERS = 4000
"""Characters of an instruction that is split, about what an encoder reads. It bounds the work of a request."""
_NOT = r"(?:\bnot|n['’]t|\bnever|\bcannot)"
_MIDDLE = (
    "without|except(?:ing)?(?: for)?|excluding|anything (?:but|except|other than)|(?:rather|other) than|instead of"
    "|apart from|aside from|free (?:of|from)|minus"
)
"""Cues that begin a clause wherever they are; the other ones are cues only where a clause begins."""
_DROP = (
    "leave (?:out|off|aside)|leave|omit|exclude|skip|ignore|avoid|drop|forget(?: about)?|cut|spare (?:me|us)|keep out"
)
_WISH = (
    "want|need|like|require|expect|mean|care (?:about|for)|bother with|dwell on|give me|show me|include|mention|list"
    "|discuss|cover|use|cite|see|interested in|looking for|after"
)
_GONE = (
    "ignored|left|omitted|skipped|dropped|excluded|avoided|rejected|absent|unwanted|unwelcome|unnecessary|unneeded"
    r"|unhelpful|irrelevant|superfluous|useless|pointless|distracting|out|off|aside|away|elsewhere|too \w+"
)
_NEUTRAL = re.compile(
    r"\b(?:no|not|nothing|never|none)(?: \w+){0,2}? (?:later|earlier|more|less|fewer|longer|older|newer|higher|lower|only"
    r"|(?:before|after|since)(?=\D{1,15}\d)|just|merely|necessarily|yet|enough|sure|matter|doubt|one|but|except"
    r"|other than|without|un\w+|\d+)\b|\b(?:or|if|why|whether) not\b|\bwith or without\b|\bno\. ?\d+"
    rf"|(?:{_NOT}|\bnothing|\bno|\bwithout)(?: \w+){{0,3}}? (?:leave|left|omit\w*|exclud\w+|skip\w*|ignor\w+|avoid\w*"
    r"|forget\w*)(?: out\b)?",
    re.IGNORECASE,
)
"""Negations that exclude nothing."""
_BETWEEN_CLAUSES = re.compile(
    rf"(?<=[.!?;:])\s+|\s*\n[\s*•-]*|\s[–—-]\s|\s(?=\()|,?\s+(?=(?:{_MIDDLE})\b)|\s(?=nor\b)"
    r"|,?\s+(?=(?:and|but) (?:_|(?:no|not|nothing|skip|leave)\b))"
    r"|,\s+(?=(?:no|not|nothing|never|skip|leave|but|only|for|with|I|I['’]d|we|please)\b)",
    re.IGNORECASE,
)
_OPENS = re.compile(
    rf"^\W*(?:(?:and|or|but|please|also) )*(?:{_MIDDLE}|{_DROP}|nothing (?:about|on|from|in|by)|none of|no|not|nothing"
    rf"|neither|nor|never(?: about)?)\b|(?:{_NOT}|\bno need to)(?: to)?(?: be)? (?:{_WISH})\b|\bnothing about\b",
    re.IGNORECASE,
)
_CLOSES = re.compile(
    r"^(?!.*\b(?:why|how|whether|if|who|that|which|I|it|he|she|they|we)\b)(?P<subject>.*?)\b(?:(?:is|are|do|does|can|could|may"
    r"|might|should|must|would|will|has|have|be|stays?|remains?|feels?) ?){1,3}"
    rf"(?:{_NOT}|not|(?:of )?no|(?:\w+ )?(?:{_GONE}))\b",
    re.IGNORECASE | re.DOTALL,
)
_EDGE = " \t\n,;:.!?()\"'“”–—•*-"


class Parts(NamedTuple):
    """An instruction in two parts; `unwanted` is what it excludes, joined by "; ", and empty if that is nothing."""

    wanted: str
    unwanted: str


@lru_cache(1024)
def split(instruction: str) -> Parts:
    """Split an instruction into its wanted and unwanted parts; one of more than `MAX_CHARACTERS` stays whole."""
    if len(instruction) > MAX_CHARACTERS:
        return Parts(instruction, "")
    wanted, unwanted = [], []
    masked = _NEUTRAL.sub(lambda neutral: "_" * len(neutral[0]), instruction)
    breaks = [place for between in _BETWEEN_CLAUSES.finditer(masked) for place in between.span()]
    for start, end in list(pairwise([0, *breaks, len(instruction)]))[::2]:
        if opening := _OPENS.search(masked[start:end]):
            kept, excluded = (start, start + opening.start()), (start + opening.end(), end)
        elif closing := _CLOSES.match(masked[start:end]):
            kept, excluded = (start, start), (start, start + closing.end("subject"))
        else:
            kept, excluded = (start, end), (end, end)
        wanted.append(instruction[slice(*kept)].strip())
        unwanted.append(instruction[slice(*excluded)].strip(_EDGE))
    return Parts(" ".join(filter(None, wanted)), "; ".join(filter(None, unwanted)))


def with_excluded(queries: Sequence[Question], weight: float) -> list[Question]:
    """Return the texts to embed for queries: these, and then, unless the weight is 0, each text that they exclude once."""
    return [*queries, *map(Question, _excluded(queries) if weight else ())]


def moved(queries: Sequence[Question], vectors: np.ndarray, weight: float) -> np.ndarray:
    """Move queries away from what their instructions exclude.

    Args:
        vectors: (texts, d) unit vectors of `with_excluded(queries, weight)`.

    Returns:
        (queries, d) float32 unit vectors.
    """
    whole, excluded = np.split(vectors, [len(queries)])
    if not len(excluded):
        return whole
    places = {text: place for place, text in enumerate(_excluded(queries))}
    of_rows = {row: places[text] for row, query in enumerate(queries) if (text := _unwanted(query))}
    rows = list(of_rows)
    apart = whole[rows] - weight * excluded[list(of_rows.values())]
    whole = whole.copy()
    whole[rows] = apart / np.maximum(np.linalg.norm(apart, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return whole


def _excluded(queries: Sequence[Question]) -> list[str]:
    """Return each text that queries exclude once, in their order."""
    return list(dict.fromkeys(filter(None, map(_unwanted, queries))))


def _unwanted(query: Question) -> str:
    return split(query.instruction or "").unwanted
