"""What every other part of `ucp` does with a delta: the contract of formats, live models, comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ucp
from ucp.chain.delta.format import DeltaFormat
from ucp.contract.protocols import Format
from ucp.testing.formats import FormatContract
from ucp.transfer.patches import Patcher

SHAPES = {"0.weight": (300, 200), "0.bias": (300,), "1.weight": (7, 300)}


def write_versions(folder: Path, count: int) -> list[dict[str, np.ndarray]]:
    """A model, and deltas of it; a version changes two of the three tensors."""
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype("f4") for name, shape in SHAPES.items()}
    versions = [tensors]
    for number in range(1, count):
        tensors = dict(tensors)
        for name in [*SHAPES][number % 2 : number % 2 + 2]:
            tensors[name] = np.where(rng.random(SHAPES[name]) < 0.05, np.float32(number), tensors[name])
        versions.append(tensors)
    for number, version in enumerate(versions):
        model = folder / f"model{number}" if number else folder / "stack/weight_v000000"
        model.mkdir(parents=True)
        save_file(version, model / "model.safetensors")
        if number:
            encoding = "xor" if number % 2 else "overwrite"
            out = folder / f"stack/weight_v{number:06d}"
            ucp.delta(folder / f"stack/weight_v{number - 1:06d}", model, out, encoding=encoding)
    return versions


class TestContract(FormatContract):
    def make(self) -> Format:
        return DeltaFormat()

    def paths(self, folder: Path) -> Sequence[Path]:
        write_versions(folder, 4)
        return [folder / "stack", folder / "stack/weight_v000001"]


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    write_versions(tmp_path, 4)
    return tmp_path / "stack"


def test_a_live_model_gets_the_version_that_it_asks_for(tmp_path: Path) -> None:
    versions = write_versions(tmp_path, 4)
    for at in (2, None):
        model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 7, bias=False))
        ucp.load_into(model, "dp=1", tmp_path / "stack", at=at)
        for name, tensor in model.state_dict().items():
            assert tensor.numpy().tobytes() == versions[-1 if at is None else at][name].tobytes()


@pytest.mark.parametrize("workers", [1, 3])
def test_columns_and_casts_are_written_for_ranks(stack: Path, tmp_path: Path, workers: int) -> None:
    ucp.convert(stack, tmp_path / "dcp", to="dcp", dtypes={"weight": "bfloat16"}, workers=workers, verify=True)
    assert ucp.verify(tmp_path / "dcp", against=stack).ok


def test_versions_are_compared_by_what_they_do_not_share(stack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    fill = Patcher.fill

    def noted(self: Patcher, gatherer: object, buffer: memoryview, dtype: object, pieces: Sequence[object]) -> None:
        read.update(str(piece.ref.shape) for piece in pieces)  # type: ignore[attr-defined]
        fill(self, gatherer, buffer, dtype, pieces)  # type: ignore[arg-type]

    monkeypatch.setattr(Patcher, "fill", noted)
    report = ucp.diff(stack / "weight_v000002", stack / "weight_v000003")
    assert {change.param for change in report.changes} == {"0.bias", "1.weight"}
    assert report.compared == 3
    assert read == {"(300,)", "(7, 300)"}
