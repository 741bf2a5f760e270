"""Where parameters start in a flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ucp_formats.megatron.buffers.layout import BufferPosition, simulate, walk

Fitting = Callable[[BufferPosition], Sequence[int]]


def where(count: int, holds: Callable[[int, BufferPosition], bool]) -> Fitting:
    """Parameters of `count` that a place holds."""
    return lambda place: [number for number in range(count) if holds(number, place)]


def test_a_walk_leaves_out_what_is_not_there() -> None:
    numels = [10, 20, 30]
    found = simulate([10, 30])
    places = walk(numels, [found.numel], where(3, lambda n, place: n != 1 and place.start == {0: 64, 2: 0}[n]))
    assert places == (BufferPosition(0, 64), None, BufferPosition(0, 0))


def test_a_walk_turns_back_where_contents_deceive() -> None:
    numels = [5, 7, 70]
    found = simulate(numels, alignment=1)
    # the last fits twice: aligned, where it is not, and right after, where it is
    fitting = where(3, lambda n, place: place.start == found.starts[n] or (n == 1 and place.start == 128))
    places = walk(numels, [found.numel], fitting)
    assert places == tuple(BufferPosition(0, start) for start in found.starts)


def test_buckets_may_be_tensors_of_their_own() -> None:
    numels = [3, 4, 5]
    at = {0: BufferPosition(1, 4), 1: BufferPosition(1, 0), 2: BufferPosition(0, 0)}
    places = walk(numels, [8, 8], where(3, lambda n, place: place == at[n]), slack=7)
    assert places == (at[0], at[1], at[2])


def test_there_may_be_no_layout() -> None:
    assert walk([3, 4], [7], lambda place: []) is None
    assert walk([3, 4], [8], lambda place: [0, 1]) is None  # one element belongs to nothing
    assert walk([3, 4], [8], where(2, lambda n, place: place.start == {1: 0, 0: 4}[n]), slack=1) is not None


def test_the_last_walk_is_the_first_where_all_are_trained() -> None:
    """Three norms between weights, all equal: as many places as parameters leave no choice."""
    numels = [64] * 5
    weights = {0: 256, 4: 0}
    fitting = where(5, lambda n, place: place.start == weights[n] if n in weights else 0 < place.start < 256)
    first = walk(numels, [320], fitting)
    assert first == walk(numels, [320], fitting, last=True)
    assert first == tuple(BufferPosition(0, start) for start in (256, 192, 128, 64, 0))


def test_the_last_walk_is_another_where_one_of_equal_ones_is_not_trained() -> None:
    numels = [64] * 4
    weights = {0: 128, 3: 0}
    fitting = where(4, lambda n, place: place.start == weights[n] if n in weights else place.start == 64)
    assert walk(numels, [192], fitting) == (BufferPosition(0, 128), None, BufferPosition(0, 64), BufferPosition(0, 0))
    assert walk(numels, [192], fitting, last=True) == (
        BufferPosition(0, 128),
        BufferPosition(0, 64),
        None,
        BufferPosition(0, 0),
    )
