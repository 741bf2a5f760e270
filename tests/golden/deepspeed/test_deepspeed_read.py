"""Every kept DeepSpeed checkpoint, read and compared bit for bit with what was gathered inside the training run."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file
from ucp_formats.deepspeed.partition import undo_round_robin
from ucp_formats.deepspeed.read.source import DeepSpeedFormat
from ucp_formats.deepspeed.read.universal.source import DeepSpeedUniversalFormat

from tests.golden.truth import FIXTURES, check_copies, check_equal, plain, read_states
from ucp.core.index import Index, Kind
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.torch_file.archive import read_archive
from ucp.live.checkpoint import Checkpoint

ROOT = FIXTURES / "deepspeed"
ELASTIC = "z1-dp2-elastic"
NATIVE = sorted(case.name for case in ROOT.iterdir() if (case / "truth.json").exists() and case.name != ELASTIC)
CASES = [*NATIVE, *(f"{case}/universal" for case in NATIVE if (ROOT / case / "universal").is_dir())]


@cache
def report_of(case: str) -> dict:
    return json.loads((ROOT / case.partition("/")[0] / "truth.json").read_text())


def truth_of(case: str) -> dict:
    return load_file(ROOT / case.partition("/")[0] / "truth.safetensors")


@cache
def index_of(case: str) -> Index:
    folder = ROOT / case
    if folder.name == "universal":
        return DeepSpeedUniversalFormat().read(folder)
    return DeepSpeedFormat().read(next(own for own in folder.glob("checkpoint*") if own.is_dir()))


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_the_truth_bit_for_bit(case: str) -> None:
    """Masters where there are some; frozen parameters and buffers as the module has them."""
    index, truth, report = index_of(case), truth_of(case), report_of(case)
    names = {key.removesuffix("/module") for key in truth if key.endswith("/module")}
    names -= set(report["frozen"]) if report["case"]["exclude_frozen"] else set()
    names -= {line.partition(":")[0] for line in index.dropped}
    wanted = {f"{name}/weight": truth[f"{name}/module"] for name in names}
    wanted |= {key: tensor for key, tensor in truth.items() if not key.endswith("/module")}
    assert len(wanted) >= 11
    check_equal({key: own for key, own in read_states(index).items() if not key.endswith(("/step", "/calls"))}, wanted)
    check_copies(index)


@pytest.mark.parametrize("case", CASES)
def test_kinds_ties_step_and_topology(case: str) -> None:
    index, report = index_of(case), report_of(case)
    kinds = {kind: {atom.name for atom in index.atoms.values() if atom.kind is kind} for kind in Kind}
    assert kinds[Kind.BUFFER] == set(report["buffers"])
    assert kinds[Kind.FROZEN] <= {*report["frozen"], *report["empty"]}
    assert (index.aliases, index.step) == (report["aliases"], report["step"])
    assert (index.topology.dp, index.topology.zero) == (report["world_size"], report["case"]["stage"])


@pytest.mark.parametrize("case", CASES)
def test_atoms_are_in_the_order_of_the_model(case: str) -> None:
    index = index_of(case)
    path = next(file.path for file in index.files if file.role.startswith("model states"))
    module = read_archive(path).root["module"]
    assert list(index.atoms) == [name for name in module if name in index.atoms]
    assert len(module) == len(index.atoms) + len(index.aliases) + sum("placeholder" in line for line in index.dropped)


@pytest.mark.parametrize("case", CASES)
def test_groups_and_steps(case: str) -> None:
    index, report = index_of(case), report_of(case)
    checkpoint, ranks = Checkpoint(index), report["world_size"]
    for found, group in zip(index.groups, report["groups"], strict=True):
        order = group["names"]
        if report["ds_config"]["zero_optimization"].get("round_robin_gradients"):
            order = list(undo_round_robin(order, ranks=ranks))
        names, stored = ([name for name in own if name not in report["empty"]] for own in (order, found.params))
        assert stored == names
        assert plain(found.hyper) | {"initial_lr": 0} == group["hyperparameters"] | {"initial_lr": 0}
        for name in names:
            has_step = "step" in index.atoms[name].states
            assert group["step"] is not None or not has_step
            assert not has_step or float(checkpoint.read(name, "step").reshape(())) == group["step"]


@pytest.mark.parametrize("case", CASES)
def test_configuration_and_scheduler_are_kept(case: str) -> None:
    report = report_of(case)
    extras = {extra.name: extra.value for extra in index_of(case).extras if extra.rank is None}
    assert (extras["ds_config"], extras.get("lr_scheduler")) == (report["ds_config"], report["lr_scheduler"])
    engine = extras["engine"]
    assert (engine["global_steps"], engine["skipped_steps"]) == (report["step"], report["skipped_steps"])


@pytest.mark.parametrize("case", CASES)
def test_every_file_is_named(case: str) -> None:
    index = index_of(case)
    folder = Path(index.path)
    beside = {str(path) for path in folder.parent.iterdir() if path.is_file() and not path.name.startswith("latest")}
    assert {file.path for file in index.files if file.role == "companion file"} == beside
    assert {file.path for file in index.files} - beside == {str(path) for path in folder.rglob("*.pt")}
    assert bool(index.records) is ("legacy" not in case)


def test_client_state_is_kept() -> None:
    index, wanted = index_of("z2-dp2-client-state"), report_of("z2-dp2-client-state")["client_state"]
    found = {extra.name: extra.value for extra in index.extras}["client_state"]
    assert found.keys() == wanted.keys()
    assert (found["epoch"], found["best"]) == (wanted["epoch"], wanted["best"])
    for ref, saved in ((found["ema"]["weight"], wanted["ema"]["weight"]), (found["rng_state"], wanted["rng_state"])):
        assert Path(ref.path).read_bytes()[ref.offset : ref.offset + ref.nbytes].hex() == saved["hex"]


def test_an_elastic_checkpoint_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="elastic_checkpoint"):
        DeepSpeedFormat().read(ROOT / ELASTIC / "checkpoint")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("z3-dp2-lion", "zero_pp_rank_#_mp_rank_00_optim_states"),
        ("z3-dp2-fp16", "zero_pp_rank_#_mp_rank_00_model_states"),
        ("z0-pp2", "layer_0#-model_states"),
        ("z0-tp2-dp2", "mp_rank_0#_model_states"),
        ("z0-ep2-dp4", "expp_rank_#_mp_rank_00_optim_states"),
        ("z0-ep2-dp4", "layer_0_expert_#_mp_rank_00_model_states"),
    ],
)
def test_files_that_were_exchanged_are_refused(case, name, tmp_path):
    root = Path(shutil.copytree(ROOT / case / "checkpoint", tmp_path / case))
    one, other = sorted(root.glob(f"*/{name.replace('#', '[01]')}.pt"))
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    with pytest.raises(MalformedError, match=rf"{one.name} .*saved as {other.name}.*exchanged"):
        DeepSpeedFormat().read(root)


@pytest.mark.parametrize(("src", "dst"), [("fp32", "exp_avg"), ("exp_avg", "1xp_avg")])
def test_a_state_under_the_name_of_another(src, dst, tmp_path):
    root = Path(shutil.copytree(ROOT / "z1-dp4-fp32" / "universal", tmp_path / "universal"))
    folder = next(root.glob("*/zero/l2.bias"))
    shutil.copyfile(folder / f"{src}.pt", folder / f"{dst}.pt")
    with pytest.raises(MalformedError, match=rf"l2\.bias/{dst}\.pt: .*; got {src}\.pt"):
        DeepSpeedUniversalFormat().read(root)


def test_a_layer_that_was_renamed(tmp_path):
    root = Path(shutil.copytree(ROOT / "z0-pp2" / "checkpoint", tmp_path / "z0-pp2"))
    (path,) = root.glob("*/layer_01-model_states.pt")
    path.rename(path.with_name("layer_41-model_states.pt"))
    with pytest.raises(MalformedError, match=r"layer_41-.* saved as layer_01-model_states\.pt, .*none"):
        DeepSpeedFormat().read(root)
