"""A word embedding whose columns data-parallel ranks share out (MoESys), as a rule for dp says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ucp
from tests.golden.truth import FIXTURES, check_copies, is_same, read_states
from ucp.errors import IdleOptionError, MalformedError, TopologyError, UcpError, UnsupportedError

ROOT = FIXTURES / "columns"
RULES = ROOT / "rules.toml"
CASES = sorted(path.name for path in ROOT.iterdir() if path.is_dir())
STATES = ("weight", "exp_avg", "exp_avg_sq")


def read(path: Path) -> dict[str, torch.Tensor]:
    return read_states(ucp.open(path, patterns=RULES).index)


def write_rules(path: Path, name: str, pattern: str = '{ pattern = "shard", dim = 1 }') -> Path:
    path.write_text(f'name = "of-a-test"\n[[rule]]\nname = "{name}"\ndp = {pattern}\n')
    return path


@pytest.mark.parametrize("case", CASES)
def test_ranks_columns_are_one_tensor_with_its_moments(case: str) -> None:
    index = ucp.open(ROOT / case / "checkpoint", patterns=RULES).index
    check_copies(index)
    ranks = [load_file(path) for path in sorted((ROOT / case).glob("truth*.safetensors"))]
    assert len(ranks) == index.topology.dp
    states = read_states(index)
    for state in STATES:
        assert is_same(states[f"emb.weight/{state}"], torch.cat([rank[state] for rank in ranks], dim=1)), state
    atom = index.atoms["emb.weight"]
    assert atom.layout.patterns == {"dp": "shard(dim=1)"}
    assert "shard(dim=1)" not in index.atoms["head.weight"].layout.patterns.values()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["torch", "deepspeed"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_written_for_other_ranks_is_read_the_same(case: str, to: str, ranks: int, tmp_path: Path) -> None:
    ep = f",ep={ranks},zero=2" if "deepspeed" in case else ",zero=2"
    topology = f"dp={ranks}{ep if to == 'deepspeed' else ''}"
    ucp.convert(ROOT / case / "checkpoint", tmp_path / "out", to=to, topology=topology, patterns=RULES)
    written = ucp.open(tmp_path / "out", patterns=RULES if ranks > 1 else None).index
    assert written.atoms["emb.weight"].layout.patterns == ({"dp": "shard(dim=1)"} if ranks > 1 else {})
    check_copies(written)
    found = read_states(written)
    for key, state in read(ROOT / case / "checkpoint").items():
        assert torch.equal(found[key].to(state.dtype), state), key


def test_files_of_torch_hold_each_ranks_part(tmp_path: Path) -> None:
    case = ROOT / "torch-dp2"
    ucp.convert(case / "checkpoint", tmp_path / "out", to="torch", topology="dp=4", patterns=RULES)
    whole = torch.cat([load_file(path)["exp_avg"] for path in sorted(case.glob("truth*.safetensors"))], dim=1)
    for rank in range(4):
        saved = torch.load(tmp_path / "out" / f"checkpoint_rank_{rank}.pt", weights_only=True)
        (number,) = saved["optimizer"]["param_groups"][1]["params"]
        assert torch.equal(saved["optimizer"]["state"][number]["exp_avg"], whole[:, 2 * rank : 2 * rank + 2])
        assert saved["model"]["head.weight"].shape == (20, 8)


def test_the_first_module_has_the_first_columns(tmp_path: Path) -> None:
    source = ROOT / "deepspeed-z1-dp2" / "checkpoint"
    ucp.convert(source, tmp_path / "out", to="deepspeed", topology="dp=4,ep=4,zero=1", patterns=RULES)
    (path,) = (tmp_path / "out").glob("*/mp_rank_00_model_states.pt")
    module = torch.load(path, weights_only=False)["module"]
    assert torch.equal(module["emb.weight"], read(source)["emb.weight/weight"][:, :2])


@pytest.mark.parametrize("case", CASES)
def test_without_the_rule_nothing_is_read_as_one_tensor(case: str, tmp_path: Path) -> None:
    with pytest.raises(UcpError):
        ucp.convert(ROOT / case / "checkpoint", tmp_path / "out", to="torch")
    assert not (tmp_path / "out").exists()


def test_a_rule_for_what_all_ranks_hold_is_refused(tmp_path: Path) -> None:
    rules = write_rules(tmp_path / "rules.toml", "head.weight")
    with pytest.raises(UnsupportedError):
        ucp.open(ROOT / "deepspeed-z1-dp2" / "checkpoint", patterns=rules)


def test_a_rule_for_a_group_that_zero_partitions_is_refused(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('name = "all"\n' + "".join(
        f'[[rule]]\nname = "{name}"\ndp = {{ pattern = "shard", dim = 0 }}\n'
        for name in ("proj.weight", "proj.bias", "head.weight", "head.bias", "moe.deepspeed_moe.gate.wg.weight")
    ))  # fmt: skip
    with pytest.raises(UnsupportedError):
        ucp.open(ROOT / "deepspeed-z1-dp2" / "checkpoint", patterns=rules)


@pytest.mark.parametrize("case", ["z0-ep2-dp4", "z3-autoep2-dp4"])
def test_a_run_of_deepspeed_without_zero_1_or_2_has_no_parts(case: str, tmp_path: Path) -> None:
    rules = write_rules(tmp_path / "rules.toml", "emb.weight")
    with pytest.raises(UnsupportedError):
        ucp.open(FIXTURES / "deepspeed" / case / "checkpoint", patterns=rules)


def test_tied_parameters_have_no_parts_in_files_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "tied").mkdir()
    for rank in range(2):
        weight = torch.full((4, 2), float(rank))
        state = {0: {"step": torch.tensor(1.0), "exp_avg": weight + 1, "exp_avg_sq": weight + 2}}
        groups = [{"lr": 0.1, "params": [0], "param_names": ["emb.weight"]}]
        saved = {
            "model": {"emb.weight": weight, "head.weight": weight},
            "optimizer": {"state": state, "param_groups": groups},
        }
        torch.save(saved, tmp_path / "tied" / f"checkpoint_rank_{rank}.pt")
    with pytest.raises(UnsupportedError):
        ucp.convert(tmp_path / "tied", tmp_path / "out", to="deepspeed", topology="dp=2,zero=1", patterns=RULES)


def test_files_of_one_rank_have_no_parts(tmp_path: Path) -> None:
    ucp.convert(ROOT / "torch-dp2" / "checkpoint", tmp_path / "whole", to="torch", patterns=RULES)
    with pytest.raises(IdleOptionError):
        ucp.open(tmp_path / "whole", patterns=RULES)


def test_uneven_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TopologyError):
        ucp.convert(ROOT / "torch-dp2" / "checkpoint", tmp_path / "out", to="torch", topology="dp=3", patterns=RULES)


@pytest.mark.parametrize("topology", ["dp=2,zero=0", "dp=2,zero=3"])
def test_deepspeed_has_no_such_files_without_zero_1_or_2(topology: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError):
        ucp.convert(
            ROOT / "torch-dp2" / "checkpoint", tmp_path / "out", to="deepspeed", topology=topology, patterns=RULES
        )


def test_a_rule_may_also_be_for_other_axes(tmp_path: Path) -> None:
    rules = write_rules(tmp_path / "rules.toml", "emb.weight", '{ pattern = "shard", dim = 1 }\ntp = "replicate"')
    index = ucp.open(ROOT / "torch-dp2" / "checkpoint", patterns=rules).index
    assert index.atoms["emb.weight"].layout.patterns == {"dp": "shard(dim=1)"}


def test_a_missing_file_of_a_rank_is_named(tmp_path: Path) -> None:
    source = shutil.copytree(ROOT / "torch-dp2" / "checkpoint", tmp_path / "checkpoint")
    (source / "checkpoint_rank_0.pt").unlink()
    with pytest.raises(UcpError, match="checkpoint_rank_0"):
        ucp.open(source, patterns=RULES)


def test_a_pattern_without_such_parts_is_refused(tmp_path: Path) -> None:
    rules = write_rules(tmp_path / "rules.toml", "emb.weight", '{ pattern = "shard", dim = 1, blocks = [3, 4] }')
    with pytest.raises(MalformedError):
        ucp.open(ROOT / "torch-dp2" / "checkpoint", patterns=rules)
