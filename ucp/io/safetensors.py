"""Safetensors files: their header as references, and the header of a file to be written.

A file is an unsigned 64-bit length, that many bytes of JSON, then the elements of all tensors without a hole
(https://github.com/huggingface/safetensors, format of 0.4 to 0.8). Header and data are validated against each other
before any of it is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import msgspec

from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.core.text.typed import convert
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.files import open_source, read_object
from ucp.io.json_text import parsed, unique_names
from ucp.io.pickle.fields import describe_value

_MOST_HEADER_NBYTES = 100_000_000
"""Bound of the reference implementation."""
_MOST_DIMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """What a safetensors file says of itself."""

    tensors: dict[str, TensorRef]
    """Tensors by name, in the order of the header."""
    metadata: dict[str, str]
    """Text entries of `__metadata__`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsLayout:
    """A safetensors file to be written."""

    header: bytes
    """First bytes of the file: length and padded JSON."""
    offsets: dict[str, int]
    """Byte in the file of each tensor's first element, by name."""
    nbytes: int
    """Bytes of the whole file."""


def read_header(path: str) -> SafetensorsHeader:
    """Header of the safetensors file at `path`.

    Raises
    ------
    MalformedError
        The header is not JSON of this form, or tensors overlap, leave a hole, or do not fit the file.
    UnsupportedError
        An element type that this version does not know.
    """
    with open_source(path) as file:
        nbytes = file.nbytes
        if nbytes < 10:
            raise _malformed(path, f"expected at least 10 bytes; got {nbytes}")
        start = 8 + int.from_bytes(file.read(0, 8), "little")
        if start - 8 > _MOST_HEADER_NBYTES or start > nbytes:
            raise _malformed(path, f"expected a header within its {nbytes} bytes; got one of {start - 8}")
        text = file.read(8, start - 8)
    document = _decode(text)
    if document is None:
        try:
            entries = parsed(text, pairs=unique_names)
        except ValueError as error:
            raise _malformed(path, f"expected a header of JSON; {str(error)[:200]}") from None
        if not isinstance(entries, dict):
            raise _malformed(path, f"expected a header that is a JSON object; got a {type(entries).__name__}")
        document = entries
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _malformed(path, "expected __metadata__ that maps text to text")
    tensors = {name: _tensor(path, name, entry, start) for name, entry in document.items()}
    at = start  # every byte after the header belongs to exactly one tensor
    for offset, length, name in sorted((tensor.offset, tensor.nbytes, name) for name, tensor in tensors.items()):
        if offset != at:
            raise _malformed(path, f"expected {name!r} at byte {at}; got {offset}: a hole or an overlap")
        at += length
    if at != nbytes:
        raise _malformed(path, f"expected {at} bytes; got {nbytes}")
    return SafetensorsHeader(tensors=tensors, metadata=metadata)


def read_weight_map(path: str) -> dict[str, str]:
    """Name of a tensor to its file, as the index of several files says (`model.safetensors.index.json`).

    Raises MalformedError.
    """
    places = read_object(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise MalformedError(f"expected weight_map, tensor to file, in {path}; got {describe_value(places)}")
    odd = [file for file in places.values() if not (file and isinstance(file, str) and os.path.basename(file) == file)]
    if odd:
        raise MalformedError(f"expected names of files beside {path} in its weight_map; got {odd[:1]}")
    return places


def layout_safetensors(
    entries: Sequence[tuple[str, DType, tuple[int, ...]]],
    *,
    metadata: Mapping[str, str] | None = None,
    alignment: int = 64,
) -> SafetensorsLayout:
    """Layout of a file that holds `entries` (name, element type, shape), in their order.

    The elements begin at a multiple of `alignment` bytes (safetensors itself takes 8); each tensor follows the one
    before it without a hole, as the format demands.

    >>> layout = layout_safetensors([("a", DType.BFLOAT16, (2, 3)), ("b", DType.FLOAT32, ())])
    >>> layout.offsets, layout.nbytes
    ({'a': 128, 'b': 140}, 144)

    Raises
    ------
    ValueError
        A name is given twice, or reserved.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    at = 0
    for name, dtype, shape in entries:
        if name in offsets or name == "__metadata__":
            raise ValueError(f"expected names that differ, and none '__metadata__'; got {name!r}")
        stop = at + prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype.safetensors, "shape": list(shape), "data_offsets": [at, stop]}
        offsets[name] = at
        at = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    start = -(-(8 + len(text)) // alignment) * alignment
    if start - 8 > _MOST_HEADER_NBYTES:
        raise ValueError(f"expected a header of at most {_MOST_HEADER_NBYTES} bytes; got {start - 8}: use more files")
    literal = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    return SafetensorsLayout(
        header=literal, offsets={name: start + offset for name, offset in offsets.items()}, nbytes=start + at
    )


class _HeaderEntry(msgspec.Struct, gc=False):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_DECODER = msgspec.json.Decoder(dict[str, _HeaderEntry])
_METADATA = re.compile(rb'\s*\{\s*"__metadata__"\s*:\s*(\{(?:\s*"[^"]*"\s*:\s*"[^"]*"\s*,?)*\s*\})\s*,')
"""The metadata, if they come first, as the reference implementation writes them."""


def _decode(text: bytes) -> dict[str, object] | None:
    """Decodes a header of the common kind in a tenth of the time; None for any other, which may be valid too.

    Without escapes each field name occurs once per tensor; a tensor that is listed twice would make it occur more.
    """
    if b"\\" in text:
        return None
    first = _METADATA.match(text)
    try:
        entries = _DECODER.decode(b"{" + text[first.end() :] if first else text)
        metadata = {} if first is None else parsed(first[1], pairs=unique_names)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None
    is_unique = all(text.count(b'"%s"' % field) == len(entries) for field in (b"dtype", b"shape", b"data_offsets"))
    return {"__metadata__": metadata, **entries} if is_unique and "__metadata__" not in entries else None


def _tensor(path: str, name: str, entry: object, start: int) -> TensorRef:
    try:
        fields = entry if isinstance(entry, _HeaderEntry) else convert(entry, _HeaderEntry)
        (first, stop), shape, code = fields.data_offsets, fields.shape, fields.dtype
        is_valid = min(first, stop, *shape) >= 0 and max(first, stop, *shape) < 1 << 63 and len(shape) <= _MOST_DIMS
    except msgspec.ValidationError:
        is_valid = False
    if not is_valid:
        raise _malformed(path, f"expected dtype, shape and data_offsets of {name!r}; got {str(entry)[:200]}")
    try:
        dtype = DType.from_safetensors(code)
    except KeyError:
        raise UnsupportedError(f"{path}: tensor {name!r} is of type {code!r}, which ucp does not know") from None
    if stop - first != prod(shape) * dtype.itemsize:
        raise _malformed(path, f"expected {dtype} of shape {shape} for {name!r}; got {stop - first} bytes")
    sizes = tuple(shape)
    return TensorRef(path=path, offset=start + first, dtype=dtype, shape=sizes, strides=contiguous_strides(sizes))


def _malformed(path: str, problem: str) -> MalformedError:
    return MalformedError(f"{path}: not a whole safetensors file: {problem}. Copy it again")
