import hashlib
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.llm import journal
from infembed_ray.llm.journal import JournalIndex


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


places = st.tuples(st.integers(0, 2**20 - 1), st.integers(0, 2**44 - 1))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 60), places), max_size=150), st.sampled_from([1, 2, 3, 7, 1000]), st.data())
def test_the_index_behaves_like_a_dict_with_setdefault(
    added: list[tuple[int, tuple[int, int]]], recent: int, data: st.DataObject
) -> None:
    expected: dict[int, tuple[int, int]] = {}
    index = JournalIndex()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "RECENT", recent)
        for number, place in added:
            index.add(key(number), *place)
            expected.setdefault(number, place)
        if data.draw(st.booleans()):
            assert len(index) == len(expected)
        assert all(index.find(key(number)) == expected.get(number) for number in range(62))


def test_an_entry_takes_about_16_bytes() -> None:
    keys = [key(number) for number in range(60_000)]
    tracemalloc.start()
    try:
        index = JournalIndex()
        for number, each in enumerate(keys):
            index.add(each, 3, number * 1000)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 60_000 * 16 + 600_000  # and the recent ones in their dict
    assert index.find(keys[41]) == (3, 41_000)
    assert len(index) == 60_000
