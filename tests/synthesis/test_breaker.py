from infembed_ray.config import SynthesizeSettings
from infembed_ray.synthesis.breaker import Breaker
from infembed_ray.synthesis.steps import Kind, Outcome, Spend

SETTINGS = SynthesizeSettings(seeds="", output="")


def ended(kind: Kind, step: str | None = None, error: str = "HTTP 400: no") -> Outcome:
    return Outcome(kind, {} if step is None else {"step": step, "error": error}, Spend(), Spend())


def test_failures_alike_trip_it_and_the_message_names_setting_step_count_and_error() -> None:
    breaker = Breaker(SETTINGS, alike=3)
    assert breaker.add(ended("dead_letter", "judge_positive", "HTTP 400: no 1")) is None
    assert breaker.add(ended("dead_letter", "judge_positive", "HTTP 400: no 2")) is None
    failure = breaker.add(ended("dead_letter", "judge_positive", "HTTP 400: no 3"))
    assert failure is not None
    for part in ("judge.model=o4-mini", "step judge_positive", "first 3 rows", "HTTP 400: no 3"):
        assert part in failure


def test_failures_of_different_kinds_do_not_add_up() -> None:
    breaker = Breaker(SETTINGS, alike=3)
    for error in (
        "HTTP 400: no",
        "HTTP 422: no",
        "empty answer",
        "HTTP 400: no",
        "no answer within 5 s; tried 7 times",
    ):
        assert breaker.add(ended("dead_letter", "query_negative", error)) is None


def test_a_step_that_one_row_has_passed_never_trips_it() -> None:
    for passed in (
        ended("rejected", "query_negative"),
        ended("kept"),
        ended("dead_letter", "hard_negative_document_1"),
    ):
        breaker = Breaker(SETTINGS, alike=3)
        breaker.add(passed)
        assert [breaker.add(ended("dead_letter", "query_negative")) for _ in range(9)] == [None] * 9


def test_a_row_that_failed_earlier_says_nothing_of_a_later_step() -> None:
    breaker = Breaker(SETTINGS, alike=3)
    for _ in range(2):
        breaker.add(ended("dead_letter", "judge_positive"))
    for step in ("seed", "query_negative", "seed"):
        assert breaker.add(ended("dead_letter", step)) is None
    assert breaker.add(ended("dead_letter", "judge_positive")) is not None
