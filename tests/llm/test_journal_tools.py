import asyncio
import os
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.cli import main as cli
from infembed_ray.errors import InputError
from infembed_ray.llm.journal import Journal, encode
from infembed_ray.llm.journal_tools import compact, scan
from tests.llm.test_journal import text_of, write
from tests.support.chat import completion, request

REPOSITORY = Path(__file__).parents[2]


def line(text: str, answer: str) -> bytes:
    return encode(request(text), completion(answer))


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.jsonl"))}


def quietly(directory: Path) -> Journal:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Journal(directory)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from("abcdef"), st.sampled_from(["one", "two"]))
            | st.sampled_from([b'{"key": "\0\0\n', b'{"key": "00"}\n', b'{"key": "\xff"}\n']),
            max_size=6,
        ),
        max_size=5,
    ),
    st.integers(0, 100),
)
def test_compaction_keeps_every_answer_in_one_undamaged_segment(
    contents: list[list[tuple[str, str] | bytes]], torn: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for number, content in enumerate(contents):
            lines = [each if isinstance(each, bytes) else line(*each) for each in content]
            tail = line("a", "torn")[:torn] if number == 0 else b""
            (directory / f"{number}.jsonl").write_bytes(b"".join(lines) + tail)
        before = quietly(directory)
        answers = {text: text_of(before, text) for text in "abcdef"}
        compact(directory)
        after = scan(directory)
        assert (after.duplicates, after.torn, after.damaged) == (0, 0, [])
        assert after.segments == (1 if any(answers.values()) else 0)
        assert after.entries == len(before)
        reopened = Journal(directory)
        assert {text: text_of(reopened, text) for text in "abcdef"} == answers
        held = files(directory)
        compact(directory)
        assert files(directory) == held


def test_a_compaction_waits_for_the_end_of_a_run(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    write(tmp_path, "b", "c")
    living = Journal(tmp_path)
    asyncio.run(living.append(request("d"), completion("answer to d")))
    held = files(tmp_path)
    with pytest.raises(InputError, match="a run writes to it"):
        compact(tmp_path)
    assert {name: text for name, text in files(tmp_path).items() if name in held} == held
    living.close()
    assert compact(tmp_path).segments == 3
    assert [text_of(Journal(tmp_path), text) for text in "abcd"] == [f"answer to {text}" for text in "abcd"]


@pytest.mark.parametrize("last_call", range(12))
def test_a_crash_at_any_moment_of_a_compaction_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_call: int
) -> None:
    """Crash at one of the compaction's syncs or removals."""
    for texts in ("ab", "bc", "cd"):
        write(tmp_path, *texts)
    calls = 0

    class Crash(BaseException):
        pass

    def counted(really):  # type: ignore[no-untyped-def]
        def call(*arguments):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls > last_call:
                raise Crash
            return really(*arguments)

        return call

    with monkeypatch.context() as crashing:
        crashing.setattr(os, "fsync", counted(os.fsync))
        crashing.setattr(os, "unlink", counted(os.unlink))
        crashing.setattr(Path, "unlink", counted(Path.unlink))
        try:
            compact(tmp_path)
        except Crash:
            pass
        else:
            assert calls <= last_call
    journal = quietly(tmp_path)
    assert [text_of(journal, text) for text in "abcd"] == [f"answer to {text}" for text in "abcd"]
    compact(tmp_path)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1
    assert [text_of(Journal(tmp_path), text) for text in "abcd"] == [f"answer to {text}" for text in "abcd"]


def test_a_directory_with_other_jsonl_files_is_not_changed(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "a")
    (tmp_path / "seeds.jsonl").write_text('{"id": "1", "query": "q", "passage": "p"}\n')
    held = files(tmp_path)
    with pytest.raises(InputError, match=r"seeds.jsonl is no segment"):
        compact(tmp_path)
    assert files(tmp_path) == held


def test_a_flipped_bit_in_a_line_is_detected(tmp_path: Path) -> None:
    sound = line("a", "the answer")
    for at in range(0, (len(sound) - len(b', "crc32": "00000000"}\n')) * 8, 7):
        flipped = bytearray(sound)
        flipped[at // 8] ^= 1 << at % 8
        if b"\n" in flipped[:-1]:
            continue
        (tmp_path / "segment.jsonl").write_bytes(flipped)
        assert scan(tmp_path).damaged, f"bit {at}"


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
    (tmp_path / "worse.jsonl").unlink()
    said(capsys, 0, "compact", tmp_path)
    assert "2 entries" in said(capsys, 0, "stats", tmp_path)


def test_bad_arguments_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("stats", "compact"):
        assert "DIR=" in said(capsys, 2, action, tmp_path / "nowhere")
    assert "schemes of object stores" in said(capsys, 2, "stats", "ftp://bucket/journal")
