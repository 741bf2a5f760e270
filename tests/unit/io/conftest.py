"""Carry out a torch zip layout in memory, and take a value of torch apart into new tensors and their bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from zlib_ng import zlib_ng

from ucp.core.tensor import DType
from ucp.io.torch_file.layout import TorchZip
from ucp.io.torch_file.storage import NewStorage, NewTensor


@dataclass
class Apart:
    """Tensors of torch replaced by new ones, aliasing kept."""

    storages: dict[int, NewStorage] = field(default_factory=dict)
    contents: dict[NewStorage, bytes] = field(default_factory=dict)

    def take(self, tensor: torch.Tensor) -> NewTensor:
        """The new tensor that stands for `tensor`."""
        raw = tensor.untyped_storage()
        storage = self.storages.get(raw._cdata)
        if storage is None:
            dtype = DType(str(tensor.dtype).removeprefix("torch."))
            storage = self.storages[raw._cdata] = NewStorage(dtype, raw.nbytes() // dtype.itemsize)
            self.contents[storage] = bytes(torch.tensor(raw, dtype=torch.uint8).numpy()) if raw.nbytes() else b""
        return NewTensor(
            storage=storage,
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
        )


@pytest.fixture
def apart() -> Apart:
    """Nothing taken apart yet."""
    return Apart()


@pytest.fixture
def carried_out() -> Callable[[TorchZip, dict[NewStorage, bytes]], bytes]:
    """The bytes of a layout with the contents of its storages."""

    def carry_out(layout: TorchZip, contents: dict[NewStorage, bytes]) -> bytes:
        out = bytearray(layout.nbytes)
        for literal in layout.literals:
            out[literal.offset : literal.offset + len(literal.data)] = literal.data
        for storage, offset in layout.storages.items():
            out[offset : offset + storage.nbytes] = contents[storage]
        for crc in layout.crcs:
            value = zlib_ng.crc32(bytes(out[crc.start : crc.stop])).to_bytes(4, "little")
            for at in crc.at:
                out[at : at + 4] = value
        return bytes(out)

    return carry_out
