"""Changes inside a file: bytes at random and where they mean something, numbers of pickles, values of JSON."""

from __future__ import annotations

import io
import json
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Rewrite = Callable[[object, bytes, Random], bytes]

_SIGNATURE = re.compile(rb"PK(?:\x01\x02|\x03\x04|\x05\x06|\x06\x06|\x07\x08)")
"""Headers of zip archives, one after another in Megatron's .distcp."""


def is_summed(path: Path) -> bool:
    """Whether what is in a file has a recorded checksum: zip archives of torch, and all that we write."""
    names = {parent.name for parent in path.parents}
    ours = path.name.startswith("ucp") or path.suffix in {".safetensors", ".zst"} or "extra" in names
    with path.open("rb") as file:
        return ours or file.read(4) == b"PK\x03\x04"


def flip(path: Path, rng: Random) -> str:
    """Change one to three bytes; what was done."""
    data = bytearray(path.read_bytes())
    done = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = _anywhere(data, rng)
        new = rng.choice((data[at] ^ (1 << rng.randrange(8)), rng.randrange(256), 0, 255))
        new = new if new != data[at] else data[at] ^ 1
        done.append(f"byte {at}: {data[at]:#04x} -> {new:#04x}")
        data[at] = new
    path.write_bytes(data)
    return ", ".join(done)


def flip_text(path: Path, rng: Random) -> str:
    """Change one bit of a text in the pickle that a file is; what was done."""
    data = bytearray(path.read_bytes())
    heads = {"SHORT_BINUNICODE": 2, "BINUNICODE": 5}
    ops = [
        (at + heads[op.name], str(arg)) for op, arg, at in pickletools.genops(bytes(data)) if op.name in heads and at
    ]
    at, text = rng.choice([own for own in ops if own[1]])
    at, bit = at + rng.randrange(len(text.encode())), rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at}, in {text!r}"


def _anywhere(data: bytearray, rng: Random) -> int:
    """A place at random, one in a header of a zip archive, in a pickle, or at an end."""
    spots: list[int] = []
    match rng.randrange(4):
        case 0:
            spots = [own.start() + rng.randrange(46) for own in _SIGNATURE.finditer(data)]
        case 1:
            spots = [rng.randrange(low, high) for low, high in _pickles(bytes(data))]
        case 2:
            spots = [rng.randrange(min(len(data), 400)), len(data) - 1 - rng.randrange(min(len(data), 100))]
    spots = [spot for spot in spots if 0 <= spot < len(data)]
    return rng.choice(spots) if spots else rng.randrange(len(data))


def _pickles(data: bytes) -> list[tuple[int, int]]:
    """Where pickles lie in a file: half-open ranges of bytes."""
    if data[:1] == b"\x80":
        return [(0, len(data))]
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [_range(data, own) for own in archive.infolist() if own.filename.endswith("data.pkl")]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return []


def _range(data: bytes | bytearray, member: zipfile.ZipInfo) -> tuple[int, int]:
    at = member.header_offset
    low = (
        at + 30 + int.from_bytes(data[at + 26 : at + 28], "little") + int.from_bytes(data[at + 28 : at + 30], "little")
    )
    return low, low + member.compress_size


def edit_pickle(path: Path, rng: Random) -> str | None:
    """Write another value into a pickle, and the checksum that goes with it; None where there is nothing to edit."""
    data = bytearray(path.read_bytes())
    found = _pickles(bytes(data))
    if not found:
        return None
    low, high = rng.choice(found)
    done = _edit_stream(data, low, high, rng)
    if done is None:
        return None
    _sum_again(data, low, high)
    path.write_bytes(data)
    return done


def _edit_stream(data: bytearray, low: int, high: int, rng: Random) -> str | None:
    """Change one operation in place, its length as it was."""
    try:
        ops = [(op.name, low + at, arg) for op, arg, at in pickletools.genops(bytes(data[low:high])) if at is not None]
    except (ValueError, IndexError):  # several pickles, or a tensor after it: legacy files of torch
        return None
    stops = [at for _, at, _ in ops[1:]] + [high]
    kinds: dict[str, list[tuple[int, int, object]]] = {}
    for (name, at, arg), stop in zip(ops, stops, strict=True):
        if name in _REWRITE:
            kinds.setdefault(name, []).append((at, stop, arg))
    if not kinds:
        return None
    name = rng.choice(sorted(kinds))
    at, stop, arg = rng.choice(kinds[name])
    new = _REWRITE[name](arg, bytes(data[at:stop]), rng)
    if len(new) != stop - at or new == data[at:stop]:
        return None
    data[at:stop] = new
    return f"{name} at {at}: {arg!r} -> {new.hex()}"


