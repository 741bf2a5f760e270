"""Laws of checksums: what is combined, filled in and found wrong is what summing the bytes again gives."""

from __future__ import annotations

import itertools
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import cuts
from ucp.core.target import CrcField, Literal, OutputFile
from ucp.core.tensor import Record
from ucp.errors import CoverError
from ucp.transfer.checksums import combine_crcs, crc_of_zeros, find_gaps, find_mismatches, make_crc_patches
from ucp.transfer.gather import Span

BYTES = st.binary(max_size=40)


@given(st.lists(BYTES, max_size=6))
def test_parts_combine_to_the_sum_of_the_whole(parts):
    assert combine_crcs((crc32(part), len(part)) for part in parts) == crc32(b"".join(parts))


@given(st.integers(0, 5000))
def test_zeros_are_zeros(nbytes):
    assert crc_of_zeros(nbytes) == crc32(bytes(nbytes))


@st.composite
def files(draw):
    """A file's bytes, records of stretches of it, and spans that were read of it, in any order."""
    data = draw(st.binary(min_size=1, max_size=60))
    edges = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    records = [
        Record(path="f", name=f"{low}:{high}", offset=low, nbytes=high - low, crc32=crc32(data[low:high]))
        for low, high in zip(edges[::2], edges[1::2], strict=False)
    ]
    spans = []
    for record in records:
        for _ in range(draw(st.integers(0, 4))):
            low = draw(st.integers(record.offset, record.offset + record.nbytes))
            spans.append(span(data, low, draw(st.integers(low, record.offset + record.nbytes))))
    return data, draw(st.permutations(records)), draw(st.permutations(spans))


def span(data: bytes, low: int, high: int) -> Span:
    return Span("f", low, high - low, crc32(data[low:high]))


def filled(data: bytes, records, spans):
    """The spans with what `gaps` asks for, read in pieces of three bytes."""
    asked = [(low, min(low + 3, at + n)) for _, at, n in find_gaps(records, spans) for low in range(at, at + n, 3)]
    return [*spans, *(span(data, low, high) for low, high in asked)]


def touched(records, spans):
    inside = [r for r in records if any(r.offset <= s.offset < r.offset + r.nbytes for s in spans)]
    return {record.name for record in inside if record.nbytes}


@given(files())
def test_bytes_that_are_right_are_not_called_wrong(case):
    data, records, spans = case
    assert find_mismatches(records, filled(data, records, spans)) == []


@given(files(), st.data())
def test_a_flipped_bit_is_found(case, draws):
    """In any record that was read from, wherever the bit is, also where only the gaps were read."""
    data, records, spans = case
    victims = [record for record in records if record.name in touched(records, spans) and record.nbytes]
    if not victims:
        return
    victim = draws.draw(st.sampled_from(victims))
    at = draws.draw(st.integers(victim.offset, victim.offset + victim.nbytes - 1))
    damaged = bytes([*data[:at], data[at] ^ 1 << draws.draw(st.integers(0, 7)), *data[at + 1 :]])
    reread = [span(damaged, s.offset, s.offset + s.nbytes) for s in spans]
    assert find_mismatches(records, filled(damaged, records, reread)) == [victim]


@given(files())
def test_a_record_that_was_not_read_whole_is_not_judged(case):
    _data, records, spans = case
    wrong = [Record(path="f", name=r.name, offset=r.offset, nbytes=r.nbytes, crc32=r.crc32 ^ 1) for r in records]
    for record in find_mismatches(wrong, spans):
        covered = {b for s in spans for b in range(s.offset, s.offset + s.nbytes)}
        assert set(range(record.offset, record.offset + record.nbytes)) <= covered


@st.composite
def outputs(draw):
    """A file's bytes, with stretches written, literals known before, zeros elsewhere, and fields to fill in."""
    nbytes = draw(st.integers(1, 60))
    edges = draw(cuts(nbytes))
    data, literals, sums, fields = bytearray(nbytes), [], [], []
    for low, high in itertools.pairwise(edges):
        inner = draw(cuts(high - low))
        for a, b in itertools.pairwise(inner):
            part = draw(st.binary(min_size=b - a, max_size=b - a))
            kind = draw(st.sampled_from(("written", "zero", "literal")))
            if kind == "zero" or not part:
                continue
            data[low + a : low + b] = part
            if kind == "written":
                sums.append((low + a, len(part), crc32(part)))
            else:
                literals.append(Literal(low + a, part))
        if draw(st.booleans()):
            fields.append(CrcField(start=low, stop=high, at=(1000 + low, 2000 + low)))
    return bytes(data), OutputFile(path="f", nbytes=nbytes, literals=tuple(literals), crcs=tuple(fields)), sums


@given(outputs())
def test_patches_are_the_sums_of_the_finished_file(case):
    data, file, sums = case
    wanted = {at: crc32(data[f.start : f.stop]).to_bytes(4, "little") for f in file.crcs for at in f.at}
    assert dict(make_crc_patches(file, sums)) == wanted


@pytest.mark.parametrize("offset", [0, 4])
def test_bytes_that_straddle_a_field_are_refused(offset):
    file = OutputFile(path="f", nbytes=9, crcs=(CrcField(start=2, stop=6, at=(0,)),))
    with pytest.raises(CoverError):
        list(make_crc_patches(file, [(offset, 4, 0)]))
