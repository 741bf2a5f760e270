"""Files that megatron-core and DeepSpeed wrote, their moments put to zero as by a run that lost its optimizer."""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ucp
from ucp.errors import MalformedError

ROOT = Path(__file__).parents[3] / "fixtures"
MOMENTS = ("exp_avg", "exp_avg_sq")


class Inert:
    """In the place of every class a file names: what wrote the file need not be installed."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


class Keys(pickle.Unpickler):
    """The tree of a file of torch.save, each tensor as the key of its storage."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_rebuild_tensor_v2":
            return lambda key, *_: key
        return super().find_class(module, name) if module == "collections" else Inert

    def persistent_load(self, pid: tuple[Any, ...]) -> str:
        return f"data/{pid[2]}"


def keys_under(value: Any, names: tuple[str, ...], *, inside: bool = False) -> Iterator[str]:
    """The keys of the tensors under one of `names`."""
    if isinstance(value, dict):
        for key, own in value.items():
            yield from keys_under(own, names, inside=inside or key in names)
    elif isinstance(value, list):
        for own in value:
            yield from keys_under(own, names, inside=inside)
    elif inside and isinstance(value, str):
        yield value


def lose(path: Path, names: tuple[str, ...] = MOMENTS) -> None:
    """Put the storages of the tensors under `names` to zero in a file of torch.save, its other members as they were."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    [tree] = [data for name, data in members.items() if name.endswith("/data.pkl")]
    lost = set(keys_under(Keys(io.BytesIO(tree)).load(), names))
    assert lost
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, bytes(len(data)) if name.partition("/")[2] in lost else data)


def lose_in_items(folder: Path) -> None:
    """torch_dist: items of the same length in the place of those with moments."""
    saved = pickle.loads((folder / ".metadata").read_bytes())
    for index, place in saved.storage_data.items():
        if index.fqn.rpartition(".")[2] in MOMENTS or any(f".{name}." in index.fqn for name in MOMENTS):
            with (folder / place.relative_path).open("r+b") as file:
                file.seek(place.offset)
                item = io.BytesIO(file.read(place.length))
                made = io.BytesIO()
                torch.save(torch.load(item).zero_(), made)
                assert len(made.getvalue()) == place.length
                file.seek(place.offset)
                file.write(made.getvalue())


def lose_in_files(folder: Path) -> None:
    """Legacy files and DeepSpeed's: written anew."""
    files = [*folder.glob("*/distrib_optim.pt"), *folder.glob("*_optim_states.pt")]
    assert files
    for path in files:
        lose(path)


CASES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "megatron/llama-tp2-dp2-dp": ("iter_0000010", lose_in_items),
    "megatron/mixtral-ep4-dp4-full": ("iter_0000010", lose_in_items),
    "megatron/llama-tp2-pp2-dp2-torch-zero": ("iter_0000010", lose_in_files),
    "deepspeed/z1-dp4-fp32": ("global_step3", lose_in_files),
    "deepspeed/z3-dp4-bf16": ("global_step3", lose_in_files),
}


@pytest.fixture(params=CASES)
def lost(request, tmp_path) -> Path:
    shutil.copytree(ROOT / request.param / "checkpoint", tmp_path / "lost")
    folder, lose_in = CASES[request.param]
    lose_in(tmp_path / "lost" / folder)
    return tmp_path / "lost"


def test_it_is_refused_and_shown(lost, tmp_path):
    with pytest.raises(MalformedError, match="exp_avg, exp_avg_sq is zero "):
        ucp.convert(lost, tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()
    assert any("zero wherever they were sampled" in note for note in ucp.inspect(lost).notes)


def test_and_with_zeros_when_asked(lost, tmp_path):
    ucp.convert(lost, tmp_path / "out", zero_moments="keep", workers=1)
    found = ucp.open(tmp_path / "out")
    names = [name for name, atom in found.atoms.items() if "exp_avg" in atom.states]
    assert names
    assert not any(found.read(name, state).any() for name in names for state in MOMENTS)


def test_experts_that_saw_no_token_are_no_lost_optimizer(tmp_path):
    source = ROOT / "deepspeed" / "z1-ep2-dp4" / "checkpoint"
    ucp.convert(source, tmp_path / "out", include=["*deepspeed_experts.3.*"], workers=1)
    found = ucp.open(tmp_path / "out")
    assert found.atoms
    assert not any(found.read(name, "exp_avg").any() for name in found.atoms)


def test_an_optimizer_that_counts_no_steps(tmp_path):
    shutil.copytree(ROOT / "deepspeed" / "z1-dp2-sgd" / "checkpoint", tmp_path / "lost")
    for path in tmp_path.glob("lost/global_step3/*_optim_states.pt"):
        lose(path, ("momentum_buffer",))
    with pytest.raises(MalformedError, match="momentum_buffer is zero "):
        ucp.convert(tmp_path / "lost", tmp_path / "out", workers=1)


def test_a_live_optimizer_does_not_take_them(tmp_path):
    """The same file, not zeroed, loads."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    case = ROOT / "deepspeed" / "z1-dp4-fp32" / "checkpoint"
    shutil.copytree(case, tmp_path / "lost")
    lose_in_files(tmp_path / "lost" / "global_step3")
    options: dict[str, Any] = {"optimizer": optimizer, "strict": False}
    with pytest.raises(MalformedError, match="zero_moments='keep'"):
        ucp.load_into(model, checkpoint=tmp_path / "lost", **options)
    for fine in ({"checkpoint": case}, {"checkpoint": tmp_path / "lost", "zero_moments": "keep"}):
        with pytest.raises(ucp.errors.LoadError, match=f"tensor of {fine['checkpoint']}"):  # both got past the moments
            ucp.load_into(model, **fine, **options)
    with pytest.raises(ucp.errors.LoadError):
        ucp.load_into(model, checkpoint=tmp_path / "lost", strict=False)


def test_it_goes_on_without_moments(lost, tmp_path):
    ucp.convert(lost, tmp_path / "out", exclude=["*/exp_avg", "*/exp_avg_sq"], workers=1)
    atoms = ucp.open(tmp_path / "out").atoms
    assert all("exp_avg" not in atom.states for atom in atoms.values())


def test_atoms_are_looked_at_like_any_source(lost, tmp_path):
    ucp.convert(lost, tmp_path / "atoms", zero_moments="keep", compress=True, workers=1)
    with pytest.raises(MalformedError, match="exp_avg, exp_avg_sq is zero "):
        ucp.convert(tmp_path / "atoms", tmp_path / "out", workers=1)
