"""Writes a rank's share of a save: one pack, the rank's extras, and the part manifest that lists both.

The pack is a safetensors file. A tensor in it is what the rank holds of a state: all of it, its local tensor, or a flat
range of that; the part manifest says which boxes of the global tensor these bytes are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct, UnsetType
from zlib_ng import zlib_ng

from ucp.contract.plugins import producer
from ucp.core.index import Extra
from ucp.core.tensor import DType
from ucp.errors import MalformedError
from ucp.io.json_text import Natural, NotJson, decode, has_wrong_digest, with_digest
from ucp.io.safetensors import layout_safetensors
from ucp.io.writing import replace_file, sync, write_at
from ucp.saving.holdings import Holding, to_bytes
from ucp.saving.plan import SaveItem
from ucp.store.manifest import Crc32, Piece, StoredExtra, StoredFile
from ucp.store.target import encode_extra, extra_stem

PARTS = "ranks"
"""Folder of the part manifests, which is there until the commit."""
_MOST_WRITTEN = 16 << 20
"""Bytes of one write, at most."""


class SavedShard(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank wrote of a state: one range of its pack."""

    param: str
    """Parameter or buffer."""
    state: str
    """State."""
    offset: Natural
    """First byte in the pack."""
    nbytes: Natural
    """Number of bytes."""
    crc32: Crc32
    """CRC-32 of them."""
    pieces: tuple[Piece, ...]
    """Boxes of the global tensor, and where they start in the pack; `place` is 0."""


class PartManifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank wrote."""

    rank: Natural
    """The rank."""
    pack: StoredFile | None
    """Its pack; None if it wrote no tensors."""
    shards: tuple[SavedShard, ...]
    """Contents of the pack."""
    extras: tuple[StoredExtra, ...]
    """Its extras."""
    xxh3: str | UnsetType = UNSET
    """Digest of all bytes before this field."""


def write_part(
    root: Path, rank: int, share: Sequence[SaveItem], holdings: Mapping[SaveItem, Holding], extras: Sequence[Extra]
) -> int:
    """Write the share of `rank` into the folder `root`, its part manifest last. Returns the bytes of the pack.

    `extras`: values of Python, as `state_dict` gives them.
    """
    stored = [_write_extra(root, extra) for extra in extras]
    part = PartManifest(rank=rank, pack=None, shards=(), extras=tuple(stored))
    if share:
        pack, shards = _write_pack(root, rank, share, holdings)
        part = msgspec.structs.replace(part, pack=pack, shards=tuple(shards))
    replace_file(root / PARTS / f"{rank:05d}.json", with_digest(msgspec.json.encode(part)))
    return sum(shard.nbytes for shard in part.shards)


def read_part(root: Path, rank: int) -> PartManifest | None:
    """The part manifest of `rank`; None if it is not there. Raises MalformedError."""
    path = root / PARTS / f"{rank:05d}.json"
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        if has_wrong_digest(text):
            raise NotJson("its digest differs")
        return decode(text, PartManifest)
    except NotJson as error:
        raise MalformedError(f"expected a part manifest in {path}; {error}. Save again") from error


def count_written(root: Path, rank: int) -> int:
    """Bytes in the pack of `rank` so far."""
    try:
        return os.stat(root / _name_pack(rank)).st_size
    except FileNotFoundError:
        return 0


def _name_pack(rank: int) -> str:
    return f"packs/{rank:05d}.safetensors"


def _write_pack(
    root: Path, rank: int, share: Sequence[SaveItem], holdings: Mapping[SaveItem, Holding]
) -> tuple[StoredFile, list[SavedShard]]:
    """Write the pack; wide dtypes come first, so that every tensor is aligned."""
    ordered = sorted(share, key=lambda item: -holdings[item].facts.dtype.itemsize)
    entries: list[tuple[str, DType, tuple[int, ...]]] = []
    for item in ordered:
        holding = holdings[item]
        assert holding.tensor is not None
        is_full = [box.sizes for box in item.boxes] == [holding.facts.shape]
        label = f"{item.param}/{item.state}"
        entries.append((label if is_full else f"{label}@rank{rank}", holding.facts.dtype, tuple(holding.tensor.shape)))
    layout = layout_safetensors(entries, metadata={"format": "pt", "producer": producer()})
    name = _name_pack(rank)
    shards = []
    descriptor = os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_at(descriptor, layout.header, 0)
        for item, (label, dtype, _) in zip(ordered, entries, strict=True):
            holding, offset = holdings[item], layout.offsets[label]
            assert holding.tensor is not None
            data = to_bytes(holding.tensor)
            for start in range(0, data.nbytes, _MOST_WRITTEN):
                write_at(descriptor, data[start : start + _MOST_WRITTEN], offset + start)
            pieces = tuple(
                Piece(
                    offsets=placed.box.offsets,
                    sizes=placed.box.sizes,
                    replica=0,
                    term=0,
                    dtype=dtype,
                    place=0,
                    offset=offset + placed.offset * dtype.itemsize,
                    strides=placed.strides,
                )
                for placed in holding.boxes
            )
            crc32 = zlib_ng.crc32(data)
            shards.append(
                SavedShard(
                    param=item.param, state=item.state, offset=offset, nbytes=data.nbytes, crc32=crc32, pieces=pieces
                )
            )
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync(root / "packs")
    header = len(layout.header), zlib_ng.crc32(layout.header)
    return StoredFile(path=name, header=header, nbytes=layout.nbytes), shards


def _write_extra(root: Path, extra: Extra) -> StoredExtra:
    """Write an extra: JSON if its value is plain, else by torch.save."""
    import io

    import torch

    text, suffix = encode_extra(extra.value), "json"
    if not text:
        buffer = io.BytesIO()
        torch.save(extra.value, buffer)
        text, suffix = buffer.getvalue(), "pt"
    file = f"{extra_stem(extra.name, extra.rank)}.{suffix}"
    replace_file(root / file, text)
    return StoredExtra(name=extra.name, rank=extra.rank, file=file, nbytes=len(text), crc32=zlib_ng.crc32(text))
