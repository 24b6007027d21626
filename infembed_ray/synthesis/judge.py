"""The judge's three scenarios (paper, section 4.1): which of some shuffled passages fits an instruction and a query?"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from infembed_ray.llm.chat import Malformed
from infembed_ray.synthesis import filters

ORDER = ("negative_query", "negative_instruction", "positive")
"""The scenarios, the most likely to fail first: all three cost the same, and the first failure ends the row.

People found the positive passage relevant, and its instruction was written from it. A negative passage was generated for
its instruction and query and may miss them; with a poisoned query it must also change the subject.
"""

DISTRACTOR = "distractor"
NONE = "none"

_LABEL = re.compile(r"\bAnswer[ \t*_]*[:：]|(?=\\boxed\b)", re.IGNORECASE)
_PICK = re.compile(
    r"(?:\W|_|\b(?:the|final|correct|best|right|most|relevant|answer|is|passage|candidate|document|option|choice|number|no|nr"
    r"|boxed|text|mathbf)\b){0,60}?\b_*(?<![-~.])(?P<pick>none|\d{1,9})(?:st|nd|rd|th)?(?![^\W_])(?![.,:/-]\d|[?%])(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
"""What may come before a pick, the pick, and the rest of the answer."""
_OF_ALL = re.compile(r"^[\W_]*of (?:the|these|those|all)\b(?: \d+)?", re.IGNORECASE)
_DOUBT = re.compile(r"^[\W_]*(?:or|and|to|nor|vs|isn|is not|not|doesn|does not|is wrong)\b|^[\W_]*[&/|]", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.;!](?=\s|$)|\n")


@dataclass(frozen=True)
class Lineup:
    """The candidates of one scenario, in the order in which the judge sees them."""

    names: tuple[str, ...]
    """Per candidate: the scenario whose right answer it is, or DISTRACTOR."""
    passages: tuple[str, ...]

    @property
    def choices(self) -> tuple[str, ...]:
        """The valid answers."""
        return (*(str(number) for number in range(1, len(self.names) + 1)), NONE)

    def __str__(self) -> str:
        return "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(self.passages, start=1))


class Pool(tuple[str, ...]):
    """Distinct passages to draw distractors from."""

    relevant: Mapping[str, Collection[str]] = {}
    """Query (`filters.plain`) -> those that are relevant to it."""

    @classmethod
    def of(cls, passages: Mapping[str, Collection[str]]) -> Pool:
        """Return the pool of passages -> queries to which they are relevant."""
        relevant: defaultdict[str, set[str]] = defaultdict(set)
        for passage, queries in passages.items():
            for query in queries:
                relevant[filters.plain(query)].add(passage)
        pool = cls(passages)
        pool.relevant = dict(relevant)
        return pool


def lineup(
    documents: Mapping[str, str], pool: Sequence[str], distractors: int, *seed: object, query: str = ""
) -> Lineup:
    """Shuffle the row's own passages and random distractors.

    Args:
        documents: scenario -> the passage that is its right answer.
        pool: distinct passages to draw from, but not the positive, nor in a `Pool` what is relevant to an equal query.
        seed: equal values give equal draws and orders on every machine.
    """
    relevant = {documents["positive"], *(pool.relevant.get(filters.plain(query), ()) if isinstance(pool, Pool) else ())}
    rng = random.Random("\0".join(map(str, seed)))
    drawn = (pool[index] for index in rng.sample(range(len(pool)), distractors + 1))
    others = [passage for passage in drawn if passage not in relevant][:distractors]
    if missing := distractors - len(others):
        left = [passage for passage in pool if passage not in relevant.union(others)]
        others += rng.sample(left, min(missing, len(left)))
    candidates = [*sorted(documents.items()), *((DISTRACTOR, passage) for passage in others)]
    rng.shuffle(candidates)
    names, passages = zip(*candidates, strict=True)
    return Lineup(names, passages)


def verdict(text: str, candidates: Lineup) -> str:
    """Return the name of the candidate that an answer picks, or NONE. The last `Answer:` counts, after any reasoning.

    Raises:
        Malformed: the text has no answer, names several candidates, or its number is no candidate's.
    """
    labels = list(_LABEL.finditer(text))
    pick = _PICK.match(text, labels[-1].end()) if labels else None
    if pick is None:
        raise Malformed("Answer:", text)
    picked, rest = pick["pick"].lower(), pick["rest"]
    rest = _OF_ALL.sub("", _SENTENCE_END.split(rest)[0] if re.search(r"[^\W\d_]", rest) else rest)
    others = set(re.findall(r"\d+|\bnone\b", rest.lower())) - {picked}
    if others or _DOUBT.search(rest):
        raise Malformed("Answer: (a single one)", text)
    if picked == NONE:
        return NONE
    if not 1 <= int(picked) <= len(candidates.names):
        raise Malformed(f"Answer: 1..{len(candidates.names)}", text)
    return candidates.names[int(picked) - 1]
