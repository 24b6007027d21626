"""What a log survives: who follows it while it is cut, a kill while it is rewritten, a disk that is full."""

import resource
import signal

import pytest

from infembed_ray.training.json_lines import append, read, rewrite


def test_who_follows_begins_anew_where_no_line_ends_any_more(tmp_path):
    path = tmp_path / "log"
    rewrite(path, ["a", "b"])
    _, end = read(path)
    rewrite(path, ["c" * 20, "d"])
    assert read(path, end)[0] == ["c" * 20, "d"]


def test_whoever_is_killed_while_rewriting_leaves_the_log_as_it_was(tmp_path):
    path = tmp_path / "log"
    rewrite(path, [1, 2])

    def killed():
        yield 1
        raise InterruptedError

    with pytest.raises(InterruptedError):
        rewrite(path, killed())
    assert read(path)[0] == [1, 2]


def test_where_there_is_no_room_lines_are_left_out_whole_and_that_is_said_once(tmp_path, capsys):
    path = tmp_path / "log"
    append(path, "before")
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
        append(path, "cut in its midst")
        append(path, "left out, too")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    append(path, "after")
    assert read(path)[0] == ["before", "after"]
    said = capsys.readouterr().out
    assert said.startswith("train: warning: log lacks lines")
    assert said.count("\n") == 1
