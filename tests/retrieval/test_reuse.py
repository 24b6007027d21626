"""Reused vectors against a dictionary of the older version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.retrieval.passages import schema
from infembed_ray.retrieval.reuse import NEW, Base
from infembed_ray.retrieval.shards import Build, shard_of
from tests.retrieval.vectors import unit_vectors
from tests.support.shards import write_shard

PASSAGES = st.dictionaries(st.text("ab\u00e9", max_size=3), st.sampled_from(["x", "y", "z" * 50]), max_size=30)


def write(
    root: Path, texts: dict[str, str], shards: int, factory: str | None = None
) -> tuple[Base, dict[str, np.ndarray]]:
    """A version with these passages; returns it and the vector of each id."""
    ids = list(texts)
    vectors = dict(zip(ids, unit_vectors(len(ids), 8).astype(np.float16), strict=True))
    facts = []
    for number in range(shards):
        own = [id for id in ids if shard_of(id, shards) == number]
        block = np.array([vectors[id] for id in own], np.float16).reshape(-1, 8)
        directory = root / f"shard-{number:05d}"
        facts.append(write_shard(directory, own, [texts[id] for id in own], block, build=Build(factory)))
    return Base(root, tuple(facts)), vectors


def table(texts: dict[str, str]) -> pa.Table:
    """Passages by id ascending."""
    ids = sorted(texts, key=str.encode)
    return pa.table({"id": ids, "text": [texts[id] for id in ids]}, schema({}))


@settings(max_examples=40, deadline=None)
@given(old=PASSAGES, new=PASSAGES.filter(bool), shards=st.integers(1, 4))
def test_passages_with_their_id_and_text_have_their_vector(
    tmp_path_factory: pytest.TempPathFactory, old: dict[str, str], new: dict[str, str], shards: int
) -> None:
    base, vectors = write(tmp_path_factory.mktemp("base"), old, shards)
    passages = table(new)
    rows = base.rows(passages)
    known = [id for id in passages.column("id").to_pylist() if old.get(id) == new[id]]
    assert ((rows == NEW) == [old.get(id) != new[id] for id in passages.column("id").to_pylist()]).all()
    expected = np.array([vectors[id] for id in known], np.float32).reshape(-1, 8)
    np.testing.assert_array_equal(base.vectors(rows[rows != NEW], 8), expected)


def test_vectors_of_a_lossy_type_are_the_originals(tmp_path: Path) -> None:
    texts = {f"p{n}": "x" for n in range(300)}
    base, vectors = write(tmp_path, texts, 2, "IVF2,PQ2x4")
    rows = base.rows(table(texts))
    expected = [vectors[id] for id in sorted(texts)]
    np.testing.assert_array_equal(base.vectors(rows, 8), np.array(expected, np.float32))


def test_nothing_of_a_damaged_shard_is_reused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {f"p{n}": "x" for n in range(20)}
    base, _ = write(tmp_path, texts, 2)
    found = base.rows(table(texts))
    file = tmp_path / "shard-00001" / "index.faiss"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again = Base(base.root, base.shards)
    rows = again.rows(table(texts))
    second = [shard_of(id, 2) == 1 for id in sorted(texts)]
    np.testing.assert_array_equal(rows, np.where(second, NEW, found))
    said = capsys.readouterr().out
    assert "index: no vectors of shard-00001 are reused: index=" in said
    assert "index.faiss" in said
    with pytest.raises(InputError, match="shard-00001 is damaged; set reuse=false"):
        again.vectors(found, 8)
