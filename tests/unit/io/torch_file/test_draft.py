"""A torch file in the making: where slices and carried tensors come to lie in it."""

from __future__ import annotations

from pathlib import Path

import torch

from ucp.core.region import Box, RegionPair
from ucp.core.target import Slice
from ucp.core.tensor import DType, TensorRef
from ucp.io.torch_file.archive import read_archive
from ucp.io.torch_file.draft import FileDraft, FinishedFile, Part


def own(param: str, numel: int, *, start: int = 0, stop: int | None = None) -> Slice:
    whole = Box.full((numel,))
    stop = numel if stop is None else stop
    pairs = (RegionPair(whole, whole),)
    return Slice(
        param=param, state="weight", dtype=DType.FLOAT32, pairs=pairs, local_shape=(numel,), start=start, stop=stop
    )


def written(drafted: FinishedFile, folder: Path, values: dict[str, bytes]) -> Path:
    """The file, with the bytes of each parameter where its slices lie."""
    data = bytearray(drafted.file.nbytes)
    for literal in drafted.file.literals:
        data[literal.offset : literal.offset + len(literal.data)] = literal.data
    for place in drafted.placements:
        piece = values[place.slice.param][place.slice.start * 4 : place.slice.stop * 4]
        data[place.offset : place.offset + len(piece)] = piece
    path = folder / drafted.file.path
    path.write_bytes(data)
    return path


def floats(*values: float) -> bytes:
    return torch.tensor(values, dtype=torch.float32).numpy().tobytes()


def test_torch_finds_slices_where_they_were_put(tmp_path: Path) -> None:
    draft = FileDraft("own.pt")
    flat = draft.add_tensor(
        DType.FLOAT32,
        (6,),
        [Part(offset=4, slice=own("b", 2)), Part(offset=0, slice=own("a", 5, start=2, stop=5))],
    )
    drafted = draft.finish({"flat": flat, "whole": draft.add_slice(own("b", 2)), "step": 7})
    path = written(drafted, tmp_path, {"a": floats(0, 1, 2, 3, 4), "b": floats(8, 9)})
    loaded = torch.load(path, weights_only=True)
    assert loaded["flat"].tolist() == [2, 3, 4, 0, 8, 9]
    assert loaded["whole"].tolist() == [8, 9]
    assert loaded["step"] == 7
    assert [place.offset for place in drafted.placements] == sorted(place.offset for place in drafted.placements)


def test_what_has_no_bytes_is_not_placed() -> None:
    draft = FileDraft("own.pt")
    drafted = draft.finish([draft.add_slice(own("void", 0))])
    assert drafted.placements == ()


def test_tensors_of_extras_are_copied(tmp_path: Path) -> None:
    torch.save({"rng": torch.arange(4, dtype=torch.int32)}, tmp_path / "source.pt")
    root = read_archive(str(tmp_path / "source.pt")).root
    draft = FileDraft("own.pt")
    drafted = draft.finish(draft.copy_extra(root))
    assert isinstance(root, dict)
    (copy,) = drafted.raw
    assert isinstance(copy.src, TensorRef)
    assert (copy.src.path, copy.src.offset) == (root["rng"].path, root["rng"].offset)
    data = bytearray(written(drafted, tmp_path, {}).read_bytes())
    data[copy.offset : copy.offset + 16] = torch.arange(4, dtype=torch.int32).numpy().tobytes()
    (tmp_path / "own.pt").write_bytes(data)
    assert torch.load(tmp_path / "own.pt", weights_only=True)["rng"].tolist() == [0, 1, 2, 3]
