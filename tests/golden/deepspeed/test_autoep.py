"""Experts that AutoEP stacked: universal folders, files that lack some, and what is written from them.

`test_deepspeed_parallel` compares the native files with what each rank of the run held.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ucp_formats.deepspeed.placement import read_affine_map, write_affine_map
from ucp_formats.deepspeed.read.stacks import PARTS, ExpertStacks
from ucp_formats.deepspeed.write.autoep import _split_groups

import ucp
from tests.golden.deepspeed.test_deepspeed_parallel import ROOT, states_of, truths
from tests.golden.truth import check_copies, check_equal, is_same, load_stubbed, read_states
from ucp.core.index import Kind, ParamGroup
from ucp.core.topology import Topology
from ucp.errors import (
    MalformedError,
    MissingFileError,
    MissingStateError,
    TopologyError,
    UcpError,
    UnsupportedError,
    UsageError,
)
from ucp.placement.forms import write_placement
from ucp.placement.placement import Placement

CASES = sorted(path.parent.name for path in ROOT.glob("z*autoep*/truth-ep00.json"))
PLACED = sorted(path.name for path in ROOT.glob("z*autoep*-placed"))
"""Runs of CASES, rewritten with another placement (fixtures/make/deepspeed/place_experts.py)."""
CONVERTED = [case for case in CASES if (ROOT / case / "universal").is_dir()]
EXPERTS = "model.layers.0.mlp.experts"


def without_module_dtype(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: state.float() for key, state in states.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_stack_has_the_experts_of_all_ranks_in_order(case: str) -> None:
    for part in ("w1", "w2", "w3"):
        for state in ("weight", "exp_avg", "exp_avg_sq"):
            key = f"{EXPERTS}.{part}/{state}"
            held = [rank.get(key, rank[f"{EXPERTS}.{part}/module"]) for rank in truths(case)]
            assert len(held) == 2
            assert is_same(states_of(case)[key], torch.cat(held)), key


@pytest.mark.parametrize("case", CONVERTED)
def test_deepspeeds_universal_folder_is_read_the_same(case: str) -> None:
    index = ucp.open(ROOT / case / "universal").index
    check_copies(index)
    check_equal(without_module_dtype(read_states(index)), without_module_dtype(states_of(case)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["deepspeed-universal", "torch", "dcp"])
def test_what_is_written_is_read_the_same(case: str, to: str, tmp_path: Path) -> None:
    ucp.convert(ROOT / case / "checkpoint", tmp_path / "out", to=to)
    found = read_states(ucp.open(tmp_path / "out").index)
    for key, state in states_of(case).items():
        assert torch.equal(found[key], state), key


@pytest.mark.parametrize("case", CONVERTED)
def test_the_universal_files_say_what_deepspeed_s_own_say(case: str, tmp_path: Path) -> None:
    ucp.convert(ROOT / case / "checkpoint", tmp_path / "out", to="deepspeed-universal")
    (ours,), (theirs,) = (list(path.glob("*/zero")) for path in (tmp_path / "out", ROOT / case / "universal"))
    for part in ("w1", "w2", "w3"):
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            found, wanted = (torch.load(path / f"{EXPERTS}.{part}" / f"{state}.pt") for path in (ours, theirs))
            assert torch.equal(found.pop("param"), wanted.pop("param"))
            assert found == wanted


@pytest.mark.parametrize("is_listed", [True, False])
def test_moments_of_one_rank_are_refused(is_listed: bool, tmp_path: Path) -> None:
    """Folders that DeepSpeed made before its pull request 8198; the files of a parameter alone tell it, too."""
    universal = shutil.copytree(ROOT / CONVERTED[0] / "universal", tmp_path / "universal")
    for model in universal.glob("*/*model_states.pt") if not is_listed else ():
        root = torch.load(model, weights_only=False)
        dropped = ("ds_autoep_layers", "universal_checkpoint_info")
        torch.save({key: value for key, value in root.items() if key not in dropped}, model)
    (path,) = universal.glob(f"*/zero/{EXPERTS}.w1/exp_avg.pt")
    saved = torch.load(path)
    torch.save({**saved, "param": saved["param"][:2].clone()}, path)
    with pytest.raises(UnsupportedError, match="8147"):
        ucp.open(universal)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    source = shutil.copytree(ROOT / "z1-autoep2" / "checkpoint", tmp_path / "checkpoint")
    for path in source.glob("*/layer_1_expert_3_*"):
        path.unlink()
    with pytest.raises(MissingFileError, match=r"model\.layers\.1\.mlp\.experts\.w1"):
        ucp.open(source)


@pytest.mark.parametrize("change", [{"source": [0, [-8, 2, 1]]}, {"dest": [0, [8, -2, 1]]}, {"shape": [-2, 4, 2]}])
def test_a_piece_with_a_negative_number_is_refused(change: dict[str, object]) -> None:
    saved: Any = copy.deepcopy(write_affine_map(((0, 1), (2,)), (3, 4, 2)))
    saved["ranks"][0]["pieces"][0].update(change)
    with pytest.raises(MalformedError):
        read_affine_map(saved, "the map")


def test_a_step_of_another_shape_on_one_rank_is_no_step(tmp_path: Path) -> None:
    source = shutil.copytree(ROOT / "z1-autoep2" / "checkpoint", tmp_path / "checkpoint")
    (path,) = source.glob("*/zero_pp_rank_0_*_optim_states.pt")
    pytest.importorskip("deepspeed.runtime", reason="its classes are saved again; `make slice` installs it")
    saved = torch.load(path, weights_only=False)
    state = saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    state["step"] = state["step"][None]
    torch.save(saved, path)
    index = ucp.open(source).index
    assert "step" not in index.atoms["emb.weight"].states
    assert any("state step has the shape" in note for note in index.notes)


NATIVE = [
    ("z1-autoep2", 4, 4, 2),
    ("z2-autoep2-dp4-bf16", 2, 1, 3),
    ("z3-autoep2-dp4", 8, 4, 0),
    ("z0-autoep2", 4, 2, 3),
]
"""Source, and the dp, ep and ZeRO stage of the target."""


@pytest.mark.parametrize(("case", "dp", "ep", "zero"), NATIVE)
def test_native_files_are_read_the_same(case: str, dp: int, ep: int, zero: int, tmp_path: Path) -> None:
    wanted = Topology(dp=dp, ep=ep, zero=zero)
    ucp.convert(ROOT / case / "checkpoint", tmp_path / "out", to="deepspeed", topology=wanted)
    written = ucp.open(tmp_path / "out").index
    check_copies(written)
    assert written.topology == wanted
    check_equal(without_module_dtype(read_states(written)), without_module_dtype(states_of(case)))


DIFFERENT = {"ds_config", "shared_params", "frozen_param_shapes", "frozen_param_fragments"}
"""Keys that ucp always writes differently: it names copies of routers, and leaves out what is empty."""


@pytest.mark.parametrize("case", CASES)
def test_native_files_hold_what_deepspeed_s_own_hold(case: str, tmp_path: Path) -> None:
    ucp.convert(ROOT / case / "checkpoint", tmp_path / "out", to="deepspeed")
    (ours,), (theirs,) = (list(path.glob("global_step*")) for path in (tmp_path / "out", ROOT / case / "checkpoint"))
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    for path in theirs.iterdir():
        found, wanted = (load_stubbed(folder / path.name) for folder in (ours, theirs))
        for key in wanted.keys() - DIFFERENT - ({"param_shapes"} if case.startswith("z0") else set()):
            assert is_same_value(found[key], wanted[key]), (path.name, key)


def is_same_value(found: object, wanted: object) -> bool:
    match wanted:
        case torch.Tensor():
            return isinstance(found, torch.Tensor) and is_same(found, wanted)
        case dict():
            keys = wanted.keys()
            return isinstance(found, dict) and found.keys() == keys and all(
                is_same_value(found[key], wanted[key]) for key in keys
            )  # fmt: skip
        case list() | tuple():
            return isinstance(found, list | tuple) and len(found) == len(wanted) and all(
                map(is_same_value, found, wanted)
            )  # fmt: skip
    return bool(getattr(found, "__dict__", found) == getattr(wanted, "__dict__", wanted))


@pytest.mark.parametrize("topology", ["dp=3,ep=3,zero=1", "dp=2,tp=2,zero=1"])
def test_a_misfit_is_refused(topology: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError):
        ucp.convert(ROOT / "z1-autoep2" / "checkpoint", tmp_path / "out", to="deepspeed", topology=topology)
    assert not (tmp_path / "out").exists()


def test_experts_without_one_projection_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingStateError, match=r"layers\.1\.mlp\.experts\.w3"):
        ucp.convert(
            ROOT / "z1-autoep2" / "checkpoint",
            tmp_path / "out",
            to="deepspeed",
            exclude=["model.layers.1.mlp.experts.w3"],
        )


def test_groups_are_split_where_a_rank_has_too_many_elements() -> None:
    params = tuple(f"{layer}.mlp.experts.{part}" for layer in range(2) for part in ("w1", "w2", "w3"))
    shapes = dict.fromkeys(params, (4, 5000, 10000)) | {f"{layer}.mlp.router.gate.weight": (4, 8) for layer in range(2)}
    stacks = ExpertStacks.of_names(shapes)
    atoms = {name: SimpleNamespace(states={"weight": SimpleNamespace(numel=prod(shapes[name]))}) for name in params}
    index = SimpleNamespace(atoms=atoms, groups=(ParamGroup(params=("head", *params), hyper={"lr": 1.0}),))
    split = {}
    for ep in (1, 2, 4):
        split[ep] = _split_groups(index, stacks, ep)
        index.groups, stacks = split[ep], replace(stacks, ep=ep)
    assert [len(group.params) for group in split[1]] == [1, 1, 1, 1, 1, 1, 1]  # 200 million elements each
    assert [len(group.params) for group in split[2]] == [1, 1, 1, 1, 1, 1, 1]
    assert [len(group.params) for group in split[4]] == [1, 3, 3]
    assert all(group.hyper == {"lr": 1.0, "moe": True, "name": "ep_size_4"} for group in split[4][1:])


@pytest.mark.parametrize("case", PLACED)
def test_any_placement_gives_the_experts_of_the_run(case: str) -> None:
    index = ucp.open(ROOT / case / "checkpoint").index
    check_copies(index)
    check_equal(read_states(index), states_of(case.removesuffix("-placed")))


@pytest.mark.parametrize("case", PLACED)
@pytest.mark.parametrize("to", ["ucp", "deepspeed-universal", "torch", "dcp"])
def test_what_is_written_of_any_placement_is_read_the_same(case: str, to: str, tmp_path: Path) -> None:
    ucp.convert(ROOT / case / "checkpoint", tmp_path / "out", to=to)
    found = read_states(ucp.open(tmp_path / "out").index)
    for key, state in states_of(case.removesuffix("-placed")).items():
        assert torch.equal(found[key], state), key


@pytest.mark.parametrize("case", PLACED)
def test_a_replica_that_differs_is_found(case: str, tmp_path: Path) -> None:
    """Expert 1 of the first layer is on both ranks; one of its moments is changed on rank 1 only."""
    source = shutil.copytree(ROOT / case / "checkpoint", tmp_path / "checkpoint")
    index = ucp.open(source).index
    pieces = index.atoms[f"{EXPERTS}.w2"].states["exp_avg"].fragments
    copy = next(piece for piece in pieces if piece.replica and piece.box.offsets[0] == 1)
    assert any(other.box.offsets[0] <= 1 < other.box.stops[0] for other in pieces if not other.replica)
    with Path(copy.ref.path).open("r+b") as file:
        file.seek(copy.ref.offset + 3)
        file.write(b"\x7f")
    with pytest.raises(UcpError) as caught:
        ucp.convert(source, tmp_path / "out")
    assert f"{EXPERTS}.w2" in str(caught.value)


@pytest.mark.parametrize("case", [case for case in PLACED if not case.startswith("z1")])
def test_a_placement_is_written_as_deepspeed_records_it(case: str, tmp_path: Path) -> None:
    """The placement of the rewritten fixture, as a file, gives its files again: optimizer, records and shapes."""
    kept, plain = ROOT / case / "checkpoint", ROOT / case.removesuffix("-placed") / "checkpoint"
    ranks = ((3, 0, 1), (1, 2)) if case.startswith("z0") else ((3, 1), (0, 2, 1))
    placement = Placement.of_ranks({0: ranks}, nodes=2)
    write_placement(placement, tmp_path / "placement.json", "deepspeed")
    topology = replace(ucp.open(plain).index.topology, placement=placement)
    ucp.convert(plain, tmp_path / "out", to="deepspeed", placement=tmp_path / "placement.json")
    ucp.convert(plain, tmp_path / "same", to="deepspeed", topology=topology)
    (ours,), (same,), (theirs,) = (list(path.glob("global*")) for path in (tmp_path / "out", tmp_path / "same", kept))
    other = DIFFERENT | {"universal_checkpoint_info"} | ({"param_shapes"} if case.startswith("z0") else set())
    for path in theirs.iterdir():
        found, wanted = load_stubbed(ours / path.name), load_stubbed(path)
        assert (same / path.name).read_bytes() == (ours / path.name).read_bytes()
        for key in wanted.keys() - other:
            assert is_same_value(found[key], wanted[key]), (path.name, key)
    written = ucp.open(tmp_path / "out").index
    check_copies(written)
    assert written.atoms[f"{EXPERTS}.w1"].layout.axes[0].pattern.by_part == ranks


def test_a_placement_that_misfits_is_refused(tmp_path: Path) -> None:
    source = ROOT / "z1-autoep2" / "checkpoint"
    half = Placement.of_ranks({0: ((0, 1), (2, 3))}, nodes=2)
    none = Placement.of_ranks({0: ((0, 1), (2, 3)), 1: ((0, 1, 2, 3), ())}, nodes=2)
    few = Placement.of_ranks(dict.fromkeys((0, 1), ((0, 1), (2,))), nodes=2)
    four = Placement.of_ranks(dict.fromkeys((0, 1), ((0,), (1,), (2,), (3,))), nodes=4)
    for placement in (half, few, four, none):
        with pytest.raises(TopologyError):
            ucp.convert(source, tmp_path / "out", to="deepspeed", placement=placement)
    with pytest.raises(UsageError):
        ucp.convert(source, tmp_path / "out", placement=half)
    with pytest.raises(TopologyError):
        Topology(dp=2, ep=2, placement=four)
    two = Placement.of_ranks(dict.fromkeys((0, 1), ((0, 1), (2, 3))), nodes=2)
    with pytest.raises(UsageError):
        ucp.convert(
            source,
            tmp_path / "out",
            to="deepspeed",
            placement=two,
            topology=Topology(dp=2, ep=2, zero=1, placement=two),
        )
    one = Placement.of_ranks({0: ((0, 1),)}, nodes=1)
    with pytest.raises(TopologyError):
        ucp.convert(ROOT / "z1-dp2-sgd" / "checkpoint", tmp_path / "out", to="deepspeed", placement=one)


def test_files_of_two_placements_are_refused(tmp_path: Path) -> None:
    source = shutil.copytree(ROOT / "z3-autoep2-dp4-placed" / "checkpoint", tmp_path / "checkpoint")
    other = ROOT / "z3-autoep2-dp4" / "checkpoint"
    name = "global_step3/zero_pp_rank_3_mp_rank_00_model_states.pt"
    shutil.copy(other / name, source / name)
    with pytest.raises(MalformedError) as caught:
        ucp.open(source)
    assert "ds_autoep_layers" in str(caught.value)


RULES = [
    ("mlp.router.gate.weight", "mlp.deepspeed_moe.gate.wg.weight"),
    *((f"mlp.experts.{w}", f"mlp.deepspeed_moe.experts.deepspeed_experts.{{expert}}.{w}.weight") for w in PARTS),
]
"""Names of AutoEP, and those of deepspeed.moe for experts with three linear layers."""


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stacks_become_native_experts_and_back(zero: int, tmp_path: Path) -> None:
    for name, step in (("there", 1), ("back", -1)):
        rules = (pair[::step] for pair in RULES)
        (tmp_path / f"{name}.toml").write_text(
            "".join(
                f'[[rename]]\nfrom = "model.layers.{{layer}}.{old}"\nto = "model.layers.{{layer}}.{new}"\n'
                for old, new in rules
            )
        )
    source = ROOT / "z1-autoep2" / "checkpoint"
    native, back = tmp_path / "native", tmp_path / "autoep"
    ucp.convert(source, native, to="deepspeed", topology=f"dp=4,ep=4,zero={zero}", rename=tmp_path / "there.toml")
    index = ucp.open(native).index
    assert index.topology == Topology(dp=4, ep=4, zero=zero)
    experts = "model.layers.1.mlp.deepspeed_moe.experts.deepspeed_experts"
    stack = states_of("z1-autoep2")["model.layers.1.mlp.experts.w2/exp_avg"]
    found = read_states(index)
    assert all(torch.equal(found[f"{experts}.{e}.w2.weight/exp_avg"], stack[e]) for e in range(4))
    ucp.convert(native, back, to="deepspeed", topology="dp=2,ep=2,zero=1", rename=tmp_path / "back.toml")
    assert ucp.diff(source, back).equal
    assert ucp.open(back).index.aliases == ucp.open(source).index.aliases


def test_frozen_experts_need_a_stage_that_restores_them(tmp_path: Path) -> None:
    ucp.convert(ROOT / "z1-autoep2" / "checkpoint", tmp_path / "plain", to="torch")
    saved = torch.load(tmp_path / "plain" / "checkpoint.pt")
    for number in saved["optimizer"]["param_groups"].pop()["params"]:  # of the experts
        del saved["optimizer"]["state"][number]
    torch.save(saved, tmp_path / "frozen.pt")
    assert ucp.open(tmp_path / "frozen.pt").index.atoms[f"{EXPERTS}.w1"].kind is Kind.FROZEN
    ucp.convert(tmp_path / "frozen.pt", tmp_path / "z1", to="deepspeed", topology="dp=2,ep=2,zero=1")
    for zero in (2, 3):
        with pytest.raises(UnsupportedError):
            ucp.convert(tmp_path / "frozen.pt", tmp_path / "out", to="deepspeed", topology=f"dp=2,ep=2,zero={zero}")


def test_experts_of_both_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one-layer.toml").write_text(
        "".join(f'[[rename]]\nfrom = "model.layers.1.{old}"\nto = "model.layers.1.{new}"\n' for old, new in RULES)
    )
    ucp.convert(ROOT / "z1-autoep2" / "checkpoint", tmp_path / "plain", to="torch")  # without the list of layers
    with pytest.raises(UnsupportedError):
        ucp.convert(
            tmp_path / "plain",
            tmp_path / "out",
            to="deepspeed",
            topology="dp=2,ep=2,zero=1",
            rename=tmp_path / "one-layer.toml",
        )


def test_a_model_of_hugging_face_becomes_a_run_and_back(tmp_path: Path) -> None:
    model, run, back = ROOT.parent / "huggingface" / "mixtral" / "model", tmp_path / "run", tmp_path / "back"
    settings = {"lr": "0.01"}
    topology = "dp=2,ep=2,zero=2"
    ucp.convert(model, run, to="deepspeed", names="autoep", topology=topology, optimizer="zero", settings=settings)
    index = ucp.open(run).index
    assert [group.hyper.get("moe", False) for group in index.groups] == [False, True]
    assert index.aliases["model.layers.0.mlp.gate.gate.weight"] == "model.layers.0.mlp.router.gate.weight"
    source = ucp.open(model)
    first = [source.read(f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight", "weight") for e in range(2)]
    assert torch.equal(ucp.open(run).read("model.layers.0.mlp.experts.w1", "weight"), torch.stack(first))
    ucp.convert(run, back, to="huggingface", settings={"config": str(model)})
    assert ucp.diff(model, back, weights=True).equal
