"""Cache of the most recently used entries."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Entries whose sizes add up to `size`, at most `max_size`: the least recently used ones make room."""

    def __init__(self, max_size: int, size_of: Callable[[K, V], int]) -> None:
        self.max_size, self.size = max_size, 0
        self._size_of = size_of
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """Return the value of a key, which becomes the most recently used one; None: it is not there."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Add an entry; a key that is there keeps its value."""
        if key not in self._entries:
            self._entries[key] = value
            self.size += self._size_of(key, value)
        while self.size > self.max_size:
            self.size -= self._size_of(*self._entries.popitem(last=False))
