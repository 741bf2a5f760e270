"""Laws of sharing out: every element is read once, nothing overlaps, and the shares are equal."""

from hypothesis import given
from hypothesis import strategies as st

from ucp.core.dtypes import DType
from ucp.core.slices import Slice
from ucp.live.exchange.read_shares import ALIGNMENT, Bucket, share_out

DTYPES = st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.UINT8, DType.INT64, DType.COMPLEX128])


def flat(dtype: DType, start: int, numel: int) -> Slice:
    stop = start + numel
    return Slice(param="p", state="weight", dtype=dtype, pairs=(), local_shape=(stop,), start=start, stop=stop)


SLICES = st.lists(st.builds(flat, DTYPES, st.integers(0, 9), st.integers(0, 400)), max_size=8)


def read_by(bucket: Bucket, slices: list[Slice], reader: int) -> int:
    return sum((s.stop - s.start) * slices[s.item].dtype.itemsize for s in bucket.parts[reader])


@given(slices=SLICES, readers=st.integers(1, 5), bucket_nbytes=st.integers(1, 3000), data=st.data())
def test_every_element_is_in_exactly_one_part(slices, readers, bucket_nbytes, data):
    costs = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=len(slices), max_size=len(slices)))
    buckets = share_out(slices, costs=costs, readers=readers, bucket_nbytes=bucket_nbytes)
    seen = sorted((s.item, e) for b in buckets for part in b.parts for s in part for e in range(s.start, s.stop))
    assert seen == [(item, e) for item, own in enumerate(slices) for e in range(own.start, own.stop)]


@given(slices=SLICES, readers=st.integers(1, 5), bucket_nbytes=st.integers(1, 3000))
def test_segments_lie_in_their_part_one_after_another(slices, readers, bucket_nbytes):
    for bucket in share_out(slices, costs=[1.0] * len(slices), readers=readers, bucket_nbytes=bucket_nbytes):
        assert len(bucket.parts) == readers
        assert bucket.part_nbytes % ALIGNMENT == 0
        assert bucket.part_nbytes * readers <= max(bucket_nbytes, ALIGNMENT * readers)
        for part in bucket.parts:
            at = 0
            for segment in part:
                assert segment.offset >= at
                assert segment.offset % slices[segment.item].dtype.itemsize == 0
                at = segment.offset + (segment.stop - segment.start) * slices[segment.item].dtype.itemsize
            assert at <= bucket.part_nbytes


@given(numel=st.integers(1, 5000), readers=st.integers(1, 7), bucket_nbytes=st.integers(64, 4096))
def test_shares_of_one_large_tensor_differ_by_less_than_the_padding(numel, readers, bucket_nbytes):
    slices = [flat(DType.FLOAT32, 0, numel)]
    buckets = share_out(slices, costs=[1.0], readers=readers, bucket_nbytes=bucket_nbytes)
    for bucket in buckets[:-1]:
        shares = [read_by(bucket, slices, reader) for reader in range(readers)]
        assert max(shares) - min(shares) <= ALIGNMENT
    last = [read_by(buckets[-1], slices, reader) for reader in range(readers)]
    assert max(last) <= -(-sum(last) // readers) + ALIGNMENT


@given(slices=SLICES, readers=st.integers(1, 3), data=st.data())
def test_a_bucket_has_one_cost(slices, readers, data):
    costs = data.draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=len(slices), max_size=len(slices)))
    for bucket in share_out(slices, costs=costs, readers=readers, bucket_nbytes=512):
        assert len({costs[segment.item] for part in bucket.parts for segment in part}) == 1
