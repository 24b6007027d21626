"""JSON line logs while they are rewritten, after a failed rewrite, and on a full disk."""

import resource
import signal

import pytest

from infembed_ray.training.observability.json_lines import append, read, rewrite


def test_reader_restarts_when_its_offset_is_no_longer_a_line_end(tmp_path):
    path = tmp_path / "log"
    rewrite(path, ["a", "b"])
    _, end = read(path)
    rewrite(path, ["c" * 20, "d"])
    assert read(path, end)[0] == ["c" * 20, "d"]


def test_failed_rewrite_keeps_the_old_log(tmp_path):
    path = tmp_path / "log"
    rewrite(path, [1, 2])

    def killed():
        yield 1
        raise InterruptedError

    with pytest.raises(InterruptedError):
        rewrite(path, killed())
    assert read(path)[0] == [1, 2]


def test_full_disk_drops_whole_lines_with_one_warning(tmp_path, capsys):
    path = tmp_path / "log"
    append(path, "before")
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
        append(path, "cut in the middle")
        append(path, "dropped, too")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    append(path, "after")
    assert read(path)[0] == ["before", "after"]
    printed = capsys.readouterr().out
    assert printed.startswith("train: warning: lines of log are missing")
    assert printed.count("\n") == 1
