"""Laws of the cache of experts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ucp.streaming.cache import Cache


@settings(max_examples=100)
@given(st.integers(1, 5), st.lists(st.integers(0, 8), max_size=60), st.booleans())
def test_a_cache_has_the_hits_of_a_simulator(capacity: int, keys: list[int], history: bool) -> None:
    released: list[int] = []
    cache: Cache[int, int] = Cache(capacity, lambda key, kept: -key, history=history, period=7, release=released.append)
    hits, evicted = 0, []
    counts: dict[int, float] = {}
    kept: list[int] = []  # the oldest first
    for number, key in enumerate(keys, 1):
        if key in kept:
            hits += 1
            counts[key] += 1
        else:
            before = counts.get(key, 0) if history else 0
            victim = min(kept, key=lambda other: counts[other]) if len(kept) == capacity else None
            if victim is not None and (not history or before + 1 > counts[victim]):
                kept.remove(victim)
                evicted.append(-victim)
            if len(kept) < capacity:
                kept.append(key)
            counts[key] = before + 1
        if number % 7 == 0:
            counts = {other: count / 2 for other, count in counts.items()}
        assert cache.get(key) == -key
        assert list(cache) == kept
    assert (cache.hits, cache.misses, released) == (hits, len(keys) - hits, evicted)
