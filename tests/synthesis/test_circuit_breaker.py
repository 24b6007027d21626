import asyncio
from dataclasses import replace

import pytest

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import Completion, Request, RowFailure
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis.pipeline import CircuitBreaker, Kind, Outcome, Spend, synthesize
from tests.support import stand_in_answers

SETTINGS = SynthesizeSettings(seeds="", output="")


def ended(kind: Kind, step: str | None = None, error: str = "HTTP 400: no") -> Outcome:
    return Outcome(kind, {} if step is None else {"step": step, "error": error}, Spend(), Spend())


def test_equal_failures_trip_the_breaker_with_setting_step_count_and_error() -> None:
    breaker = CircuitBreaker(SETTINGS, alike=3)
    assert breaker.add(ended("dead_letter", "judge_positive", "HTTP 400: no 1")) is None
    assert breaker.add(ended("dead_letter", "judge_positive", "HTTP 400: no 2")) is None
    failure = breaker.add(ended("dead_letter", "judge_positive", "HTTP 400: no 3"))
    assert failure is not None
    for part in ("judge.model=o4-mini", "step judge_positive", "first 3 rows", "HTTP 400: no 3"):
        assert part in failure


def test_failures_of_different_kinds_do_not_add_up() -> None:
    breaker = CircuitBreaker(SETTINGS, alike=3)
    for error in (
        "HTTP 400: no",
        "HTTP 422: no",
        "empty answer",
        "HTTP 400: no",
        "no answer within 5 s; tried 7 times",
    ):
        assert breaker.add(ended("dead_letter", "query_negative", error)) is None


def test_a_step_that_one_row_has_passed_never_trips_the_breaker() -> None:
    for passed in (
        ended("rejected", "query_negative"),
        ended("kept"),
        ended("dead_letter", "hard_negative_document_1"),
    ):
        breaker = CircuitBreaker(SETTINGS, alike=3)
        breaker.add(passed)
        assert [breaker.add(ended("dead_letter", "query_negative")) for _ in range(9)] == [None] * 9


def test_failures_at_earlier_steps_do_not_reset_the_count_of_a_later_step() -> None:
    breaker = CircuitBreaker(SETTINGS, alike=3)
    for _ in range(2):
        breaker.add(ended("dead_letter", "judge_positive"))
    for step in ("instruction_positive", "query_negative", "instruction_positive"):
        assert breaker.add(ended("dead_letter", step)) is None
    assert breaker.add(ended("dead_letter", "judge_positive")) is not None


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


def test_replayed_failures_do_not_trip_the_breaker() -> None:
    breaker = CircuitBreaker(SETTINGS, alike=3)
    replayed = replace(ended("dead_letter", "query_negative", "cut off"), from_journal=True)
    assert [breaker.add(replayed) for _ in range(9)] == [None] * 9
    for _ in range(3):
        breaker.add(ended("dead_letter", "query_negative", "cut off"))
    assert breaker.failure is not None


def test_equal_unexpected_exceptions_trip_the_breaker_also_after_a_replayed_answer() -> None:
    breaker = CircuitBreaker(SETTINGS, alike=3)
    unexpected = replace(
        ended("dead_letter", "query_negative", "KeyError: 'x'"), traceback="Traceback", from_journal=True
    )
    assert [breaker.add(unexpected) for _ in range(2)] == [None] * 2
    assert "KeyError: 'x'" in (breaker.add(unexpected) or "")
