"""Rule filter of generated instructions and queries (paper, appendix B.1)."""

import re
from typing import Literal

Generated = Literal["instruction", "query"]

SPELLINGS = {"cpp": "c++", "csharp": "c#", "golang": "go", "js": "javascript", "ts": "typescript"}
"""Programming languages as in file names -> their usual spelling."""

FEWEST_WORDS: dict[Generated, int] = {"instruction": 3, "query": 1}
_AROUND = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"```\w*\n(?P<text>.+?)\n?```",
        r"([\"'`*_]+)(?P<text>(?:(?!\1).|(?<=\w)'(?=\w))+)\1\.?",
        r"[“‘«„](?P<text>[^“”‘«»„]+)[”’»“]\.?",
        r"<(\w+)>(?P<text>.+)</\1>",
        r"<(?P<text>[^<>]+)>",
        r"\[(?P<text>[^\[\]]+)\]",
    )
]
"""Marks that models put around a whole answer."""


def unwrapped(text: str) -> str:
    """Return a text without the blanks, fences, quotes, brackets, tags or emphasis around all of it."""
    text = text.strip()
    inner = next(filter(None, (each.fullmatch(text) for each in _AROUND)), None)
    return text if inner is None else unwrapped(inner["text"])


def first_line(text: str) -> str:
    """Return the first line of a text that is not blank, which removes what a model adds after its answer (appendix B.1)."""
    return unwrapped(unwrapped(text).split("\n", 1)[0])


def fault(kind: Generated, line: str, poisons: str | None = None, language: str | None = None) -> str | None:
    """Return why a generated line is useless; None if it is usable.

    Args:
        poisons: the positive instruction or query that it must differ from.
        language: the programming language that an instruction must name (appendix B.2).
    """
    words = line.split()
    if not words:
        return "empty"
    if line.endswith(":"):
        return "a lead-in to a list, no request"
    if len(words) < FEWEST_WORDS[kind]:
        return f"fewer than {FEWEST_WORDS[kind]} words"
    if poisons is not None and repeats(line, poisons):
        return "equal to the positive it should poison"
    if kind == "instruction" and language is not None and not names(line, language):
        return f"does not name the programming language {language}"
    return None


def repeats(text: str, original: str) -> bool:
    """Return whether two texts are equal apart from case, white space and final punctuation."""
    return plain(text) == plain(original)


def names(text: str, language: str) -> bool:
    """Return whether a text names a programming language, as a separate word and in any version.

    JavaScript does not name `Java`, nor C++ or C# `C`; Python names `python3`.
    """
    plain = language.casefold().rstrip(" .0123456789") or language.casefold()
    spellings = {plain, SPELLINGS.get(plain, plain)}
    return any(re.search(rf"(?<!\w){re.escape(name)}(?![^\W\d]|[+#])", text.casefold()) for name in spellings)


def plain(text: str) -> str:
    """Return a text without case, final punctuation and differences of white space."""
    return " ".join(text.casefold().split()).rstrip(".?!")
