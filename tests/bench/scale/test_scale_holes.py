"""Archives with holes: what zipfile, torch and our own reader make of them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from tests.bench.scale.holes import Holes, item_of
from ucp.io.torch_file.archive import read_archive

torch = pytest.importorskip("torch")


def test_checksums_hold_and_small_tensors_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    holes = Holes()
    big, weight = holes.tensor((50, 3), torch.float32, {7: "w"}), holes.tensor((50, 3), torch.bfloat16, {7: "w"})
    holes.save({"step": torch.tensor(3.0), "big": [big], "weight": weight}, path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    loaded = torch.load(path)
    assert float(loaded["step"]) == 3.0
    assert loaded["big"][0].count_nonzero() == 2
    assert loaded["weight"].equal(loaded["big"][0].to(torch.bfloat16))


def test_large_files_take_no_space(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    holes = Holes()
    holes.save({"big": holes.tensor((3 << 29,), torch.float32, {0: "big"})}, path)
    stat = path.stat()
    assert stat.st_size > 6 << 30
    assert stat.st_blocks * 512 < 1 << 20
    (record,) = read_archive(str(path)).records
    assert record.nbytes == 6 << 30


def test_an_item_is_what_torch_writes_to_a_buffer(tmp_path: Path) -> None:
    item = item_of(torch.float32, (30, 7))
    with (tmp_path / "item").open("w+b", buffering=0) as file:
        item.write(file.fileno(), 0, "w")
    buffer = io.BytesIO()
    value = torch.load(tmp_path / "item")
    torch.save(value, buffer)
    made, saved = (tmp_path / "item").read_bytes(), buffer.getvalue()
    with zipfile.ZipFile(io.BytesIO(saved)) as theirs, zipfile.ZipFile(tmp_path / "item") as ours:
        assert ours.testzip() is None
        names = theirs.namelist()
        assert ours.namelist() == names
        assert [ours.read(name) == theirs.read(name) for name in names] == ["serialization_id" not in n for n in names]
    assert len(made) == len(saved)
