"""Encoded blocks decode to what they were, or are corrupt."""

from __future__ import annotations

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ucp.errors import CorruptError
from ucp.io.elements import codec_name, decode_block, encode_block

WIDTHS = st.sampled_from([1, 2, 4, 8, 16])


@given(WIDTHS, st.binary(min_size=16, max_size=400))
def test_decoding_undoes_encoding(width, data):
    data = data[: len(data) // width * width]
    encoded = encode_block(memoryview(data), width)
    assert bytes(decode_block(memoryview(encoded), codec_name(width))) == data


@given(WIDTHS, st.binary(min_size=16, max_size=200), st.data())
def test_a_damaged_block_is_corrupt(width, data, draw):
    encoded = bytearray(encode_block(memoryview(data[: len(data) // width * width]), width))
    match draw.draw(st.sampled_from(("flip", "cut", "more"))):
        case "flip":
            encoded[draw.draw(st.integers(0, len(encoded) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
        case "cut":
            del encoded[draw.draw(st.integers(0, len(encoded) - 1)) :]
        case _:
            encoded += draw.draw(st.binary(min_size=1, max_size=5))
    try:
        found = decode_block(memoryview(encoded), codec_name(width))
    except CorruptError:
        return
    assert bytes(found) == data[: len(data) // width * width], "damage went unnoticed"


@pytest.mark.parametrize("codec", ["", "zstd-planes", "zstd-planes0", "zstd-planes3", "zstd-planes-4", "lz4-planes4"])
def test_an_unknown_codec_is_refused(codec):
    with pytest.raises(CorruptError, match="newer ucp"):
        decode_block(memoryview(encode_block(memoryview(bytes(12)), 4)), codec)


def test_a_length_that_asks_for_all_memory_is_refused():
    huge = zstandard.ZstdCompressor(write_content_size=True).compressobj(size=1 << 40)
    head = huge.compress(bytes(100)) + huge.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    with pytest.raises(CorruptError, match="1099511627776 bytes"):
        decode_block(memoryview(head), codec_name(4))


def test_elements_that_do_not_fit_the_block_are_refused():
    with pytest.raises(CorruptError, match="elements of 8 bytes"):
        decode_block(memoryview(encode_block(memoryview(bytes(12)), 4)), codec_name(8))
