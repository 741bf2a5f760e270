"""`--optimizer zero`: moments of zero for a published model, in the files of every framework."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucp
from ucp.errors import MisfitError, UsageError

ROOT = Path(__file__).parents[3] / "fixtures"
LLAMA = ROOT / "huggingface" / "llama" / "model"
MIXTRAL = ROOT / "huggingface" / "mixtral" / "model"
TARGETS = {
    "deepspeed": "dp=2,zero=1",
    "deepspeed-universal": None,
    "dcp": "dp=2",
    "megatron": "dp=2,tp=2",
    "ucp": None,
}


@pytest.mark.parametrize("to", TARGETS)
def test_every_target_has_zeros_and_the_weights(to: str, tmp_path: Path) -> None:
    report = ucp.convert(LLAMA, tmp_path / "out", to=to, topology=TARGETS[to], optimizer="zero", verify=True)
    assert any("--optimizer zero" in note and "lr=0.001" in note for note in report.notes)
    checkpoint, first = ucp.open(tmp_path / "out"), ucp.open(LLAMA)
    assert sum(len(group.params) for group in checkpoint.index.groups) == len(checkpoint.index.atoms)
    for name, atom in checkpoint.index.atoms.items():
        for state in ("exp_avg", "exp_avg_sq"):
            found = checkpoint.read(name, state)
            assert found.dtype is torch.float32
            assert tuple(found.shape) == atom.global_shape
            assert not found.any()
    if to != "megatron":  # which has other names and joins projections
        for name in first.index.atoms:
            assert torch.equal(first.read(name, "weight"), checkpoint.read(name, "weight"))


def test_zeros_cost_an_atom_store_nothing(tmp_path: Path) -> None:
    plain = ucp.convert(LLAMA, tmp_path / "plain")
    ucp.convert(LLAMA, tmp_path / "zero", optimizer="zero")
    packs = sum(file.stat().st_size for file in (tmp_path / "zero" / "packs").iterdir())
    assert packs < plain.nbytes_out
    ucp.convert(tmp_path / "zero", tmp_path / "dcp", to="dcp")
    assert ucp.diff(tmp_path / "dcp", tmp_path / "zero").equal


def test_settings_of_the_group(tmp_path: Path) -> None:
    said = {"lr": 2e-5, "beta2": 0.95, "weight_decay": 0.1}
    ucp.convert(LLAMA, tmp_path / "out", to="dcp", optimizer="zero", settings=said)
    (group,) = ucp.inspect(tmp_path / "out").groups
    assert {key: group.hyper[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 2e-5,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
    }


@pytest.mark.parametrize("said", [{"lr": "fast"}, {"lr": -1}, {"beta1": 1}, {"eps": "nan"}])
def test_settings_that_are_none(said: dict[str, str | int | float], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--set {next(iter(said))}=.*; got {next(iter(said.values()))}"):
        ucp.convert(LLAMA, tmp_path / "out", to="dcp", optimizer="zero", settings=said)


def test_a_source_with_an_optimizer_is_refused(tmp_path: Path) -> None:
    source = ROOT / "torch" / "fsdp2-dp4" / "checkpoint"
    with pytest.raises(UsageError, match=r"has .*exp_avg.*: drop --optimizer"):
        ucp.convert(source, tmp_path / "out", to="dcp", optimizer="zero")


def test_a_source_whose_states_are_left_out_starts_anew_in_its_own_groups(tmp_path: Path) -> None:
    source = ROOT / "torch" / "fsdp2-dp4" / "checkpoint"
    ucp.convert(source, tmp_path / "out", to="deepspeed", topology="zero=1", optimizer="zero", include=["*/weight"])
    made, before = ucp.open(tmp_path / "out"), ucp.inspect(source)
    assert [group.params for group in made.index.groups] == [group.params for group in before.groups]
    assert [group.hyper["lr"] for group in made.index.groups] == [group.hyper["lr"] for group in before.groups]
    assert not any(made.read(name, "exp_avg").any() for group in before.groups for name in group.params)
    with pytest.raises(UsageError, match="drop --set lr"):
        ucp.plan(source, to="dcp", optimizer="zero", include=["*/weight"], settings={"lr": 1e-4})


def test_an_order_that_is_not_known_is_refused_where_it_matters(tmp_path: Path) -> None:
    for source in (MIXTRAL, tmp_path / "atoms"):
        if source != MIXTRAL:
            ucp.convert(MIXTRAL, source)
        with pytest.raises(MisfitError, match="deepspeed-universal"):
            ucp.convert(source, tmp_path / "out", to="deepspeed", topology="zero=1", optimizer="zero")
        ucp.plan(source, to="deepspeed-universal", optimizer="zero")
        ucp.plan(source, to="deepspeed", topology="zero=0")


def test_moments_of_it_are_not_taken_for_lost_ones(tmp_path: Path) -> None:
    ucp.convert(LLAMA, tmp_path / "out", to="deepspeed", topology="dp=2,zero=3", optimizer="zero")
    ucp.convert(tmp_path / "out", tmp_path / "again", to="deepspeed", topology="dp=3,zero=1")
