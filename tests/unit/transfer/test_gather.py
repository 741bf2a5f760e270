from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest

import ucp.core.slices
import ucp.transfer.gather
from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box
from ucp.core.slices import Locator, resolve
from ucp.core.target import full_slice
from ucp.core.tensor import DType, TensorRef
from ucp.errors import CorruptError, MalformedError
from ucp.io.elements import codec_name, encode_block, numpy_dtype, viewed
from ucp.io.files import Sources
from ucp.testing.handmade import Shards, inline
from ucp.transfer.gather import Gatherer, Span


@pytest.fixture
def shards(tmp_path):
    return Shards(tmp_path)


@pytest.fixture
def gatherer():
    gatherer = Gatherer(sources=Sources())
    yield gatherer
    gatherer.sources.close()


def state_of(*refs_and_rows, shape, overlap=Overlap.EXCLUSIVE, terms=None):
    """A state whose pieces are stretches of rows, in order."""
    fragments, row = [], 0
    for number, ref in enumerate(refs_and_rows):
        offsets = (0 if terms else row, *(0 for _ in shape[1:]))
        fragments.append(Fragment(box=Box(offsets, ref.shape), ref=ref, term=number if terms else 0))
        row += ref.shape[0]
    return StateIndex(dtype=refs_and_rows[0].dtype, global_shape=shape, fragments=tuple(fragments), overlap=overlap)


def read(gatherer, state, dtype=None):
    own = full_slice("p", "s", state, dtype=dtype)
    data = memoryview(bytearray(own.nbytes))
    gatherer.fill(data, own.dtype, resolve(own, Locator(state), 0, own.stop))
    return viewed(data, own.dtype).reshape(state.global_shape)


class TestReads:
    def test_neighbours_in_a_file_are_one_read(self, shards, gatherer, monkeypatch):
        rows = np.arange(24, dtype="float32").reshape(6, 4)
        state = state_of(*(shards.put(rows[n : n + 2]) for n in (0, 2, 4)), shape=(6, 4))
        calls = []
        real = ucp.transfer.gather.Gatherer._read
        monkeypatch.setattr(Gatherer, "_read", lambda self, *args: (calls.append(args[1:]), real(self, *args)))
        assert (read(gatherer, state) == rows).all()
        assert [(offset, len(views)) for offset, views in calls] == [(0, 3)]

    def test_every_order_of_dims_is_read_once(self, shards, gatherer, monkeypatch):
        monkeypatch.setattr(ucp.transfer.gather, "MAX_READ", 128)
        array = np.arange(6 * 7 * 8, dtype="int16").reshape(6, 7, 8)
        for order in [(2, 1, 0), (1, 0, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)]:
            before = gatherer.nbytes_read
            assert (read(gatherer, state_of(shards.put(array, order=order), shape=array.shape)) == array).all()
            assert gatherer.nbytes_read - before == array.nbytes

    def test_long_runs_between_longer_gaps_are_read_alone(self, shards, gatherer, monkeypatch):
        monkeypatch.setattr(ucp.core.slices, "GAP", 16)
        wide = np.arange(10 * 40, dtype="float32").reshape(10, 40)
        ref = shards.put(wide)
        narrow = TensorRef(path=ref.path, offset=8, dtype=ref.dtype, shape=(10, 4), strides=(40, 1))
        assert (read(gatherer, state_of(narrow, shape=(10, 4))) == wide[:, 2:6]).all()
        assert gatherer.nbytes_read == 10 * 16

    def test_short_runs_are_read_with_their_gaps(self, shards, gatherer):
        wide = np.arange(10 * 40, dtype="float32").reshape(10, 40)
        ref = shards.put(wide)
        narrow = TensorRef(path=ref.path, offset=8, dtype=ref.dtype, shape=(10, 4), strides=(40, 1))
        assert (read(gatherer, state_of(narrow, shape=(10, 4))) == wide[:, 2:6]).all()
        assert gatherer.nbytes_read == (9 * 40 + 4) * 4

    def test_a_row_longer_than_a_stretch_is_cut_too(self, shards, gatherer, monkeypatch):
        monkeypatch.setattr(ucp.transfer.gather, "MAX_READ", 64)
        wide = np.arange(4 * 64, dtype="float32").reshape(4, 64)
        ref = shards.put(wide)
        narrow = TensorRef(path=ref.path, offset=0, dtype=ref.dtype, shape=(4, 40), strides=(64, 1))
        found = read(gatherer, state_of(narrow, shape=(4, 40)), DType.FLOAT64)
        assert (found == wide[:, :40]).all()
        assert gatherer.nbytes_read == 4 * 160

    def test_a_file_cut_short_is_malformed(self, shards, gatherer):
        ref = shards.put(np.zeros((4, 4), "float32"))
        (shards.folder / "shard.bin").write_bytes(bytes(60))
        with pytest.raises(MalformedError, match=r"4 bytes at 60; .*/shard\.bin "):
            read(gatherer, state_of(ref, shape=(4, 4)))


