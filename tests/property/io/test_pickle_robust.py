"""Whatever the bytes, the readers answer with a value or with an error of `ucp`."""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
from collections import OrderedDict
from functools import cache
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from ucp.errors import UcpError
from ucp.io.pickle.unpickle import parse_pickle
from ucp.io.safetensors import read_header
from ucp.io.torch_file.archive import read_archive

CODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
PROGRAM = st.lists(
    st.sampled_from(CODES)
    | st.binary(max_size=3)
    | st.sampled_from([b"cos\nsystem\n", b"X\1\0\0\0a", b"K\1", b"h\0", b"q\0"]),
    max_size=60,
).map(b"".join)
FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4)
ON_DISK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def archive(zipped: bool) -> bytes:
    """A small file of torch.save."""
    base = torch.arange(12.0)
    value = {
        "model": OrderedDict(a=base, b=base[3:7], c=torch.ones(2, 2, dtype=torch.float8_e5m2)),
        "shape": torch.Size([2, 3]),
        "p": torch.nn.Parameter(torch.ones(1)),
        "n": [1, 2**70, 1.5, b"x", {1, 2}, None],
    }
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def flipped(data: bytes, flips: list[tuple[float, int]]) -> bytes:
    """`data` with some bytes changed."""
    out = bytearray(data)
    for place, mask in flips:
        out[int(place * len(out))] ^= mask
    return bytes(out)


def answers(path: Path, data: bytes) -> None:
    """Read the archive or refuse it."""
    path.write_bytes(data)
    try:
        read_archive(str(path))
    except UcpError as error:
        assert str(path) in str(error)  # noqa: PT017


@settings(max_examples=300, deadline=None)
@given(PROGRAM)
def test_any_program_is_read_or_refused(program: bytes) -> None:
    try:
        parse_pickle(program + b".", where="test")
    except UcpError as error:
        assert str(error).startswith("test: ")  # noqa: PT017


@settings(max_examples=120, deadline=None)
@given(FLIPS, st.integers(0, 5))
def test_damaged_pickles_are_read_or_refused(flips: list[tuple[float, int]], protocol: int) -> None:
    data = pickle.dumps({"a": [1, 2.5, "x", b"y", (None, True)], "b": OrderedDict(c={1, 2}), "d": 2**80}, protocol)
    with contextlib.suppress(UcpError):
        parse_pickle(flipped(data, flips), where="test")


@ON_DISK
@given(FLIPS, st.booleans())
def test_damaged_archives_are_read_or_refused(tmp_path: Path, flips: list[tuple[float, int]], zipped: bool) -> None:
    answers(tmp_path / "x.pt", flipped(archive(zipped), flips))


@ON_DISK
@given(st.integers(0, 10_000), st.integers(0, 10_000), st.booleans())
def test_windows_anywhere_are_read_or_refused(tmp_path: Path, start: int, nbytes: int, zipped: bool) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(archive(zipped))
    with contextlib.suppress(UcpError):
        read_archive(str(path), start=start, nbytes=nbytes)


@ON_DISK
@given(FLIPS)
def test_damaged_safetensors_are_read_or_refused(tmp_path: Path, flips: list[tuple[float, int]]) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(flipped(save({"a": torch.ones(3), "b": torch.ones(2, 2)}, metadata={"k": "v"}), flips))
    with contextlib.suppress(UcpError):
        read_header(str(path))
