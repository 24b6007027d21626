import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.evaluation.embeddings import Store, digest
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import read_binary

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


def test_arrays_in_an_object_store_are_those_of_a_directory(bucket, tmp_path):
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "embeddings")
    arrays = [np.full((2, 3), number, dtype=np.float32) for number in range(20)]
    files = []
    for place in (tmp_path, folder):
        store = Store(place, "model")
        files.append([store.file([str(number)]) for number in range(20)])
        assert not any(store.holds(file, 2) for file in files[-1])
        for file, array in zip(files[-1], arrays, strict=True):
            store.write(file, array)
        assert all(store.holds(file, 2) for file in files[-1])
        read = list(store.read_all([(file, 2) for file in files[-1]]))
        np.testing.assert_array_equal(read, arrays)
    for local, stored in zip(*files, strict=True):
        assert read_binary(stored) == local.read_bytes()


@pytest.mark.parametrize("content", ["", "damaged"])
def test_an_array_that_is_missing_or_damaged_stops_the_search_that_reads_it(bucket, tmp_path, content):
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "embeddings")
    store = Store(folder, "model")
    whole, broken = store.file(["whole"]), store.file(["broken"])
    store.write(whole, np.ones((2, 3)))
    if content:
        broken.parent.write(broken.name, content)
    arrays = store.read_all([(whole, 2), (broken, 2)])
    with pytest.raises(InputError, match=r"embeddings=s3://.*npy: missing or damaged"):
        list(arrays)
