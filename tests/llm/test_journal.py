import asyncio
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.llm import journal as journal_module
from infembed_ray.llm.chat import Completion, RunFailure
from infembed_ray.llm.journal import Journal, decode, encode, has_writer, may_hold, new_segment
from tests.support.chat import completion, request, unreadable

completions = st.builds(
    Completion,
    text=st.text(max_size=60),
    finish_reason=st.sampled_from(["stop", "length"]),
    model=st.text(max_size=5),
    prompt_tokens=st.integers(0, 10**6),
    completion_tokens=st.integers(0, 10**6),
    refusal=st.none() | st.text(max_size=20),
    batched=st.booleans(),
    cached_tokens=st.integers(0, 10**6),
)


@pytest.fixture(autouse=True)
def _syncs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SYNC_EVERY_S", 0.0)


def write(directory: Path, *texts: str) -> None:
    """Append a completion per text, in one new segment."""

    async def append() -> None:
        journal = Journal(directory)
        for text in texts:
            await journal.append(request(text), completion(f"answer to {text}"))
        journal.close()

    asyncio.run(append())


def text_of(journal: Journal, text: str) -> str | None:
    answer = journal.get(request(text).key)
    return answer.text if answer else None


@settings(max_examples=25)
@given(st.lists(st.dictionaries(st.text(max_size=9), completions, max_size=4), max_size=4))
def test_what_was_appended_is_found_again_by_every_later_process(runs: list[dict[str, Completion]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        expected: dict[str, Completion] = {}

        async def append_all() -> None:
            for run in runs:
                journal = Journal(Path(name))
                for text, answered in run.items():
                    if journal.get(*request(text).keys) is None:
                        expected[text] = answered
                        await journal.append(request(text), answered)
                    assert journal.get(*request(text).keys) == replace(expected[text], replayed=True)
                journal.close()

        asyncio.run(append_all())
        reopened = Journal(Path(name))
        assert len(reopened) == len(expected)
        for text, answered in expected.items():
            assert reopened.get(*request(text).keys) == replace(answered, replayed=True)
        assert reopened.get(*request("never asked, and longer than nine").keys) is None


def test_reading_a_journal_creates_no_file(tmp_path: Path) -> None:
    write(tmp_path / "finished", "a")
    journal = Journal(tmp_path / "new", [tmp_path / "finished"])
    assert text_of(journal, "a") == "answer to a"
    assert not (tmp_path / "new").exists()


def test_a_single_file_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_bytes(encode(request("a"), completion("one")) + encode(request("b"), completion("two")))
    before = file.read_bytes()
    journal = Journal(tmp_path / "own", [file])
    assert (text_of(journal, "a"), text_of(journal, "b")) == ("one", "two")
    asyncio.run(journal.append(request("c"), completion("three")))
    assert file.read_bytes() == before


@given(st.data())
def test_a_line_cut_short_at_any_byte_loses_one_completion_with_a_warning(data: st.DataObject) -> None:
    lines = [encode(request(text), completion(f"answer to {text}")) for text in "abc"]
    cut = data.draw(st.integers(1, len(lines[-1]) - 1))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "crashed.jsonl").write_bytes(b"".join(lines)[:-cut])
        with pytest.warns(UserWarning, match="cut short"):
            journal = Journal(directory)
        assert [text_of(journal, text) for text in "abc"] == ["answer to a", "answer to b", None]
        asyncio.run(journal.append(request("c"), completion("asked again")))
        journal.close()
        with pytest.warns(UserWarning, match="cut short"):
            assert text_of(Journal(directory), "c") == "asked again"


@pytest.mark.parametrize("damage", [b"\0" * 40, b"{}", b"[1]", b'{"key": "zz"}', b'{"key": "aa"', b"\xff\xfe"])
def test_a_damaged_line_is_skipped_with_a_warning(tmp_path: Path, damage: bytes) -> None:
    lines = [encode(request(text), completion(f"answer to {text}")) for text in "ab"]
    (tmp_path / "damaged.jsonl").write_bytes(lines[0] + damage + b"\n" + lines[1])
    with pytest.warns(UserWarning, match="1 damaged"):
        journal = Journal(tmp_path)
    assert [text_of(journal, text) for text in "ab"] == ["answer to a", "answer to b"]


def test_a_refresh_finds_what_others_appended_since(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    write(tmp_path, "a")
    assert text_of(journal, "a") is None
    journal.refresh()
    assert text_of(journal, "a") == "answer to a"

    torn = encode(request("b"), completion("answer to b"))
    segment = tmp_path / "being-written.jsonl"
    segment.write_bytes(torn[:20])
    journal.refresh()
    assert text_of(journal, "b") is None
    segment.write_bytes(torn)
    journal.refresh()
    assert text_of(journal, "b") == "answer to b"


def test_a_completion_is_on_disk_before_it_is_used_and_appends_share_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = [0]
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        fsync(descriptor)
        synced.append(size)

    async def append_all() -> None:
        journal = Journal(tmp_path)
        await journal.append(request("first"), completion("opens the segment"))
        [segment] = tmp_path.iterdir()
        monkeypatch.setattr(os, "fsync", watched)

        async def one(number: int) -> None:
            await journal.append(request(str(number)), completion(f"answer to {number}"))
            at = segment.read_bytes().index(f'answer to {number}"'.encode())
            assert max(synced) > at

        await asyncio.gather(*(one(number) for number in range(200)))

    asyncio.run(append_all())
    assert 1 < len(synced) < 50


def test_a_journal_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file" / "journal")
    with pytest.raises(RunFailure, match=r"journal=.*cannot be written"):
        asyncio.run(journal.append(request(), completion("x")))


def test_a_sync_that_finds_no_thread_ends_the_run(tmp_path: Path) -> None:
    async def append() -> None:
        threads = ThreadPoolExecutor()
        threads.shutdown()  # run_in_executor raises RuntimeError, as it does when no thread can be started
        asyncio.get_running_loop().set_default_executor(threads)
        await Journal(tmp_path).append(request(), completion("x"))

    with pytest.raises(RunFailure, match=r"journal=.*cannot be written \(cannot schedule"):
        asyncio.run(append())


def test_a_segment_that_cannot_be_read_ends_the_run(tmp_path: Path) -> None:
    write(tmp_path, "a")
    journal = Journal(tmp_path)
    unreadable(*tmp_path.glob("*.jsonl"))
    with pytest.raises(RunFailure, match=r"journal=.*cannot be read \(Is a directory"):
        journal.get(request("a").key)


def test_a_process_whose_segment_was_removed_ends_the_run(tmp_path: Path) -> None:
    async def append_twice() -> None:
        journal = Journal(tmp_path)
        await journal.append(request("a"), completion("x"))
        for segment in tmp_path.iterdir():
            segment.unlink()
        with pytest.raises(RunFailure, match="removed while in use"):
            await journal.append(request("b"), completion("x"))
        journal.close()

    asyncio.run(append_twice())


def test_an_entry_names_step_row_and_prompt() -> None:
    line = encode(request(row="seed-7", step="query_negative"), completion("x"))
    entry = json.loads(line)
    assert (entry["row"], entry["step"], entry["prompt"]) == ("seed-7", "query_negative", "test=1")
    assert decode(line) == (request().key, replace(completion("x"), replayed=True))
    free = replace(completion("x"), batched=True, cached_tokens=3, usd=0.0)
    assert decode(encode(request(), free)) == (request().key, replace(free, replayed=True))


def test_a_segment_has_a_writer_until_it_is_closed(tmp_path):
    stream, path = new_segment(tmp_path)
    assert has_writer(path)
    stream.close()
    assert not has_writer(path)
    assert not has_writer(tmp_path / "gone.jsonl")


def test_a_partition_skips_only_the_segments_of_other_partitions_of_its_run(tmp_path: Path) -> None:
    for partition in ("1of2", "2of2", None):
        journal = Journal(tmp_path, partition=partition)
        asyncio.run(journal.append(request(str(partition)), completion("x")))
        journal.close()

    def held(partition: str | None) -> list[str]:
        journal = Journal(tmp_path, partition=partition)
        return [text for text in ("1of2", "2of2", "None") if text_of(journal, text)]

    assert held("1of2") == ["1of2", "None"]
    assert held("2of3") == held(None) == ["1of2", "2of2", "None"]


@pytest.mark.parametrize(
    ("name", "partition"),
    [
        ("node-1-17-0123abcd-3of8.jsonl", "3of8"),
        ("node-1-17-0123abcd-3of8.000000000000512.jsonl", "3of8"),
        ("gpu-1of4.cluster-17-0123abcd-3of8.jsonl", "3of8"),
        ("node-1of2-17-0123abcd.jsonl", None),
        ("answers-3of8.jsonl", None),  # named by a user
    ],
)
def test_the_name_of_a_file_tells_the_partition(name: str, partition: str | None) -> None:
    assert [may_hold(name, each) for each in ("3of8", "4of8", "4of9")] == [True, partition is None, True]
