"""Checkpoints that torch.distributed.checkpoint wrote under FSDP, tensor parallelism, pipelines and DDP, read as atoms.

Every state is compared with the truth that was gathered from the live ranks (fixtures/make/torch).
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ucp
from tests.golden.damage import Gadget, check_refused, copy_to, cut, flip
from tests.golden.torch.truth import REPORTS, ROOT, check_states, index_of, truth_of
from ucp.core.index import Kind
from ucp.errors import CorruptError, MalformedError, MissingFileError, UcpError, UnsupportedError

CASES = sorted(name for name, own in REPORTS.items() if own["case"]["saved"] == "dcp")
TIED = [name for name in CASES if REPORTS[name]["case"]["model"] == "tiny"]


def test_all_ways_of_saving_are_there() -> None:
    assert {own["case"]["wrap"] for own in REPORTS.values()} == {"ddp", "fsdp1", "fsdp2"}
    assert {own["case"]["style"] for own in REPORTS.values()} == {"nested", "flattened", "torchtitan", "raw"}


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_the_truth_bit_for_bit(case: str) -> None:
    check_states(index_of(case), truth_of(case))


@pytest.mark.parametrize("case", CASES)
def test_degrees_and_layouts_are_found_in_the_boxes(case: str) -> None:
    own, index = REPORTS[case]["case"], index_of(case)
    assert (index.topology.dp, index.topology.tp, index.topology.pp) == (own["dp"] * own["shard"], own["tp"], own["pp"])
    for atom in index.atoms.values():
        degrees = {axis.axis: axis.parts for axis in atom.layout.axes}
        wanted = {"pp": own["pp"], "dp_replicate": own["dp"], "tp": own["tp"], "dp_shard": own["shard"]}
        assert degrees == {axis: parts for axis, parts in wanted.items() if parts > 1}
    assert not [note for note in index.notes if "no pattern" in note]


@pytest.mark.parametrize("case", CASES)
def test_groups_and_settings_are_those_of_the_optimizer(case: str) -> None:
    groups = index_of(case).groups
    wanted = REPORTS[case]["groups"]
    params = [set(group.params) for group in groups]
    assert sorted(map(sorted, params)) == sorted(
        sorted(set().union(*(set(own["params"]) for own in wanted if own["weight_decay"] == decay)))
        for decay in {own["weight_decay"] for own in wanted}
    )
    for group in groups:
        own = next(own for own in wanted if own["weight_decay"] == group.hyper["weight_decay"])
        assert {key: list(v) if isinstance(v, tuple) else v for key, v in group.hyper.items()} == {
            key: value for key, value in own.items() if key != "params"
        }


@pytest.mark.parametrize("case", CASES)
def test_what_is_neither_model_nor_optimizer_is_an_extra(case: str) -> None:
    index = index_of(case)
    extras = {extra.name: extra.value for extra in index.extras}
    assert index.step == 3
    scheduler = extras["lr_scheduler"]
    assert isinstance(scheduler, dict)
    assert (scheduler["last_epoch"], scheduler["gamma"]) == (3, 0.5)
    assert extras["note"] == {"list": [1, 2]}
    if REPORTS[case]["case"]["style"] == "torchtitan":
        assert extras["dataloader"] == {**{f"dp_rank_{rank}": b"place of the reader" for rank in range(4)}, "seen": 3}


@pytest.mark.parametrize("case", TIED)
def test_ties_buffers_and_frozen_parameters(case: str) -> None:
    index = index_of(case)
    assert index.aliases == {"head.weight": "emb.weight"}
    assert index.atoms["frozen.weight"].kind is Kind.FROZEN
    assert index.atoms["drift"].kind is (Kind.FROZEN if case.startswith("ddp") else Kind.BUFFER)
    assert index.atoms["num_steps"].kind is Kind.BUFFER


DAMAGE: dict[str, tuple[Callable[[Path], object], type[UcpError], str]] = {
    "a missing file": (lambda copy: (copy / "__2_0.distcp").unlink(), MissingFileError, r"__2_0\.distcp"),
    "a truncated file": (lambda copy: cut(copy / "__1_0.distcp", 700), MalformedError, r"__1_0\.distcp"),
    "a flipped byte": (
        lambda copy: flip(ucp.inspect(copy).atoms["l1.weight"].states["exp_avg"].fragments[1].ref),
        CorruptError,
        "CRC-32",
    ),
    "an unfinished save": (lambda copy: (copy / ".metadata").unlink(), MissingFileError, "not finished"),
    "a gadget": (lambda copy: (copy / ".metadata").write_bytes(pickle.dumps(Gadget())), MalformedError, r"\.metadata"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name: str, tmp_path: Path) -> None:
    copy = copy_to(tmp_path, ROOT / "fsdp2-dp4" / "checkpoint")
    damage, error, said = DAMAGE[name]
    damage(copy)
    check_refused(copy, error, said)


def test_files_of_an_earlier_save_are_left_alone(tmp_path: Path) -> None:
    copy = copy_to(tmp_path, ROOT / "fsdp2-dp4" / "checkpoint")
    shutil.copy(copy / "__3_0.distcp", copy / "__7_0.distcp")
    assert any("__7_0.distcp" in note for note in ucp.inspect(copy).notes)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flat_parameters_are_refused(tmp_path: Path) -> None:
    """LOCAL_STATE_DICT of FSDP1: beside the flat parameter DCP keeps one rank's part of each parameter."""
    state = {"_flat_param": torch.ones(8), "w": torch.ones(3)}
    dcp.save({"model": state}, checkpoint_id=str(tmp_path / "saved"))
    with pytest.raises(UnsupportedError, match="LOCAL_STATE_DICT"):
        ucp.inspect(tmp_path / "saved")


@pytest.mark.parametrize("case", CASES)
def test_a_conversion_to_deepspeed_is_equal(case: str, tmp_path: Path) -> None:
    if REPORTS[case]["case"]["dtype"] == "bfloat16":
        pytest.skip("moments of bfloat16 have no place in DeepSpeed's ZeRO")
    for zero in (1, 3):
        ucp.convert(ROOT / case / "checkpoint", tmp_path / f"z{zero}", to="deepspeed", topology=f"dp=2,zero={zero}")
        assert ucp.diff(ROOT / case / "checkpoint", tmp_path / f"z{zero}").equal
