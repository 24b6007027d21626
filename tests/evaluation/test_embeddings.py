import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.evaluation.embeddings import Store, digest

texts = st.lists(st.none() | st.text(max_size=4), max_size=4)


@settings(max_examples=30)
@given(texts, texts)
def test_digests_are_equal_exactly_for_equal_texts_in_the_same_order(one, other):
    assert (digest(one) == digest(other)) == (one == other)


def test_an_array_is_keyed_by_texts_and_model(tmp_path):
    store = Store(tmp_path, "model a")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    store.write(store.file(["x", "y"]), array)
    again = Store(tmp_path, "model a")
    np.testing.assert_array_equal(again.read(again.file(["x", "y"]), 2), array)
    for other, asked in ((store, ["y", "x"]), (store, ["xy"]), (Store(tmp_path, "model b"), ["x", "y"])):
        assert other.read(other.file(asked), 2) is None


def test_a_stored_file_is_a_npy_file_to_numpy(tmp_path):
    store = Store(tmp_path, "model")
    array = np.ones((3, 2), dtype=np.float32)
    store.write(store.file(["x"]), array)
    np.testing.assert_array_equal(np.load(store.file(["x"]), mmap_mode="r"), array)
    assert [file.suffix for file in store.directory.rglob("*") if file.is_file()] == [".npy"]


def without_checksum(content):
    return content[:-16]


def other_bit(content):
    return content[:-40] + bytes([content[-40] ^ 1]) + content[-39:]


def foreign(content):
    stream = io.BytesIO()
    np.save(stream, np.ones((2, 3), dtype=np.float32))
    return stream.getvalue()


@pytest.mark.parametrize("damage", [without_checksum, other_bit, foreign, lambda _: b"", lambda c: c[:50]])
def test_damaged_arrays_are_not_read(damage, tmp_path):
    store = Store(tmp_path, "model")
    file = store.file(["x"])
    store.write(file, np.ones((2, 3), dtype=np.float32))
    file.write_bytes(damage(file.read_bytes()))
    assert store.read(file, 2) is None


def test_arrays_not_finite_or_of_other_height_are_not_read(tmp_path):
    store = Store(tmp_path, "model")
    store.write(store.file(["x"]), np.array([1.0, np.nan]))
    assert store.read(store.file(["x"]), 2) is None
    store.write(store.file(["x"]), np.ones(2))
    assert store.read(store.file(["x"]), 3) is None
    assert store.read(store.file(["x"]), 2) is not None
