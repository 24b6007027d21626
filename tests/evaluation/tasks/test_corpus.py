"""A corpus is converted once and memory-mapped, and its ids are unique."""

import os
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.storage.object_store import SCRATCH


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source file of documents."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("1", encoding="utf-8")
    return path


def test_the_same_files_are_converted_once(source: Path) -> None:
    first = mapped("task", [source], lambda: iter([("a", " one\n"), ("b", "two")]))

    def again() -> Iterator[tuple[str, str]]:
        raise AssertionError("read again")

    assert mapped("task", [source], again).equals(first)
    assert first.to_pylist() == [{"id": "a", "text": "one"}, {"id": "b", "text": "two"}]


def test_a_changed_file_is_converted_again(source: Path) -> None:
    mapped("task", [source], lambda: iter([("a", "old")]))
    os.utime(source, ns=(1, 1))

    assert mapped("task", [source], lambda: iter([("a", "new")]))["text"].to_pylist() == ["new"]


def test_a_failed_conversion_leaves_no_file(source: Path, scratch: Path) -> None:
    def documents() -> Iterator[tuple[str, str]]:
        yield "a", "one"
        raise InputError("line 2 is damaged")

    with pytest.raises(InputError, match="line 2 is damaged"):
        mapped("task", [source], documents)

    assert not list((scratch / "corpora").iterdir())


class Text(str):
    """A text that a weak reference can follow."""


@pytest.mark.integration
def test_texts_are_never_all_in_memory(source: Path) -> None:
    size, length = 30_000, 1000
    alive: WeakSet[Text] = WeakSet()  # counts only this test's texts; tracemalloc counts those of every thread
    most = 0

    def documents() -> Iterator[tuple[str, str]]:
        nonlocal most
        for n in range(size):
            text = Text(f"{n:0{length}}")
            alive.add(text)
            most = max(most, len(alive))
            yield str(n), text

    before = pa.total_allocated_bytes()
    corpus = mapped("task", [source], documents)

    assert len(corpus) == size
    assert corpus["text"][size - 1].as_py() == f"{size - 1:0{length}}"
    assert 0 < most < size / 3
    assert pa.total_allocated_bytes() - before < size * length / 10


@settings(max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_duplicate_documents_are_dropped(numbers: list[int]) -> None:
    source = Path(os.environ[SCRATCH]).parent / "corpus.jsonl"
    source.write_text(str(numbers), encoding="utf-8")

    corpus = mapped("task", [source], lambda: ((f"d{n}", f"text {n}") for n in numbers))

    assert corpus["id"].to_pylist() == [f"d{n}" for n in dict.fromkeys(numbers)]
    assert corpus["text"].to_pylist() == [f"text {n}" for n in dict.fromkeys(numbers)]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "the corpus is empty"),
        ([("a", "one"), ("", "two")], "document 2 has an empty id"),
        ([("a", "one"), ("b", "two"), ("a", "three")], "two documents have the id a"),
    ],
)
def test_invalid_corpora_are_rejected(source: Path, documents: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(InputError, match=f"tasks=task: {message}"):
        mapped("task", [source], lambda: iter(documents))
