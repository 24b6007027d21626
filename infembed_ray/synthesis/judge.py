"""The judge's three scenarios (paper, section 4.1): which of some shuffled passages fits an instruction and a query?"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infembed_ray.llm.chat import Malformed

ORDER = ("negative_query", "negative_instruction", "positive")
"""The scenarios, the most likely to fail first: all three cost the same, and the first failure ends the row.

People found the positive passage relevant, and its instruction was written from it. A negative passage was generated for
its instruction and query and may miss them; with a poisoned query it must also change the subject.
"""

DISTRACTOR = "distractor"
NONE = "none"


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


def lineup(documents: Mapping[str, str], pool: Sequence[str], distractors: int, *seed: object) -> Lineup:
    """Shuffle the row's own passages and random distractors.

    Args:
        documents: scenario -> the passage that is its right answer.
        pool: distinct passages to draw from, more than `distractors`; the row's positive is never drawn.
        seed: equal values give equal draws and orders on every machine.
    """
    rng = random.Random("\0".join(map(str, seed)))
    drawn = (pool[index] for index in rng.sample(range(len(pool)), distractors + 1))
    others = [passage for passage in drawn if passage != documents["positive"]][:distractors]
    candidates = [*sorted(documents.items()), *((DISTRACTOR, passage) for passage in others)]
    rng.shuffle(candidates)
    names, passages = zip(*candidates, strict=True)
    return Lineup(names, passages)


def verdict(text: str, candidates: Lineup) -> str:
    """Return the name of the candidate that an answer picks, or NONE. The last `Answer:` counts, after any reasoning.

    Raises:
        Malformed: the text has no answer, or its number is no candidate's.
    """
    answers: list[str] = re.findall(r"\bAnswer[ \t*]*:[ \t*\[]*(none\b|\d{1,9})", text, re.IGNORECASE)
    if not answers:
        raise Malformed("Answer:", text)
    if answers[-1].lower() == "none":
        return NONE
    number = int(answers[-1])
    if not 1 <= number <= len(candidates.names):
        raise Malformed(f"Answer: 1..{len(candidates.names)}", text)
    return candidates.names[number - 1]
