"""Every kept torch_dist checkpoint of Megatron, read and compared bit for bit with the truth gathered in its run.

All layouts of one model hold the same state, so equality with its truth is equality with one another (oracle 1); the
copies compared are the model's own weights, so it is also the rounding of the masters (oracle 3).
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
from ucp.api import convert
from ucp.core.gaps import check_cover
from ucp.core.index import STEP, WEIGHT, Index, Kind
from ucp.core.slices import Locator, resolve
from ucp.core.target import full_slice
from ucp.core.tensor import DType
from ucp.errors import MissingStateError
from ucp.io.files import Sources
from ucp.transfer.compare import find_drift, scan_records
from ucp.transfer.differences import compare
from ucp.transfer.gather import Gatherer

ROOT = Path(__file__).parents[3] / "fixtures" / "megatron"
REPORTS = {path.parent.name: json.loads(path.read_text()) for path in sorted(ROOT.glob("*/case.json"))}
CASES = [name for name, report in REPORTS.items() if report["format"] == "torch_dist"]
EMBEDDING = "embedding.word_embeddings.weight"
SHIFTED = [
    name
    for name in CASES
    if REPORTS[name]["sharding"] == "fully_reshardable" and REPORTS[name]["tied"] and REPORTS[name]["layout"]["pp"] > 1
]
"""Written wrongly by megatron-core: the states of a tied embedding are shifted (docs/reference/megatron.md)."""
SOUND = [name for name in CASES if name not in SHIFTED]


class Silent:
    def begin(self, *, title: str, nbytes: int) -> None:
        """Nothing."""

    def advance(self, nbytes: int) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


@cache
def index_of(case: str) -> Index:
    return MegatronFormat().read(ROOT / case / "checkpoint")


@cache
def truth_of(case: str) -> dict[str, torch.Tensor]:
    """Name and state to tensor; `model` is the model's own weight, `buffer` one that is not trained."""
    return load_file(ROOT / REPORTS[case]["truth"])


@cache
def contents(case: str) -> dict[str, torch.Tensor]:
    gatherer = Gatherer(sources=Sources())
    found = {}
    for atom, key, state in index_of(case).states():
        own = full_slice(atom.name, key, state)
        data = memoryview(bytearray(own.nbytes))
        gatherer.fill(data, own.dtype, resolve(own, Locator(state), 0, own.stop))
        name = "buffer" if atom.kind is Kind.BUFFER and key == WEIGHT else key
        found[f"{atom.name}/{name}"] = torch.frombuffer(data, dtype=getattr(torch, own.dtype.value)).reshape(
            state.global_shape
        )
    gatherer.sources.close()
    return found


@pytest.mark.parametrize("case", CASES)
def test_pieces_tile_every_tensor(case: str) -> None:
    check_cover(index_of(case))


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_the_truth_bit_for_bit(case: str) -> None:
    found = {name: tensor for name, tensor in contents(case).items() if not name.endswith(f"/{STEP}")}
    wanted = {name: tensor for name, tensor in truth_of(case).items() if not name.endswith("/model")}
    if case in SHIFTED:
        wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith(EMBEDDING)}
        wanted[f"{EMBEDDING}/weight"] = truth_of(case)[f"{EMBEDDING}/model"]
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", SOUND)
def test_copies_are_the_masters_rounded(case: str) -> None:
    assert find_drift(index_of(case), Silent()) == []
    for atom in index_of(case).atoms.values():
        model = truth_of(case).get(f"{atom.name}/model")
        if model is not None:
            assert atom.model_dtype == str(model.dtype).removeprefix("torch.")


@pytest.mark.parametrize("case", CASES)
def test_every_byte_that_is_referred_to_has_a_right_checksum(case: str) -> None:
    index = index_of(case)
    assert scan_records(index, Silent()) == []
    summed = {(record.path, record.offset, record.nbytes) for record in index.records}
    ends = {(path, offset + nbytes) for path, offset, nbytes in summed}
    assert len(ends) == len(summed)


