"""Laws of the cache of experts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ucp.streaming.cache import Cache


@settings(max_examples=60)
@given(st.integers(1, 5), st.lists(st.integers(0, 8), max_size=60), st.booleans())
def test_a_cache_never_holds_more_than_it_may(capacity: int, keys: list[int], history: bool) -> None:
    written: list[int] = []
    cache: Cache[int, int] = Cache(
        capacity, lambda key, kept: -key, history=history, period=7, write=lambda key, _: written.append(key)
    )
    changed = set()
    for key in keys:
        assert cache.get(key) == -key
        assert len(list(cache)) <= capacity
        if key in cache and key % 2:
            cache.mark_changed(key)
            changed.add(key)
    assert cache.hits + cache.misses == len(keys)
    cache.clear()
    assert set(written) == changed
