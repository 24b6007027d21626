"""Progress in a job log."""

import re
from itertools import count

from infembed_ray import progress
from infembed_ray.progress import track


def test_what_was_done_before_says_nothing_of_how_long_the_rest_takes(capsys, monkeypatch):
    clock = count(start=100, step=2)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.0)
    with track("train", 110, done=100) as advance:
        advance(2)
    first = capsys.readouterr().out.splitlines()[0]
    done, seconds, left = map(int, re.fullmatch(r"train: (\d+)/110  (\d+) s, (\d+) s left", first).groups())
    assert (done, left) == (102, 4 * seconds)
