"""Every kept legacy checkpoint of Megatron, read and compared bit for bit with what was gathered inside the run."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from ucp_formats.megatron.source import MegatronFormat

from ucp.core.gaps import check_cover
from ucp.core.index import Index, Kind, StateIndex
from ucp.core.slices import Locator, resolve
from ucp.core.target import full_slice
from ucp.io.files import Sources
from ucp.transfer.drift import describe_drift
from ucp.transfer.gather import Gatherer

ROOT = Path(__file__).parents[3] / "fixtures" / "megatron"
CASES = sorted(
    path.parent.name for path in ROOT.glob("*/case.json") if json.loads(path.read_text())["format"] == "torch"
)
STATES = ("weight", "exp_avg", "exp_avg_sq")


@cache
def case_of(name: str) -> dict[str, object]:
    return json.loads((ROOT / name / "case.json").read_text())


@cache
def truth_of(name: str) -> dict[str, Tensor]:
    return load_file(ROOT / str(case_of(name)["truth"]))


@cache
def index_of(name: str) -> Index:
    return MegatronFormat().read(ROOT / name / "checkpoint")


def whole(name: str, state: str, found: StateIndex, gatherer: Gatherer) -> tuple[Tensor, list[str]]:
    """A state as conversions take it, and what its copies differ in."""
    own, locator = full_slice(name, state, found), Locator(found)
    data = memoryview(bytearray(found.nbytes))
    gatherer.fill(data, found.dtype, resolve(own, locator, 0, found.numel))
    dtype = getattr(torch, found.dtype.value)
    return torch.frombuffer(data, dtype=dtype).reshape(found.global_shape), list(
        describe_drift(own, locator, data, gatherer)
    )


@pytest.mark.parametrize("name", CASES)
def test_states_are_those_of_the_run(name: str) -> None:
    """Every element of every weight and moment; copies, the model's own weights among them, agree with it."""
    index, truth = index_of(name), truth_of(name)
    check_cover(index)
    gatherer = Gatherer(sources=Sources())
    known = {key.rpartition("/")[0] for key in truth}
    assert set(index.atoms) == known
    for param, atom in index.atoms.items():
        for state in STATES if atom.kind is Kind.PARAMETER else ("weight",):
            found, differences = whole(param, state, atom.states[state], gatherer)
            key = f"{param}/{'buffer' if atom.kind is Kind.BUFFER else state}"
            assert torch.equal(found, truth[key]), key
            assert differences == []
    gatherer.sources.close()


@pytest.mark.parametrize("name", CASES)
def test_models_compute_in_the_type_of_their_weights(name: str) -> None:
    index, truth = index_of(name), truth_of(name)
    for param, atom in index.atoms.items():
        if atom.kind is Kind.PARAMETER:
            saved = truth[f"{param}/model"]
            dtype = (atom.model_dtype or atom.states["weight"].dtype).value
            assert str(saved.dtype) == f"torch.{dtype}"
            assert torch.equal(truth[f"{param}/weight"].to(saved.dtype), saved)


@pytest.mark.parametrize("name", CASES)
def test_the_run_is_described(name: str) -> None:
    case, index = case_of(name), index_of(name)
    layout, topology = case["layout"], index.topology
    assert (topology.tp, topology.pp, topology.ep, topology.vpp) == tuple(layout[k] for k in ("tp", "pp", "ep", "vpp"))
    assert topology.expert_tp == layout["etp"] or layout["ep"] == 1
    assert index.step == case["iteration"]
    extras = {extra.name: extra.value for extra in index.extras}
    assert extras["opt_param_scheduler"] == case["opt_param_scheduler"]
    assert "args" in extras
    tied = {"output_layer.weight": "embedding.word_embeddings.weight"} if case["tied"] else {}
    assert dict(index.aliases) == tied


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_in_one_group_of_the_run(name: str) -> None:
    case, index = case_of(name), index_of(name)
    grouped = [param for group in index.groups for param in group.params]
    assert sorted(grouped) == sorted(n for n, atom in index.atoms.items() if atom.kind is Kind.PARAMETER)
    known = {own["wd_mult"] for own in case["param_groups"]}
    assert {own.hyper["wd_mult"] for own in index.groups if own.params} <= known
    assert not any("is_expert_parallel" in own.hyper or "step" in own.hyper for own in index.groups)


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_its_step(name: str) -> None:
    case, index = case_of(name), index_of(name)
    gatherer = Gatherer(sources=Sources())
    for param, atom in index.atoms.items():
        if atom.kind is Kind.PARAMETER:
            step, _ = whole(param, "step", atom.states["step"], gatherer)
            assert float(step) == case["step"]
