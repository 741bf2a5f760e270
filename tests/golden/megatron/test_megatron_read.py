"""Every kept checkpoint of Megatron, torch_dist and legacy, compared bit for bit with the truth gathered in its run.

All layouts of one model have one truth, so equality with it is equality with one another.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from ucp_formats.megatron.source import MegatronFormat

import ucp
from tests.golden.truth import FIXTURES, check_copies, check_equal, is_same, read_states
from ucp.api import convert
from ucp.conversion.prepare import SilentObserver
from ucp.core.index import STEP, WEIGHT, Index, Kind
from ucp.core.tensor import DType
from ucp.errors import MissingStateError
from ucp.transfer.compare import scan_records

ROOT = FIXTURES / "megatron"
REPORTS = {path.parent.name: json.loads(path.read_text()) for path in sorted(ROOT.glob("*/case.json"))}
CASES = list(REPORTS)
DIST = [name for name, report in REPORTS.items() if report["format"] == "torch_dist"]
EMBEDDING = "embedding.word_embeddings.weight"
SHIFTED = [
    name
    for name in DIST
    if REPORTS[name]["sharding"] == "fully_reshardable" and REPORTS[name]["tied"] and REPORTS[name]["layout"]["pp"] > 1
]
"""Written wrongly by megatron-core: the states of a tied embedding are shifted (docs/reference/megatron.md)."""


@cache
def index_of(case: str) -> Index:
    return MegatronFormat().read(ROOT / case / "checkpoint")


@cache
def truth_of(case: str) -> dict[str, torch.Tensor]:
    """Name and state to tensor; `model` is the model's own weight, `buffer` one that is not trained."""
    return load_file(ROOT / REPORTS[case]["truth"])


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_the_truth_bit_for_bit(case: str) -> None:
    """Copies, the model's own weights among them, are the masters rounded."""
    index, truth = index_of(case), truth_of(case)
    found = read_states(index)
    steps = {float(found.pop(name)) for name in list(found) if name.endswith(f"/{STEP}")}
    assert steps == {float(REPORTS[case]["step"])}
    wanted = {name.replace("/buffer", "/weight"): own for name, own in truth.items() if not name.endswith("/model")}
    if case in SHIFTED:
        wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith(EMBEDDING)}
        wanted[f"{EMBEDDING}/weight"] = truth[f"{EMBEDDING}/model"]
    check_equal(found, wanted)
    check_copies(index)


@pytest.mark.parametrize("case", CASES)
def test_models_compute_in_the_type_of_their_weights(case: str) -> None:
    for name, atom in index_of(case).atoms.items():
        if atom.kind is Kind.PARAMETER and f"{name}/model" in truth_of(case):
            saved = truth_of(case)[f"{name}/model"]
            assert str(saved.dtype) == f"torch.{(atom.model_dtype or atom.states[WEIGHT].dtype)}"
            if f"{name}/weight" in truth_of(case):
                assert is_same(truth_of(case)[f"{name}/weight"].to(saved.dtype), saved)


@pytest.mark.parametrize("case", DIST)
def test_every_byte_that_is_referred_to_has_a_right_checksum(case: str) -> None:
    index = index_of(case)
    assert scan_records(index, SilentObserver()) == []
    ends = {(record.path, record.offset + record.nbytes) for record in index.records}
    assert len(ends) == len({(record.path, record.offset, record.nbytes) for record in index.records})


@pytest.mark.parametrize("case", CASES)
def test_step_topology_ties_and_extras(case: str) -> None:
    index, report = index_of(case), REPORTS[case]
    layout, topology = report["layout"], index.topology
    assert index.step == report["iteration"]
    assert all(getattr(topology, axis) == layout[axis] for axis in ("tp", "pp", "ep"))
    if case in DIST:
        assert topology.dp == layout["dp"]
    else:
        assert topology.vpp == layout["vpp"]
        assert topology.expert_tp == layout["etp"] or layout["ep"] == 1
    extras = {extra.name: extra.value for extra in index.extras}
    assert extras["opt_param_scheduler"] == report["opt_param_scheduler"]
    assert "args" in extras
    if case in DIST:
        assert {"iteration", "checkpoint_version", "content_metadata"} <= set(extras)
        assert any(name.startswith("rng_state/") for name in extras)
    assert index.aliases == ({"output_layer.weight": EMBEDDING} if report["tied"] else {})


@pytest.mark.parametrize("case", CASES)
def test_groups_hold_every_trained_parameter_by_the_rule(case: str) -> None:
    index, saved = index_of(case), REPORTS[case]["param_groups"]
    trained = [name for name, atom in index.atoms.items() if atom.kind is Kind.PARAMETER]
    assert sorted(name for group in index.groups for name in group.params) == sorted(trained)
    assert {own.hyper["wd_mult"] for own in index.groups if own.params} <= {own["wd_mult"] for own in saved}
    for group in index.groups:
        assert not {"step", "is_expert_parallel"} & set(group.hyper)  # not the model's, but the run's
        if case in DIST:
            vector = {len(index.atoms[name].global_shape) == 1 or name.endswith(".bias") for name in group.params}
            assert vector == {group.hyper["wd_mult"] == 0.0}
            experts_and_others = len({".experts." in name for name in group.params}) == 2
            assert not (experts_and_others and any(own["is_expert_parallel"] for own in saved))


@pytest.mark.parametrize("case", DIST)
def test_names_are_in_the_order_of_the_model(case: str) -> None:
    names = list(index_of(case).atoms)
    assert names[0] == EMBEDDING
    layers = [int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")]
    assert layers == sorted(layers)


@pytest.mark.parametrize("case", SHIFTED)
def test_states_that_megatron_wrote_shifted_are_left_out(case: str, tmp_path: Path) -> None:
    """A run does not resume from it; its weights are sound."""
    index, src = index_of(case), ROOT / case / "checkpoint"
    (line,) = index.dropped
    assert f"{EMBEDDING}: by 64 elements" in line
    assert {name: state.dtype for name, state in index.atoms[EMBEDDING].states.items()} == {WEIGHT: DType.BFLOAT16}
    with pytest.raises(MissingStateError, match=f"{EMBEDDING}: exp_avg, exp_avg_sq"):
        convert(src, tmp_path / "out", to="megatron", topology="tp=2", workers=1)
    convert(src, tmp_path / "out", to="megatron", topology="tp=2", include=["*/weight"], workers=1)
    wanted = {f"{name}/weight": truth_of(case)[f"{name}/model"] for name in index.atoms}
    check_equal(read_states(ucp.inspect(tmp_path / "out")), wanted)


def test_there_is_such_a_case() -> None:
    assert SHIFTED