@pytest.mark.parametrize("case", CASES)
def test_step_topology_and_extras(case: str) -> None:
    index, report = index_of(case), REPORTS[case]
    assert index.step == report["iteration"]
    for axis in ("tp", "pp", "ep", "dp"):
        assert getattr(index.topology, axis) == report["layout"][axis]
    extras = {extra.name: extra.value for extra in index.extras}
    assert extras["opt_param_scheduler"] == report["opt_param_scheduler"]
    assert {"args", "iteration", "checkpoint_version", "content_metadata"} <= set(extras)
    assert any(name.startswith("rng_state/") for name in extras)
    steps = {float(tensor) for name, tensor in contents(case).items() if name.endswith(f"/{STEP}")}
    assert steps == {float(report["step"])}


@pytest.mark.parametrize("case", CASES)
def test_groups_hold_every_trained_parameter_by_the_rule(case: str) -> None:
    index, saved = index_of(case), REPORTS[case]["param_groups"]
    trained = [name for name, atom in index.atoms.items() if atom.kind is Kind.PARAMETER]
    assert sorted(name for group in index.groups for name in group.params) == sorted(trained)
    for group in index.groups:
        vector = {len(index.atoms[name].global_shape) == 1 or name.endswith(".bias") for name in group.params}
        assert vector == {group.hyper["wd_mult"] == 0.0}
        experts_and_others = len({".experts." in name for name in group.params}) == 2
        assert not (experts_and_others and any(own["is_expert_parallel"] for own in saved))
        assert not {"step", "is_expert_parallel"} & set(group.hyper)  # not the model's, but the run's


@pytest.mark.parametrize("case", CASES)
def test_the_embedding_is_the_output_layer_where_they_are_tied(case: str) -> None:
    wanted = {"output_layer.weight": EMBEDDING} if REPORTS[case]["tied"] else {}
    assert index_of(case).aliases == wanted


@pytest.mark.parametrize("case", CASES)
def test_names_are_canonical_and_in_the_order_of_the_model(case: str) -> None:
    names = list(index_of(case).atoms)
    assert names[0] == EMBEDDING
    layers = [int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")]
    assert layers == sorted(layers)


@pytest.mark.parametrize("case", SHIFTED)
def test_states_that_megatron_wrote_shifted_are_left_out(case: str) -> None:
    (line,) = index_of(case).dropped
    assert f"{EMBEDDING}: by 64 elements" in line
    atom = index_of(case).atoms[EMBEDDING]
    assert list(atom.states) == [WEIGHT]
    assert atom.states[WEIGHT].dtype is DType.BFLOAT16
    assert find_drift(index_of(case), Silent()) == []


@pytest.mark.parametrize("case", SHIFTED)
def test_what_is_left_of_them(case: str, tmp_path: Path) -> None:
    """A run does not resume from it; its weights are sound."""
    src = ROOT / case / "checkpoint"
    with pytest.raises(MissingStateError, match=f"{EMBEDDING}: exp_avg, exp_avg_sq"):
        convert(src, tmp_path / "out", to="megatron", topology="tp=2", workers=1)
    convert(src, tmp_path / "out", to="megatron", topology="tp=2", include=["*/weight"], workers=1)
    left = ucp.open(tmp_path / "out")
    assert len(left.atoms) == len(index_of(case).atoms)
    for name, atom in left.atoms.items():
        assert atom.states == (WEIGHT,)
        assert torch.equal(left.read(name, WEIGHT), truth_of(case)[f"{name}/model"])


def test_there_is_such_a_case() -> None:
    assert SHIFTED


@pytest.mark.parametrize("model", sorted({REPORTS[case]["model"] for case in SOUND}))
def test_all_layouts_of_a_model_are_equal(model: str) -> None:
    first, *others = [case for case in SOUND if REPORTS[case]["model"] == model]
    for other in others:
        differing = compare(index_of(first), index_of(other), Silent())
        assert [change for change in differing if change.what in ("values", "missing", "shape", "kind")] == []
