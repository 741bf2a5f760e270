"""Laws of sharing out: every element is read once, nothing overlaps, and the shares are equal."""

from hypothesis import given
from hypothesis import strategies as st

from ucp.core.target import Slice
from ucp.core.tensor import DType
from ucp.live.exchange.read_shares import ALIGNMENT, share_out

DTYPES = st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.UINT8, DType.INT64, DType.COMPLEX128])


def flat(dtype: DType, start: int, numel: int, state: str = "weight") -> Slice:
    stop = start + numel
    return Slice(param="p", state=state, dtype=dtype, pairs=(), local_shape=(stop,), start=start, stop=stop)


SLICES = st.lists(
    st.builds(flat, DTYPES, st.integers(0, 9), st.integers(0, 400), st.sampled_from(["weight", "exp_avg"])), max_size=8
)
ROUNDS = st.none() | st.integers(1, 300)


def parts(window, readers):
    return [[s for n in range(window.rounds) for s in window.read_by(reader, n)] for reader in range(readers)]


@given(slices=SLICES, readers=st.integers(1, 5), part_nbytes=st.integers(1, 900), round_nbytes=ROUNDS, data=st.data())
def test_every_element_is_in_exactly_one_part(slices, readers, part_nbytes, round_nbytes, data):
    costs = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=len(slices), max_size=len(slices)))
    done = [data.draw(st.integers(own.start, own.stop)) for own in slices] if data.draw(st.booleans()) else []
    windows = share_out(
        slices, costs=costs, readers=readers, part_nbytes=part_nbytes, round_nbytes=round_nbytes, done=done
    )
    seen = sorted(
        (s.slice_number, e) for w in windows for part in parts(w, readers) for s in part for e in range(s.start, s.stop)
    )
    starts = done or [own.start for own in slices]
    assert seen == [(at, e) for at, own in enumerate(slices) for e in range(starts[at], own.stop)]


@given(slices=SLICES, readers=st.integers(1, 5), part_nbytes=st.integers(1, 900), round_nbytes=ROUNDS)
def test_segments_lie_in_their_round_one_after_another(slices, readers, part_nbytes, round_nbytes):
    shares = share_out(
        slices, costs=[1.0] * len(slices), readers=readers, part_nbytes=part_nbytes, round_nbytes=round_nbytes
    )
    for window in shares:
        assert window.part_nbytes % ALIGNMENT == window.round_nbytes % ALIGNMENT == 0
        assert window.part_nbytes <= max(part_nbytes, ALIGNMENT)
        assert window.rounds * window.round_nbytes >= window.part_nbytes
        for reader in range(readers):
            for number in range(window.rounds):
                at = 0
                for segment in window.read_by(reader, number):
                    assert segment.offset >= at
                    assert segment.offset % segment.itemsize == 0
                    at = segment.offset + segment.nbytes
                assert at <= window.round_nbytes


@given(numel=st.integers(1, 5000), readers=st.integers(1, 7), part_nbytes=st.integers(16, 1024), round_nbytes=ROUNDS)
def test_shares_of_one_large_tensor_differ_by_less_than_the_padding(numel, readers, part_nbytes, round_nbytes):
    slices = [flat(DType.FLOAT32, 0, numel)]
    windows = share_out(slices, costs=[1.0], readers=readers, part_nbytes=part_nbytes, round_nbytes=round_nbytes)
    *full, last = [[sum(s.nbytes for s in part) for part in parts(window, readers)] for window in windows]
    for shares in full:
        assert max(shares) - min(shares) <= ALIGNMENT
    assert max(last) <= -(-sum(last) // readers) + ALIGNMENT


@given(slices=SLICES, readers=st.integers(1, 3), data=st.data())
def test_a_window_has_one_cost_and_its_states_lie_together(slices, readers, data):
    costs = data.draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=len(slices), max_size=len(slices)))
    for window in share_out(slices, costs=costs, readers=readers, part_nbytes=512):
        assert len({costs[segment.slice_number] for segment in window.segments}) == 1
        states = [slices[segment.slice_number].state for segment in window.segments]
        assert states == sorted(states)
