"""What a target leaves behind is said, and what is written is not held against it."""

from __future__ import annotations

import pytest
import torch

import ucp
from ucp.api import convert
from ucp.core.index import WEIGHT

ANEW = "no parameter has a moment, and Megatron loads no optimizer without moments: none is written"
BARE = (
    "the source records no parameter groups, and without them Megatron loads no optimizer: none is written (start the "
    "run with --no-load-optim)"
)


@pytest.fixture
def llama(fake_legacy, tmp_path):
    run = fake_legacy(kind="llama", tp=2, pp=2, optimizer="L3a")
    run.save(tmp_path / "a")
    return tmp_path / "a"


@pytest.fixture
def without_groups(llama, tmp_path):
    """A torch_dist checkpoint with masters and moments, whose common state has no optimizer."""
    settings = {"transformer_impl": "local"}
    convert(llama, tmp_path / "b", to="megatron", topology="tp=2", settings=settings, workers=1)
    (file,) = (tmp_path / "b").glob("iter_*/common.pt")
    common = torch.load(file, weights_only=False)
    assert "param_groups" in common.pop("optimizer")["optimizer"]
    torch.save(common, file)
    return tmp_path / "b"


def to_megatron(src, dst, layout, **options):
    settings = {"transformer_impl": "local"}
    return convert(
        src, dst, to="megatron", topology="tp=2", layout=layout, settings=settings, workers=1, verify=True, **options
    )


@pytest.mark.parametrize("layout", ["torch_dist", "torch"])
def test_steps_go_with_the_moments(llama, tmp_path, layout):
    report = to_megatron(llama, tmp_path / "c", layout, exclude=["*/exp_avg*"])
    count = len(ucp.open(llama).atoms)
    _, steps, masters, _ = report.dropped
    assert steps == f"step of {count} parameters: {ANEW}"
    assert masters.startswith(f"masters of {count} parameters: {ANEW}. Their weights are written in the type")
    assert {tuple(atom.states) for atom in ucp.open(tmp_path / "c").atoms.values()} == {(WEIGHT,)}


@pytest.mark.parametrize("layout", ["torch_dist", "torch"])
def test_moments_without_groups_are_told(without_groups, tmp_path, layout):
    held = ucp.open(without_groups)
    report = to_megatron(without_groups, tmp_path / "c", layout)
    states, masters = report.dropped
    assert states == f"exp_avg, exp_avg_sq of {len(held.atoms)} parameters: {BARE}"
    assert masters.startswith(f"masters of {len(held.atoms)} parameters: {BARE}")


def test_deepspeed_tells_what_stage_0_leaves_behind(without_groups, tmp_path):
    report = convert(without_groups, tmp_path / "c", to="deepspeed", topology="dp=1,zero=0", workers=1, verify=True)
    assert report.dropped[0].startswith("exp_avg, exp_avg_sq of ")
