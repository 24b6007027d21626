"""Logs of a run: what is read is what was written, also while it grows, after a resume and on a full disk."""

import resource
import signal

from infembed_ray.training.observability.logs import (
    METRICS,
    Event,
    append_event,
    append_metrics,
    begin,
    read_events,
    read_lines,
    read_metrics,
)


def write(directory, *steps):
    for step in steps:
        append_metrics(directory, {"step": step})


def steps(directory):
    return [line["step"] for line in read_metrics(directory)]


def test_a_resumed_run_removes_the_steps_that_it_repeats_even_if_lines_are_missing(tmp_path):
    begin(tmp_path, 0)
    write(tmp_path, 1, 3, 4)
    events = [Event(n, kind, "warn", "said") for n, kind in ((3, "no_negatives"), (4, "tracker"), (4, "state"))]
    for event in events:
        append_event(tmp_path, event)
    begin(tmp_path, 3)
    assert steps(tmp_path) == [1, 3]
    *kept, resumed = read_events(tmp_path)
    assert kept == [events[0], events[2]]  # what concerns the run stays
    assert (resumed.step, resumed.kind, resumed.action) == (3, "resumed", "note")


def test_only_whole_lines_are_read_and_only_newlines_end_them(tmp_path):
    assert read_metrics(tmp_path) == []
    append_metrics(tmp_path, {"step": 1, "text": "a\u2028b"})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "text": "a\u2028b"}]


def test_reader_gets_new_lines_and_restarts_when_the_log_is_rewritten(tmp_path):
    assert read_lines(tmp_path / METRICS, 0) == ([], 0)
    write(tmp_path, 1)
    lines, end = read_lines(tmp_path / METRICS, 0)
    assert lines == [{"step": 1}]
    assert read_lines(tmp_path / METRICS, end) == ([], end)
    write(tmp_path, 2, 3)
    lines, end = read_lines(tmp_path / METRICS, end)
    assert lines == [{"step": 2}, {"step": 3}]
    begin(tmp_path, 1)
    assert read_lines(tmp_path / METRICS, end)[0] == [{"step": 1}]


def test_full_disk_drops_whole_lines_with_one_warning(tmp_path, capsys):
    write(tmp_path, 1)
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 5, limits[1]))
        write(tmp_path, 2, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    write(tmp_path, 4)
    assert steps(tmp_path) == [1, 4]
    printed = capsys.readouterr().out
    assert printed.startswith("train: warning: lines of metrics.jsonl are missing")
    assert printed.count("\n") == 1
