"""The rule filter of generated instructions and queries (paper, appendix B.1)."""

from __future__ import annotations

from typing import Literal

Generated = Literal["instruction", "query"]

FEWEST_WORDS: dict[Generated, int] = {"instruction": 3, "query": 1}


def first_line(text: str) -> str:
    """The text up to its first newline, which removes what a model adds after its answer (appendix B.1)."""
    return text.split("\n", 1)[0].strip()


def fault(kind: Generated, line: str, poisons: str | None = None) -> str | None:
    """Why a generated line is useless, or None if it is fit.

    Args:
        kind: what it is meant to be.
        line: the text up to its first newline.
        poisons: the positive instruction or query that it must differ from.
    """
    words = line.split()
    if not words:
        return "empty before the first newline"
    if line.endswith(":"):
        return "a lead-in to a list, no request"
    if len(words) < FEWEST_WORDS[kind]:
        return f"fewer than {FEWEST_WORDS[kind]} words"
    if poisons is not None and _plain(line) == _plain(poisons):
        return "equal to the positive it should poison"
    return None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".?!")
