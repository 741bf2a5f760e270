"""Laws of the buffers of Megatron's distributed optimizer."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from ucp_formats.megatron.buffers.layout import BufferLayout, BufferPosition, simulate, walk

NUMELS = st.lists(st.integers(1, 300), min_size=1, max_size=12)


def simulated(data: st.DataObject, numels: list[int]) -> BufferLayout:
    """Parameters of so many elements, in buckets of any size."""
    return simulate(
        numels,
        bucket_numel=data.draw(st.none() | st.integers(1, 500)),
        alignment=data.draw(st.sampled_from((1, 64))),
        separate=data.draw(st.lists(st.integers(0, len(numels) - 1), max_size=2)),
    )


@given(st.data(), NUMELS)
def test_a_walk_undoes_a_simulation(data: st.DataObject, numels: list[int]) -> None:
    """Whatever the size of buckets, contents alone give the layout back."""
    layout = simulated(data, numels)
    contents = [-1] * layout.numel
    for number, start in enumerate(layout.starts):
        contents[start : start + numels[number]] = [number] * numels[number]

    def fitting(place: BufferPosition) -> list[int]:
        stretches = [contents[place.start : place.start + numel] for numel in numels]
        return [number for number, own in enumerate(stretches) if own == [number] * numels[number]]

    expected = tuple(BufferPosition(0, start) for start in layout.starts)
    assert walk(numels, [layout.numel], fitting) == expected
    assert walk(numels, [layout.numel], fitting, last=True) == expected


@given(st.data(), NUMELS)
def test_parameters_do_not_overlap(data: st.DataObject, numels: list[int]) -> None:
    """They lie in reverse order, each in a stretch of its own."""
    layout = simulated(data, numels)
    stretches = sorted((start, start + numels[number], -number) for number, start in enumerate(layout.starts))
    assert [-number for _, _, number in stretches] == list(reversed(range(len(numels))))
    assert all(stop <= start for (_, stop, _), (start, _, _) in itertools.pairwise(stretches))
    assert stretches[-1][1] == layout.numel


@given(st.data(), NUMELS)
def test_parameters_that_are_not_trained_are_passed_over(data: st.DataObject, numels: list[int]) -> None:
    """A parameter that is not in the buffer has no place; the others keep theirs."""
    trained = [number for number in range(len(numels)) if data.draw(st.booleans())]
    layout = simulate([numels[number] for number in trained]) if trained else None
    starts = dict(zip(trained, layout.starts, strict=True)) if layout else {}
    total = layout.numel if layout else 0
    found = walk(numels, [total], lambda place: [n for n, start in starts.items() if place == BufferPosition(0, start)])
    assert found == tuple(BufferPosition(0, starts[n]) if n in starts else None for n in range(len(numels)))
