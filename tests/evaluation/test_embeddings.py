import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.evaluation.chunks import Store, read_all, write
from infembed_ray.evaluation.tasks.corpus import digest
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
    write(store.file(["x", "y"]), array)
    (again,) = read_all([Store(tmp_path, "model a").file(["x", "y"])])
    np.testing.assert_array_equal(again, array)
    for other, asked in ((store, ["y", "x"]), (store, ["xy"]), (Store(tmp_path, "model b"), ["x", "y"])):
        assert not other.file(asked).is_file()


def test_arrays_in_an_object_store_are_those_of_a_directory(bucket, tmp_path):
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "embeddings")
    arrays = [np.full((2, 3), number, dtype=np.float32) for number in range(20)]
    files = []
    for place in (tmp_path, folder):
        store = Store(place, "model")
        files.append([store.file([str(number)]) for number in range(20)])
        for file, array in zip(files[-1], arrays, strict=True):
            write(file, array)
        np.testing.assert_array_equal(list(read_all(files[-1])), arrays)
    for local, stored in zip(*files, strict=True):
        assert read_binary(stored) == local.read_bytes()


@pytest.mark.parametrize("content", [None, b"", b"damaged"])
def test_an_array_that_is_missing_or_damaged_stops_the_search_that_reads_it(tmp_path, content):
    store = Store(tmp_path, "model")
    whole, broken = store.file(["whole"]), store.file(["broken"])
    for file in (whole, broken):
        write(file, np.ones((2, 3)))
    broken.unlink() if content is None else broken.write_bytes(content or broken.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"embeddings=.*npy: missing or damaged"):
        list(read_all([whole, broken]))