class TestChecksums:
    def test_reads_of_tracked_files_are_summed_where_they_lie(self, shards):
        a, b = shards.put(np.arange(4, dtype="int32")), shards.put(np.arange(6, dtype="int32"), file="other.bin")
        gatherer = Gatherer(sources=Sources(), tracked=frozenset((a.path,)))
        read(gatherer, state_of(a, b, shape=(10,)))
        gatherer.sources.close()
        data = np.arange(4, dtype="int32").tobytes()
        assert gatherer.spans == [Span(a.path, 0, 16, crc32(data))]

    def test_strided_reads_are_summed_with_their_gaps(self, shards):
        ref = shards.put(np.arange(4, dtype="int32"), gap=1)
        gatherer = Gatherer(sources=Sources(), tracked=frozenset((ref.path,)))
        read(gatherer, state_of(ref, shape=(4,)))
        gatherer.sources.close()
        (span,) = gatherer.spans
        stored = (shards.folder / "shard.bin").read_bytes()
        assert span.crc32 == crc32(stored[span.offset : span.offset + span.nbytes])

    def test_a_scan_only_sums(self, shards):
        ref = shards.put(np.arange(4, dtype="int32"))
        gatherer = Gatherer(sources=Sources(), tracked=frozenset((ref.path,)))
        gatherer.scan(ref.path, [(4, 12)])
        gatherer.sources.close()
        assert gatherer.spans == [Span(ref.path, 4, 8, crc32(np.arange(1, 3, dtype="int32").tobytes()))]


class TestSources:
    def test_the_least_recently_used_is_closed(self, shards):
        paths = [shards.put(np.zeros(1), file=f"{n}.bin").path for n in range(4)]
        sources = Sources(limit=2)
        first = sources.get(paths[0])
        sources.get(paths[1])
        assert sources.get(paths[0]) is first
        sources.get(paths[2])
        assert sources.get(paths[0]) is first
        sources.get(paths[3])
        sources.get(paths[1])
        assert sources.get(paths[0]) is not first
        sources.close()


class TestMeans:
    @pytest.mark.parametrize(
        ("dtype", "wide"),
        [
            (DType.FLOAT64, np.float64),
            (DType.INT64, np.float64),
            (DType.COMPLEX64, np.complex128),
            (DType.BFLOAT16, np.float32),
        ],
    )
    def test_it_is_summed_in_a_type_that_holds_the_terms(self, shards, gatherer, dtype, wide):
        values = [(1 << 24) + 1, 3] if dtype in (DType.FLOAT64, DType.INT64) else [1.5, 2.5]
        arrays = [np.full((2, 3), value).astype(numpy_dtype(dtype)) for value in values]
        state = state_of(*map(shards.put, arrays), shape=(2, 3), overlap=Overlap.MEAN, terms=True)
        total = arrays[0].astype(wide) + arrays[1].astype(wide)
        assert (read(gatherer, state) == (total / 2).astype(arrays[0].dtype)).all()

    @pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
    @pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16])
    def test_of_finite_numbers_it_is_finite(self, shards, gatherer, dtype, count):
        """The sum of two of the largest is not; what is infinite, or no number, in a term stays so."""
        own = numpy_dtype(dtype)
        bits = {DType.BFLOAT16: 8, DType.FLOAT32: 24}.get(dtype, 53)
        most = (2 - 2.0 ** (1 - bits)) * 2.0 ** (127 if bits < 53 else 1023)
        rows = [[most, -most, most / (term + 1), 2.0**term, np.inf, np.nan] for term in range(count)]
        arrays = [np.array(row).astype(own) for row in rows]
        assert np.isfinite(arrays[0][0])
        state = state_of(*map(shards.put, arrays), shape=(6,), overlap=Overlap.MEAN, terms=True)
        found = read(gatherer, state).astype("complex128").real
        wanted = [most, -most, most * (sum(1 / (term + 1) for term in range(count)) / count), (2**count - 1) / count]
        assert np.isfinite(found[:4]).all()
        assert np.allclose(found[:4], wanted, rtol=count * 2.0**-bits, atol=0)
        assert found[4] == np.inf
        assert np.isnan(found[5])

    def test_terms_may_stand_in_the_index(self, gatherer):
        arrays = [np.float32([[1.0]]), np.float32([[4.0]])]
        state = state_of(*map(inline, arrays), shape=(1, 1), overlap=Overlap.MEAN, terms=True)
        assert read(gatherer, state).tolist() == [[2.5]]


class TestEncodedBlocks:
    def test_pieces_of_a_block_are_taken_from_its_middle(self, tmp_path, gatherer):
        array = np.arange(12, dtype="float32").reshape(3, 4)
        block = encode_block(memoryview(array.tobytes()), 4)
        (tmp_path / "pack.zst").write_bytes(b"head" + block)
        rows = [
            TensorRef(
                path=str(tmp_path / "pack.zst"),
                offset=4,
                dtype=DType.FLOAT32,
                shape=(1, 4),
                strides=(4, 1),
                codec=codec_name(4),
                codec_nbytes=len(block),
                codec_start=16 * row,
            )
            for row in (2, 0, 1)
        ]
        assert (read(gatherer, state_of(*rows, shape=(3, 4))) == array[[2, 0, 1]]).all()
        assert gatherer.nbytes_read == len(block), "a block is read and decoded once"

    @pytest.mark.parametrize("change", [{"codec_start": 40}, {"codec": "zstd-planes8"}, {"codec_nbytes": 9}])
    def test_a_block_that_is_not_what_it_should_be_is_corrupt(self, tmp_path, gatherer, change):
        block = encode_block(memoryview(bytes(44)), 4)
        (tmp_path / "pack.zst").write_bytes(block)
        ref = {"codec": codec_name(4), "codec_nbytes": len(block), "codec_start": 0, **change}
        row = TensorRef(
            path=str(tmp_path / "pack.zst"), offset=0, dtype=DType.FLOAT32, shape=(1, 4), strides=(4, 1), **ref
        )
        with pytest.raises(CorruptError, match=r"/pack\.zst\b"):
            read(gatherer, state_of(row, shape=(1, 4)))
