"""A model with scripted answers, and a seed to run it on."""

import asyncio
from collections.abc import Callable

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import Completion, Request
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis import judge
from infembed_ray.synthesis.pipeline import Outcome, synthesize
from tests.support import stand_in_answers

SEED = Seed(
    "seed-1",
    "how do bees make honey",
    "Foragers suck nectar from flowers and carry it home, where house bees dry it and seal it with wax.",
    source="made up",
    topic="bees",
    split="train",
)
POOL = [SEED.passage, *(f"A passage about number {number}, and about nothing else." for number in range(9))]
SETTINGS = SynthesizeSettings(seeds="", output="")
WRITING = [
    "instruction_positive",
    "instruction_negative",
    "query_negative",
    "hard_negative_document_1",
    "hard_negative_document_2",
]
JUDGING = [f"judge_{scenario}" for scenario in judge.ORDER]


class Model:
    """Answers by the stand-in's rules, except at steps with a scripted answer."""

    def __init__(self, **answers: str | Completion | Exception | Callable[[Request], str | Completion]) -> None:
        self.answers = answers
        self.asked: dict[str, Request] = {}
        self.calls: list[Request] = []

    async def __call__(self, request: Request) -> Completion:
        self.asked[request.step] = request
        self.calls.append(request)
        special = self.answers.get(request.step)
        if isinstance(special, Exception):
            raise special
        given = special(request) if callable(special) else special or stand_in_answers.answer(request.body)
        if isinstance(given, Completion):
            return given
        return Completion(given, "stop", f"{request.model}-2026-01-01", 1000, 100)

    def prompt(self, step: str) -> str:
        return self.asked[step].messages[0]["content"]


def outcome(model: Model, settings: SynthesizeSettings = SETTINGS, seed: Seed = SEED) -> Outcome:
    return asyncio.run(synthesize(seed, POOL, settings, model))