def _whole(width: int) -> Rewrite:
    def rewrite(value: object, old: bytes, rng: Random) -> bytes:
        number, values = int(str(value)), 1 << 8 * width
        new = rng.choice((number + 1, number - 1, 0, number * 2, rng.randrange(values), values // 2 - 1))
        return old[:1] + (new % values).to_bytes(width, "little")

    return rewrite


def _float(value: object, old: bytes, rng: Random) -> bytes:
    new = rng.choice((0.0, -1.0, float("nan"), float("inf"), 2 * float(str(value)), rng.random()))
    return old[:1] + struct.pack(">d", new)


def _text(value: object, old: bytes, rng: Random) -> bytes:
    new, head = bytearray(old), 5 if old[:1] == b"X" else 2
    if len(old) > head:
        new[rng.randrange(head, len(old))] = rng.choice(b"aex_.019/")
    return bytes(new)


def _flag(value: object, old: bytes, rng: Random) -> bytes:
    return rng.choice([own for own in (b"\x88", b"\x89", b"N") if own != old])


_REWRITE: dict[str, Rewrite] = {
    **dict.fromkeys(("BININT1", "BINGET"), _whole(1)),
    "BININT2": _whole(2),
    **dict.fromkeys(("BININT", "LONG_BINGET"), _whole(4)),
    "BINFLOAT": _float,
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), _text),
    **dict.fromkeys(("NEWTRUE", "NEWFALSE", "NONE"), _flag),
}
"""Operation of a pickle to what gives another one of its length."""


def _sum_again(data: bytearray, low: int, high: int) -> None:
    """Record the CRC-32 of the bytes as they are now, in both headers and in the descriptor."""
    if data[:2] != b"PK":
        return
    crc = zlib.crc32(data[low:high]).to_bytes(4, "little")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        member = next(own for own in archive.infolist() if _range(data, own)[0] == low)
        at, old, name = archive.start_dir, member.CRC.to_bytes(4, "little"), member.orig_filename.encode()
    while data[at + 46 : at + 46 + len(name)] != name:
        at += 46 + sum(int.from_bytes(data[at + field : at + field + 2], "little") for field in (28, 30, 32))
    data[at + 16 : at + 20] = crc
    for place in (member.header_offset + 14, high, high + 4):
        if data[place : place + 4] == old:
            data[place : place + 4] = crc


def edit_json(path: Path, rng: Random) -> str | None:
    """Write another value into a JSON file, without the digest of a manifest; None where it holds no JSON."""
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        return None
    if not isinstance(document, dict | list) or not document:
        return None
    if isinstance(document, dict):
        document.pop("xxh3", None)
    holder, key = _place(document, rng)
    old = json.dumps(holder[key])
    done = _change(holder, key, rng)
    path.write_text(json.dumps(document))
    return f"{key!r} of {old:.60}: {done}"


def edit_window(path: Path, rng: Random) -> str | None:
    """Write another value into the header of a sparse window; None if it is damaged already."""
    data = path.read_bytes()
    length = int.from_bytes(data[5:13], "little")
    try:
        header = json.loads(data[13 : 13 + length])
    except ValueError:
        return None
    holder, key = _place(header, rng)
    old = json.dumps(holder[key])
    done = _change(holder, key, rng)
    text = json.dumps(header).encode()
    path.write_bytes(data[:5] + len(text).to_bytes(8, "little") + text + data[13 + length :])
    return f"{key!r} of {old:.60}: {done}"


def _place(document: Any, rng: Random) -> tuple[Any, Any]:
    """A value at random, each part of a document as likely as the others, however long it is."""
    holder, key = document, rng.choice(sorted(document) if isinstance(document, dict) else range(len(document)))
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.8:
        holder = holder[key]
        key = rng.choice(sorted(holder) if isinstance(holder, dict) else range(len(holder)))
    return holder, key


def _change(holder: Any, key: Any, rng: Random) -> str:
    value = holder[key]
    match rng.choice(("odd", "near", "remove", "again", "turn")):
        case "remove":
            del holder[key]
            return "removed"
        case "again" if isinstance(holder, list):
            holder.insert(key, value)
            return "twice"
        case "again" if isinstance(key, str):
            holder[f"{key}x"] = holder.pop(key)
            return f"named {key}x"
        case "turn" if isinstance(value, list) and value != value[::-1]:
            value.reverse()
            return "turned round"
        case "near" if type(value) in (int, float):
            holder[key] = value + rng.choice((-1, 1, 8, 0.5 if isinstance(value, float) else 64))
        case "near" if isinstance(value, str) and value:
            at = rng.randrange(len(value))
            holder[key] = value[:at] + rng.choice("a0_/.") + value[at + 1 :]
        case _:
            holder[key] = rng.choice([own for own in ODD if own != value or type(own) is not type(value)])
    return f"-> {json.dumps(holder[key]):.60}"


ODD: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**70,
    0.5,
    float("inf"),
    "",
    "weight",
    "../x",
    "/etc/passwd",
)
ODD += (
    "\x00",
    [],
    {},
    [0],
    [1, 2],
    ["a"],
    {"a": 1},
    {"!tuple": 3},
    {"!set": [[]]},
    [[0, 0], [1, 1], 0, 0, "float32", "00"],
)
"""What is not expected anywhere, or not there."""
