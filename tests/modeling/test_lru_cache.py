"""The LRU cache beside a list of its keys in order of use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.modeling.lru_cache import LruCache


@given(st.lists(st.tuples(st.sampled_from(["get", "put"]), st.integers(0, 5), st.integers(0, 4))), st.integers(0, 10))
def test_it_holds_the_longest_run_of_recent_entries_that_fits(steps: list[tuple[str, int, int]], limit: int) -> None:
    cache = LruCache[int, int](limit, lambda _, size: size)
    expected: list[tuple[int, int]] = []  # least recently used first
    for step, key, size in steps:
        held = dict(expected)
        if step == "get":
            assert cache.get(key) == held.get(key)
            if key in held:
                expected.remove((key, held[key]))
                expected.append((key, held[key]))
        else:
            cache.put(key, size)
            if key not in held:
                expected.append((key, size))
            while sum(size for _, size in expected) > limit:
                expected.pop(0)
        assert cache.size == sum(size for _, size in expected)
        assert [key for key in range(6) if key in cache] == sorted(key for key, _ in expected)
