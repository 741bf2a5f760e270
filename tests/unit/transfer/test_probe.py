"""Windows of tensors, and casts as torch makes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ucp.core.tensor import DType, InlineTensor, TensorRef
from ucp.errors import CorruptError
from ucp.io.elements import codec_name, encode_block
from ucp.transfer.probe import Prober, cast_bits

VALUES = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


@pytest.fixture
def ref(tmp_path: Path) -> TensorRef:
    path = tmp_path / "x"
    path.write_bytes(b"##" + VALUES.numpy().tobytes())
    return TensorRef(path=str(path), offset=2, dtype=DType.FLOAT32, shape=(2, 3, 4), strides=(12, 4, 1))


@pytest.mark.parametrize("strides", [(12, 4, 1), (1, 2, 6), (4, 8, 1)])
@pytest.mark.parametrize("window", [(0, 24), (5, 6), (3, 17), (7, 7)])
def test_windows_are_row_major(ref: TensorRef, strides: tuple[int, ...], window: tuple[int, int]) -> None:
    own = TensorRef(path=ref.path, offset=2, dtype=DType.FLOAT32, shape=(2, 3, 4), strides=strides)
    wanted = torch.as_strided(VALUES.flatten(), (2, 3, 4), strides).flatten()[window[0] : window[1]]
    with Prober() as prober:
        assert prober.window(own, *window) == wanted.numpy().tobytes()
        assert prober.nbytes_read >= 4 * (window[1] - window[0])  # short gaps are read along


def test_tensors_end_to_end(ref: TensorRef) -> None:
    inline = InlineTensor(data=VALUES[0, 0].numpy().tobytes(), dtype=DType.FLOAT32, shape=(4,))
    with Prober() as prober:
        got = prober.read_joined([inline, ref, inline], 2, 29, dtype=DType.BFLOAT16)
    wanted = torch.cat([VALUES[0, 0], VALUES.flatten(), VALUES[0, 0]])[2:29].to(torch.bfloat16)
    assert got == wanted.view(torch.int16).numpy().tobytes()


def test_ranges_outside_are_refused(ref: TensorRef) -> None:
    with Prober() as prober, pytest.raises(ValueError, match=r"24.*20:25"):
        prober.window(ref, 20, 25)


def test_encoded_tensors_are_decoded(tmp_path: Path) -> None:
    block = encode_block(memoryview(VALUES.numpy().tobytes()), 4)
    path = tmp_path / "pack"
    path.write_bytes(b"##" + block)
    place = {"path": str(path), "offset": 2, "codec": codec_name(4), "codec_nbytes": len(block)}
    own = TensorRef(**place, codec_start=16, dtype=DType.FLOAT32, shape=(5,), strides=(1,))
    long = TensorRef(**place, codec_start=16, dtype=DType.FLOAT32, shape=(21,), strides=(1,))
    with Prober() as prober:
        assert prober.window(own, 1, 4) == VALUES.flatten()[5:8].numpy().tobytes()
        with pytest.raises(CorruptError, match=r"100 bytes .* at 2; got 96"):
            prober.window(long, 0, 21)


@pytest.mark.parametrize(("dtype", "to"), [(DType.BFLOAT16, torch.bfloat16), (DType.FLOAT16, torch.float16)])
def test_casts_round_as_torch_rounds(dtype: DType, to: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    edges = torch.tensor([0.0, -0.0, 1e-45, 65504.0, 65519.0, 65520.0, 3.4e38, float("inf"), 1.00390625, 1.01171875])
    values = torch.cat([words.view(torch.float32), edges])
    got = torch.frombuffer(bytearray(cast_bits(values.numpy().tobytes(), DType.FLOAT32, dtype)), dtype=to)
    wanted = values.to(to)
    numbers = ~torch.isnan(wanted)
    assert torch.equal(got[numbers].view(torch.int16), wanted[numbers].view(torch.int16))
    assert torch.isnan(got[~numbers]).all()
    assert len(set(got[~numbers].view(torch.int16).tolist())) == 1


def test_no_cast_changes_nothing() -> None:
    assert cast_bits(b"abcd", DType.FLOAT32, DType.FLOAT32) == b"abcd"


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
def test_what_is_no_number_is_one_and_the_same_without_a_cast_too(dtype: DType) -> None:
    def as_type(*words: int) -> bytes:
        return b"".join(word.to_bytes(dtype.itemsize, "little") for word in words)

    full = (1 << 8 * dtype.itemsize) - 1  # torch gives 0xffff for a NaN cast to bfloat16 among others
    got = cast_bits(as_type(full, full >> 1, 0), dtype, dtype)
    one = got[: dtype.itemsize]
    assert got == one + one + as_type(0)
    assert one == cast_bits(b"\0\0\xc0\x7f", DType.FLOAT32, dtype)


def test_a_window_has_one_nan_where_a_type_is_given(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xff\xff\xff\x7f\xc0\x7f")
    own = TensorRef(path=str(path), offset=0, dtype=DType.BFLOAT16, shape=(3,), strides=(1,))
    with Prober() as prober:
        assert prober.window(own, 0, 3) == b"\xff\xff\xff\x7f\xc0\x7f"
        assert prober.window(own, 0, 3, dtype=DType.BFLOAT16) == b"\xc0\x7f" * 3


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_a_few_elements_are_cast_as_many_are(dtype: DType) -> None:
    """Ties, overflow, infinities, denormals and all kinds of no number: few are cast without numpy."""
    ties = (0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7F8000, 0xFF7FFFFF, 0x007FFFFF, 0x80000001)
    others = (0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0x12345678)
    for word in (*ties, *others):
        few = word.to_bytes(4, "little") * 8
        assert cast_bits(few, dtype, DType.BFLOAT16) * 99 == cast_bits(few * 99, dtype, DType.BFLOAT16)
