"""Progress in a job log."""

import re
from types import SimpleNamespace

import pytest

from infembed_ray import progress
from infembed_ray.progress import track


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances; every call of `advance` prints a line."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.0)
    return clock


@pytest.mark.parametrize("done", [0, 40])
def test_the_remaining_time_leaves_out_the_start(capsys, clock, done):
    steps, start_s, step_s = 57, 115.0, 10.0
    with track("train", done + steps, done=done) as advance:
        clock.now += start_s
        advance(0, note="starting workers")
        for step in range(1, steps):
            clock.now += step_s + (0.3 if step % 2 else -0.3)
            advance(1, note="loss 1.000")
    starting, first, *others = capsys.readouterr().out.splitlines()
    assert starting == f"train: {done}/{done + steps}  115 s  starting workers"
    assert first == f"train: {done + 1}/{done + steps}  125 s  loss 1.000"
    assert len(others) == steps - 2
    for step, line in enumerate(others, start=2):
        shown, left = map(
            int, re.fullmatch(r"train: (\d+)/\d+  \d+ s, (\d+) s left, until \d\d:\d\d  loss 1.000", line).groups()
        )
        assert (shown, left) == (done + step, pytest.approx((steps - step) * step_s, rel=0.05, abs=0.5))


def test_a_step_with_a_single_burst_of_units_has_no_estimate(capsys, clock):
    with track("search", 10) as advance:
        clock.now += 5
        advance(4)
        advance(6)
    assert capsys.readouterr().out.splitlines() == [
        "search: 4/10  5 s",
        "search: 10/10  5 s",
    ]


def test_a_count_is_singular_for_one():
    assert [progress.counted(n, "worker") for n in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]
    assert progress.counted(1, "query", "queries") == "1 query"
    assert progress.counted(5, "query", "queries") == "5 queries"
