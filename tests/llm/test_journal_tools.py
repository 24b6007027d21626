from pathlib import Path

import pytest

from infembed_ray.cli import main as cli
from infembed_ray.llm.budget import JournalStats
from infembed_ray.llm.journal import encode
from tests.llm.test_journal import write
from tests.support.chat import completion, request


def line(text: str, answer: str) -> bytes:
    return encode(request(text), completion(answer))


def test_a_flipped_bit_in_a_line_is_detected(tmp_path: Path) -> None:
    sound = line("a", "the answer")
    for at in range(0, (len(sound) - len(b', "crc32": "00000000"}\n')) * 8, 7):
        flipped = bytearray(sound)
        flipped[at // 8] ^= 1 << at % 8
        if b"\n" in flipped[:-1]:
            continue
        (tmp_path / "segment.jsonl").write_bytes(flipped)
        stats = JournalStats()
        assert not list(stats.read([tmp_path])), f"bit {at}"
        assert stats.damaged


# ------------------------------------------------------------------------------------------------ the command


def said(capsys: pytest.CaptureFixture[str], status: int, *arguments: object) -> str:
    assert cli.main(["journal", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    text = captured.err if status == 2 else captured.out
    if status == 2:
        assert text.count("\n") == 1
    return text


def test_stats_count_calls_and_tokens_by_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = tmp_path / "one.jsonl"
    segment.write_bytes(
        encode(request("a"), completion("x", "large", (10, 1)))
        + encode(request("b"), completion("x", "large", (20, 2)))
        + encode(request("b"), completion("y", "large", (20, 2)))
        + encode(request("c"), completion("x", "small", (5, 5)))
        + b"no line\n"
        + b"torn"
    )
    text = said(capsys, 1, "stats", tmp_path)
    assert f"3 entries, {segment.stat().st_size} bytes in 1 segment" in text
    assert "large: 2 completions, 30 prompt + 3 completion tokens" in text
    assert "small: 1 completion, 5 prompt + 5 completion tokens" in text
    assert "1 duplicate, 1 torn tail, 1 damaged line" in text


def test_stats_name_each_damaged_line_and_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a")
    assert "0 damaged lines" in said(capsys, 0, "stats", tmp_path)
    (tmp_path / "bad.jsonl").write_bytes(line("b", "x") + line("c", "good").replace(b"good", b"gone"))
    assert "bad.jsonl:2: damaged" in said(capsys, 1, "stats", tmp_path)
    (tmp_path / "worse.jsonl").write_bytes(b"{}\n" * 50)
    assert "and 31 more" in said(capsys, 1, "stats", tmp_path)


def test_bad_arguments_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("stats", "reconcile"):
        assert "DIR=" in said(capsys, 2, action, tmp_path / "nowhere")
    assert "schemes of object stores" in said(capsys, 2, "stats", "ftp://bucket/journal")
