"""Where parameters start in a flat buffer."""

from __future__ import annotations

from ucp_formats.megatron.buffer_layout import BufferRule, Place, bucket_multiple, simulate, walk


def known(starts: tuple[int, ...]) -> object:
    """A buffer whose every parameter is recognised, and nothing else."""
    return lambda number, place: place == Place(0, starts[number])


def test_parameters_are_laid_out_backwards_and_aligned() -> None:
    found = simulate([10, 20, 64], BufferRule())
    assert found.starts == (128, 64, 0)
    assert found.numel == 138


def test_before_alignment_they_were_end_to_end() -> None:
    assert simulate([10, 20, 64], BufferRule(alignment=1)).starts == (84, 64, 0)


def test_a_full_bucket_is_closed_without_its_padding() -> None:
    found = simulate([10, 20, 30], BufferRule(bucket_numel=25))
    assert found.starts == (94, 30, 0)  # the first bucket ends at 30; in the second, 20 elements, then aligned


def test_padding_may_be_kept() -> None:
    found = simulate([10, 20], BufferRule(bucket_numel=1, bucket_multiple=8, alignment=1, keeps_padding=True))
    assert (found.starts, found.numel) == ((24, 0), 40)


def test_a_tied_embedding_has_a_bucket_of_its_own() -> None:
    found = simulate([10, 70, 20], BufferRule(apart=frozenset({1})))
    assert found.starts == (134, 64, 0)  # what was before it ends where it would have started


def test_multiples() -> None:
    assert (bucket_multiple(1), bucket_multiple(3), bucket_multiple(3, for_busbw=True)) == (128, 384, 196608)


def test_a_walk_finds_what_was_simulated() -> None:
    numels = [10, 20, 30, 64]
    found = simulate(numels, BufferRule(bucket_numel=25))
    places = walk(numels, [found.numel], known(found.starts))
    assert places == tuple(Place(0, start) for start in found.starts)


def test_a_walk_leaves_out_what_is_not_there() -> None:
    numels = [10, 20, 30]
    found = simulate([10, 30], BufferRule())
    places = walk(numels, [found.numel], lambda n, place: n != 1 and place.start == {0: 64, 2: 0}[n])
    assert places == (Place(0, 64), None, Place(0, 0))


def test_a_walk_turns_back_where_contents_deceive() -> None:
    numels = [5, 7, 70]
    found = simulate(numels, BufferRule(alignment=1))
    # the last fits twice: aligned, where it is not, and right after, where it is
    places = walk(
        numels, [found.numel], lambda n, place: place.start == found.starts[n] or (n == 1 and place.start == 128)
    )
    assert places == tuple(Place(0, start) for start in found.starts)


def test_buckets_may_be_tensors_of_their_own() -> None:
    numels = [3, 4, 5]
    at = {0: Place(1, 4), 1: Place(1, 0), 2: Place(0, 0)}
    places = walk(numels, [8, 8], lambda n, place: place == at[n], slack=7)
    assert places == (at[0], at[1], at[2])


def test_there_may_be_no_layout() -> None:
    assert walk([3, 4], [7], lambda n, place: False) is None
    assert walk([3, 4], [8], lambda n, place: True) is None  # one element belongs to nothing
    assert walk([3, 4], [8], lambda n, place: place.start == {1: 0, 0: 4}[n], slack=1) is not None
