import asyncio
from typing import Any

import pytest

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import Completion, Request, RowFailure
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis.pipeline import CircuitBreaker, Kind, Outcome, Spend, synthesize
from tests.support import stand_in_answers

SETTINGS = SynthesizeSettings(seeds="", output="")


def ended(kind: Kind, step: str | None = None, error: str = "HTTP 400: no", **more: Any) -> Outcome:
    return Outcome(kind, {} if step is None else {"step": step, "error": error}, Spend(), Spend(), **more)


def dead(step: str, error: str = "HTTP 400: no", times: int = 1, **more: Any) -> list[Outcome]:
    return [ended("dead_letter", step, error, **more)] * times


LATER, EARLY = "judge_positive", "query_negative"
DIFFERENT = ("HTTP 400: no", "HTTP 422: no", "empty answer", "HTTP 400: no", "no answer within 5 s; tried 7 times")
CASES = {
    "failures of different kinds": ([each for error in DIFFERENT for each in dead(EARLY, error)], False),
    "a rejected row passed the step": ([ended("rejected", EARLY), *dead(EARLY, times=9)], False),
    "a kept row passed the step": ([ended("kept"), *dead(EARLY, times=9)], False),
    "a later failure passed the step": ([*dead("hard_negative_document_1"), *dead(EARLY, times=9)], False),
    "failures at earlier steps between": ([*dead(LATER, times=2), *dead("instruction_positive"), *dead(LATER)], True),
    "replayed failures": (dead(EARLY, "cut off", 9, from_journal=True), False),
    "new failures after replayed ones": (
        [*dead(EARLY, "cut off", 9, from_journal=True), *dead(EARLY, "cut off", 3)],
        True,
    ),
    "exceptions after a replayed answer": (dead(EARLY, "KeyError", 3, from_journal=True, traceback="Traceback"), True),
}


@pytest.mark.parametrize("case", CASES)
def test_the_breaker_trips_at_the_last_outcome_or_not_at_all(case: str) -> None:
    outcomes, trips = CASES[case]
    breaker = CircuitBreaker(SETTINGS, alike=3)
    tripped = [breaker.add(outcome) is not None for outcome in outcomes]
    assert tripped == [False] * (len(outcomes) - 1) + [trips]


def test_equal_failures_trip_the_breaker_with_setting_step_count_and_error() -> None:
    breaker = CircuitBreaker(SETTINGS, alike=3)
    said = [breaker.add(*dead(LATER, f"HTTP 400: no {number}")) for number in (1, 2, 3)]
    assert said[:2] == [None, None]
    for part in ("judge.model=o4-mini", "step judge_positive", "first 3 rows", "HTTP 400: no 3"):
        assert part in (said[2] or "")


@pytest.mark.parametrize(
    ("every", "in_flight", "trips"),
    [(5, 64, False), (5, 256, False), (1, 64, True)],
    ids=["some fail", "some of many fail", "all fail"],
)
@pytest.mark.integration
@pytest.mark.parametrize("failing", ["instruction_positive", "query_negative"])
def test_rows_in_progress_prevent_early_failures_from_tripping_the_breaker(
    failing: str, every: int, in_flight: int, trips: bool
) -> None:
    """Failures arrive at once, answers are slow, and no passing row has ended yet."""
    settings = SynthesizeSettings(seeds="", output="", in_flight=in_flight)
    breaker = CircuitBreaker(settings)
    rows = 3 * in_flight
    failed = 0

    async def run() -> None:
        slots, all_failed = asyncio.Semaphore(in_flight), asyncio.Event()

        async def answer(request: Request) -> Completion:
            if request.step == "hard_negative_document_2":
                await asyncio.Event().wait()
            async with slots:
                if request.step == failing and int(request.row) % every == 0:
                    raise RowFailure("HTTP 400: filtered")
                await asyncio.sleep(0.02)
            return Completion(stand_in_answers.answer(request.body), "stop", "small", 10, 10)

        async def one(number: int) -> None:
            nonlocal failed
            query = f"how do bees make honey in summer {number}"
            seed = Seed(str(number), query, "House bees dry the nectar and seal it.", source="made up")
            outcome = await synthesize(seed, [f"passage {n}" for n in range(9)], settings, breaker.watch(answer))
            assert outcome.kind == "dead_letter"
            breaker.add(outcome)
            failed += 1
            if failed == len(range(0, rows, every)):
                all_failed.set()

        tasks = [asyncio.create_task(one(number)) for number in range(rows)]
        await asyncio.wait_for(all_failed.wait(), 60)
        assert sum(task.done() for task in tasks) in (failed - 1, failed)  # the others are still in progress

    asyncio.run(run())
    assert (breaker.failure is not None) == trips
