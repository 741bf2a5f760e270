"""Files of plain torch.save: of every rank (verl), of a whole run (scripts, nanoGPT, Lightning), read as atoms.

Every state is compared with the truth that was gathered from the live ranks (fixtures/make/torch).
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ucp
from tests.golden.damage import Errors, Gadget, check_refused, copy_to, flip, swap
from tests.golden.torch.truth import REPORTS, ROOT, check_states, index_of, truth_of
from ucp.core.index import Kind
from ucp.errors import (
    CorruptError,
    IdleOptionError,
    MalformedError,
    MissingFileError,
    MissingStateError,
    ReplicaError,
    UnsupportedError,
    UsageError,
)

WAYS = ("verl", "full", "nanogpt", "lightning")
CASES = sorted(name for name, own in REPORTS.items() if own["case"]["saved"] in WAYS)
RANKS = [name for name in CASES if name.startswith("verl")]


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_the_truth_bit_for_bit(case: str) -> None:
    check_states(index_of(case), truth_of(case))


@pytest.mark.parametrize("case", CASES)
def test_groups_and_settings_are_those_of_the_optimizer(case: str) -> None:
    groups, wanted = index_of(case).groups, REPORTS[case]["groups"]
    assert [set(group.params) for group in groups] == [set(own["params"]) for own in wanted]
    for group, own in zip(groups, wanted, strict=True):
        hyper = {key: list(value) if isinstance(value, tuple) else value for key, value in group.hyper.items()}
        assert hyper == {key: value for key, value in own.items() if key != "params"}


@pytest.mark.parametrize("case", RANKS)
def test_placements_become_layouts(case: str) -> None:
    own, index = REPORTS[case]["case"], index_of(case)
    assert (index.topology.dp, index.topology.tp) == (own["shard"], own["tp"])
    kinds = {atom.name: [axis.pattern.name for axis in atom.layout.axes] for atom in index.atoms.values()}
    if own["tp"] > 1:  # tensor parallelism cuts first, FSDP each of its parts
        assert kinds["block.q.weight"] == ["chunk(dim=0)", "chunk(dim=0)"]
        assert [axis.axis for axis in index.atoms["block.q.weight"].layout.axes] == ["tp", "dp_shard"]
        assert kinds["block.o.weight"] == ["chunk(dim=0)", "chunk(dim=1)"]
        assert index.atoms["emb.weight"].layout.axes[0].axis == "tp"
    elif own["wrap"] == "fsdp1":  # which keeps parameters flat
        flat = {atom.layout.flat[0].pattern.name for atom in index.atoms.values()}
        assert flat == {"partition(share=44)", "partition(share=218)"}
        assert not any(kinds.values())
    else:
        assert {tuple(kind) for name, kind in kinds.items() if name not in ("drift", "num_steps")} == {
            ("chunk(dim=0)",)
        }


def test_states_that_are_stored_otherwise_than_their_parameter_lies_say_so() -> None:
    """FSDP1 keeps parameters flat; verl saves the weights by rows, and accelerate the moments."""
    for case, by_rows in (("verl-fsdp1-dp4", {"weight"}), ("fsdp1-local-dp4", {"exp_avg", "exp_avg_sq"})):
        atom = index_of(case).atoms["emb.weight"]
        layouts = {name: own.layout and own.layout.patterns for name, own in atom.states.items() if name != "step"}
        assert atom.patterns == {"dp_shard": "flat partition(share=44)"}
        assert layouts == {name: {"dp_shard": "chunk(dim=0)"} if name in by_rows else None for name in layouts}


def test_plain_tensors_of_ranks_are_copies_and_buffers() -> None:
    index = index_of("verl-fsdp2-dp4")
    for name in ("drift", "num_steps"):
        atom = index.atoms[name]
        assert atom.kind is Kind.BUFFER
        assert [own.replica for own in atom.states["weight"].fragments] == [0, 1, 2, 3]
        assert {own.box.sizes for own in atom.states["weight"].fragments} == {atom.global_shape}
    assert index.atoms["frozen.weight"].kind is Kind.FROZEN
    assert index.aliases == {"head.weight": "emb.weight"}


@pytest.mark.parametrize("case", RANKS)
def test_what_ranks_have_of_their_own_stays_theirs(case: str) -> None:
    extras = {(own.name, own.rank): own.value for own in index_of(case).extras}
    scheduler = extras["lr_scheduler", None]
    assert isinstance(scheduler, dict)
    assert scheduler["last_epoch"] == 3
    assert ("rng", None) in extras


@pytest.mark.parametrize("case", [case for case in CASES if case not in RANKS])
def test_the_rest_of_a_file_is_kept_as_it_was(case: str) -> None:
    index = index_of(case)
    path = next((ROOT / case / "checkpoint").iterdir())
    saved = torch.load(path, weights_only=False)
    known = {"model", "optimizer", "state_dict", "optimizer_states"}
    assert {own.name for own in index.extras} == saved.keys() - known
    assert index.step == 3


def test_a_file_may_be_passed_itself() -> None:
    folder = ROOT / "ddp-dp2-nanogpt" / "checkpoint"
    assert ucp.inspect(folder / "ckpt.pt").atoms.keys() == ucp.inspect(folder).atoms.keys()


MODEL, OPTIM = "model_world_size_4_rank_{}.pt", "optim_world_size_4_rank_{}.pt"


def flip_moment(copy: Path) -> None:
    atoms = ucp.inspect(copy).atoms.values()
    flip(next(atom for atom in atoms if "exp_avg" in atom.states).states["exp_avg"].fragments[1].ref)


def edit_groups(copy: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    optimizer = torch.load(copy / OPTIM.format(1), weights_only=False)
    for group in optimizer["param_groups"]:
        edit(group)
    torch.save(optimizer, copy / OPTIM.format(1))


def store_no_parts(copy: Path) -> None:
    torch.save({name: torch.zeros(2) for name in ucp.inspect(copy).atoms}, copy / MODEL.format(3))


GROUP: dict[str, Any] = {"state": {}, "param_groups": [{"lr": 0.5, "params": [0]}]}
DAMAGE: dict[str, tuple[Callable[[Path], object], Errors, str]] = {
    "a missing model file": (
        lambda copy: (copy / MODEL.format(2)).unlink(),
        MissingFileError,
        MODEL.format(2),
    ),
    "a missing optimizer file": (lambda copy: (copy / OPTIM.format(2)).unlink(), MissingFileError, OPTIM.format(2)),
    "a flipped byte": (flip_moment, (CorruptError, ReplicaError), "CRC-32|copies"),
    "exchanged ranks": (
        lambda copy: swap(copy / MODEL.format(0), copy / MODEL.format(1)),
        MalformedError,
        "exchanged|saved as",
    ),
    "another run": (lambda copy: torch.save(GROUP, copy / OPTIM.format(3)), MalformedError, "different runs"),
    "a setting of one rank": (
        lambda copy: edit_groups(copy, lambda group: group.setdefault("extra_key", 7)),
        MalformedError,
        "ranks 0 and 1 has extra_key",
    ),
    "a setting lost on one rank": (
        lambda copy: edit_groups(copy, lambda group: group.pop("lr")),
        MalformedError,
        "ranks 0 and 1 has lr",
    ),
    "runs of other sizes": (
        lambda copy: shutil.copy(copy / MODEL.format(0), copy / "model_world_size_8_rank_5.pt"),
        UsageError,
        "4 and 8 ranks",
    ),
    "a tensor that is no part": (store_no_parts, MalformedError, "all ranks|plain tensor"),
}


@pytest.mark.parametrize("case", RANKS)
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name: str, case: str, tmp_path: Path) -> None:
    copy = copy_to(tmp_path, ROOT / case / "checkpoint")
    damage, error, said = DAMAGE[name]
    damage(copy)
    check_refused(copy, error, said)


def test_the_file_of_one_rank_is_no_checkpoint() -> None:
    with pytest.raises(UsageError, match=f"{MODEL.format(0)} .*folder"):
        ucp.inspect(ROOT / RANKS[0] / "checkpoint" / MODEL.format(0))


def test_an_object_beside_tensors_is_not_made(tmp_path: Path) -> None:
    copy = copy_to(tmp_path, ROOT / RANKS[0] / "checkpoint")
    torch.save({"lr_scheduler": Gadget()}, copy / "extra_state_world_size_4_rank_0.pt")
    assert any("print" in note for note in ucp.inspect(copy).notes)


def test_a_whole_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"config": 3}, tmp_path / "a.pt")
    with pytest.raises(MalformedError, match=r"tensors in a\.pt"):
        ucp.inspect(tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"w": 3}))
    with pytest.raises(MalformedError, match="magic number"):
        ucp.inspect(tmp_path / "a.pt")


def test_a_file_of_torch_before_1_6(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    torch.save({"model": model.state_dict()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(ucp.open(tmp_path / "old.pt").read("weight", "weight"), model.weight)


def test_numbers_that_shapes_do_not_tell_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 0.5}])
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
    with pytest.raises(MissingStateError, match="number 0 "):
        ucp.convert(tmp_path / "ckpt.pt", tmp_path / "out", to="dcp")


def test_flat_parameters_that_lengths_do_not_tell_leave_the_weights(tmp_path: Path) -> None:
    copy = shutil.copytree(ROOT / "verl-fsdp1-dp4" / "checkpoint", tmp_path / "checkpoint")
    for path in copy.rglob("optim_world_size_*.pt"):
        saved = torch.load(path, weights_only=False)
        (group,) = saved["param_groups"]
        first, *rest = group["params"]
        saved["param_groups"] = [{**group, "params": [first]}, {**group, "params": rest}]
        torch.save(saved, path)
    index = ucp.inspect(copy)
    assert index.unnamed is not None
    assert index.unnamed.states == ("exp_avg", "exp_avg_sq", "step")
    assert "FSDP.optim_state_dict" in index.unnamed.reason
    ucp.convert(copy, tmp_path / "weights", include=["*/weight"], verify=True)
    weights = {name: own for name, own in truth_of("verl-fsdp1-dp4").items() if name.endswith("/weight")}
    check_states(ucp.inspect(tmp_path / "weights"), weights)


def test_names_that_the_optimizer_keeps_are_taken(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    groups = [{"params": list(model[at].named_parameters(prefix=str(at)))} for at in (1, 0)]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
    checkpoint = ucp.open(tmp_path / "ckpt.pt")
    assert [group.params for group in checkpoint.index.groups] == [("1.weight", "1.bias"), ("0.weight", "0.bias")]
    assert torch.equal(checkpoint.read("1.weight", "exp_avg"), optimizer.state[model[1].weight]["exp_avg"])


@pytest.mark.parametrize("case", sorted(path.name for path in ROOT.glob("ranks-torch-*")))
def test_meshes_of_older_versions_of_torch(case: str) -> None:
    check_states(index_of(case), truth_of(case))
    assert (index_of(case).topology.dp, index_of(case).topology.tp) == (2, 2)


class TestFlatModels:
    """FSDP1's LOCAL_STATE_DICT, which says neither names nor shapes."""

    SOURCE = ROOT / "fsdp1-local-dp4" / "checkpoint"

    @pytest.fixture
    def alone(self, tmp_path: Path) -> Path:
        shutil.copytree(self.SOURCE, tmp_path / "alone", ignore=shutil.ignore_patterns("optimizer*"))
        return tmp_path / "alone"

    @pytest.fixture
    def shapes(self, tmp_path: Path) -> Path:
        atoms = ucp.inspect(ROOT / "verl-fsdp1-dp4" / "checkpoint").atoms.values()
        (tmp_path / "shapes.json").write_text(json.dumps({atom.name: atom.global_shape for atom in atoms}))
        return tmp_path / "shapes.json"

    def check(self, checkpoint: ucp.Checkpoint, states: set[str]) -> None:
        truth = {name: own for name, own in truth_of("fsdp1-local-dp4").items() if name.rpartition("/")[2] in states}
        check_states(checkpoint.index, truth)

    def test_shapes_of_the_optimizer_are_enough(self) -> None:
        self.check(ucp.open(self.SOURCE), {"weight", "step", "exp_avg", "exp_avg_sq"})

    def test_shapes_of_a_document(self, alone: Path, shapes: Path) -> None:
        self.check(ucp.open(alone, shapes_from=shapes), {"weight"})

    def test_a_note_says_that_the_order_of_a_document_is_not_proved(self, alone: Path, shapes: Path) -> None:
        names = list(json.loads(shapes.read_text()))
        (note,) = [note for note in ucp.inspect(alone, shapes_from=shapes).notes if "_flat_param" in note]
        assert f"the order of {shapes} ({names[0]}, ..., {names[-1]})" in note
        assert "every value is wrong" in note
        assert not any("_flat_param" in note for note in ucp.inspect(self.SOURCE).notes)

    def test_shapes_of_another_checkpoint(self, alone: Path, tmp_path: Path) -> None:
        other = ROOT / "verl-fsdp2-dp2-tp2" / "checkpoint"
        self.check(ucp.open(alone, shapes_from=other), {"weight"})
        ucp.convert(alone, tmp_path / "out", to="torch", shapes_from=other, verify=True)
        assert ucp.diff(alone, tmp_path / "out", shapes_from=other).equal

    def test_none_are_refused(self, alone: Path) -> None:
        with pytest.raises(UnsupportedError, match=r"\n +block\._flat_param\nPass --shapes-from"):
            ucp.inspect(alone)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"block.q.weight": [8, 9]}, "block._flat_param .* 872 .* 880"),
            ({"emb.weight": [3]}, "_flat_param has 176 elements"),
            ({"emb.weight": "8x8"}, r"shapes\.json: .*\n +emb\.weight"),
        ],
    )
    def test_shapes_of_another_model_are_refused(self, alone: Path, shapes: Path, change: Any, match: str) -> None:
        shapes.write_text(json.dumps(json.loads(shapes.read_text()) | change))
        with pytest.raises(MalformedError, match=match):
            ucp.inspect(alone, shapes_from=shapes)

    def test_sorted_names_are_refused(self, alone: Path, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(UnsupportedError, match=r"model.safetensors holds"):
            ucp.inspect(alone, shapes_from=tmp_path / "model.safetensors")

    @pytest.mark.parametrize("case", ["fsdp2-dp4", "verl-fsdp2-dp4"])
    def test_shapes_that_nobody_needs_are_refused(self, case: str, shapes: Path) -> None:
        with pytest.raises(IdleOptionError, match="drop --shapes-from"):
            ucp.inspect(ROOT / case / "checkpoint", shapes_from=shapes)


class TestNamedPartsOfFlatModels:
    """LOCAL_STATE_DICT with use_orig_params, computed in bfloat16: odd sizes, a tied and a frozen parameter."""

    CASE = "fsdp1-local-orig-dp2"
    SOURCE = ROOT / CASE / "checkpoint"

    @pytest.fixture
    def shapes(self, tmp_path: Path) -> Path:
        atoms = ucp.inspect(ROOT / "fsdp2-dp4" / "checkpoint").atoms.values()
        (tmp_path / "shapes.json").write_text(
            json.dumps({atom.name: atom.global_shape for atom in atoms if atom.kind is not Kind.BUFFER})
        )
        return tmp_path / "shapes.json"

    def test_every_state_is_the_truth(self, shapes: Path) -> None:
        index = ucp.inspect(self.SOURCE, shapes_from=shapes)
        assert index.aliases == {"head.weight": "emb.weight"}
        assert (index.atoms["frozen.weight"].kind, index.atoms["drift"].kind) == (Kind.FROZEN, Kind.BUFFER)
        check_states(index, truth_of(self.CASE))

    @pytest.mark.parametrize("param", ["frozen.weight", "l1.weight", "l3.bias"])
    def test_a_parameter_without_a_shape_is_refused(self, shapes: Path, param: str) -> None:
        known = json.loads(shapes.read_text())
        shapes.write_text(json.dumps({name: shape for name, shape in known.items() if name != param}))
        with pytest.raises(UnsupportedError, match=rf"\n  {param}\nPass --shapes-from"):
            ucp.inspect(self.SOURCE, shapes_from=shapes)

    def test_frozen_parameters_need_shapes(self) -> None:
        with pytest.raises(UnsupportedError, match=r"frozen\.weight\nPass --shapes-from"):
            ucp.inspect(self.SOURCE)


@pytest.mark.parametrize("name", ["optimizer.pt", "optim_world_size_1_rank_0.pt", "last.pt"])
def test_an_optimizer_alone_is_no_model(name: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / name)
    with pytest.raises(MalformedError, match=f"tensors in {name}"):
        ucp.open(tmp_path / name if name == "optimizer.pt" else tmp_path)


STATISTICS = {"statistics": {"mean": torch.ones(2), "std": torch.ones(2)}}


@pytest.mark.parametrize(
    ("key", "beside"),
    [("", {}), ("model", {}), ("net_g", {"epoch": 3}), ("model", {"epoch": 3}), ("model", STATISTICS)],
)
def test_a_pickled_module_is_no_state_dict(key: str, beside: dict[str, Any], tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    torch.save({key: module, **beside} if key else module, tmp_path / "last.pt")
    with pytest.raises(UnsupportedError, match=r"nn\.Module: .*torch.nn.modules.container.Sequential.*state_dict\(\)"):
        ucp.open(tmp_path)


def test_modules_beside_the_state_dict_of_the_model_are_extras(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 4)
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": {"model": module}}, tmp_path / "last.ckpt")
    assert set(ucp.open(tmp_path).index.atoms) == {"weight", "bias"}


def test_states_of_a_pickled_optimizer_are_left_behind(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"model": model.state_dict(), "run": {"optimizer": optimizer}}, tmp_path / "last.pt")
    (line,) = ucp.open(tmp_path).index.dropped
    assert "run/optimizer is an object of torch.optim.adamw.AdamW" in line


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_a_step_below_zero_is_none(way: str, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "step": -1}
    source = tmp_path / "run"
    source.mkdir()
    if way == "dcp":
        dcp.save(state, checkpoint_id=source, no_dist=True)
    else:
        torch.save(state, source / "run.pt")
    ucp.convert(source, tmp_path / "atoms", to="ucp")
    assert ucp.open(tmp_path / "atoms").step is None
