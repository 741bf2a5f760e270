"""What `--to dcp` writes, read by torch itself: keys, paths, values and elements of its own checkpoints come back."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.utils._pytree import tree_leaves

import ucp
from ucp.core.index import Index
from ucp.errors import CorruptError, MisfitError, UsageError
from ucp.source.read import index_of

ROOT = Path(__file__).parents[3] / "fixtures"
TORCH = sorted(path.parents[1].name for path in (ROOT / "torch").glob("*/checkpoint/.metadata"))
STYLES = {"nested": "nested", "flattened": "flattened", "torchtitan": "torchtitan", "raw": "nested"}


def by_torch(folder: Path) -> dict[str, Any]:
    """The nested dict that torch reads, without a process group."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("case", TORCH)
def test_torch_reads_what_it_wrote_itself(case: str, tmp_path: Path) -> None:
    source = ROOT / "torch" / case / "checkpoint"
    style = json.loads((source.parent / "truth.json").read_text())["case"]["style"]
    ucp.convert(source, tmp_path / "out", to="dcp", topology="dp=3", settings={"style": STYLES[style]})
    wanted, found = by_torch(source), by_torch(tmp_path / "out")
    if style == "raw":  # numbers become names
        wanted.pop("optimizer"), found.pop("optimizer")
        wanted["model"] = {key.removeprefix("_orig_mod."): own for key, own in wanted["model"].items()}
    if style == "nested":
        for groups in (wanted["optimizer"]["param_groups"], found["optimizer"]["param_groups"]):
            groups.sort(key=lambda group: group["weight_decay"])
    assert same(wanted, found)


def test_a_checkpoint_of_deepspeed_has_all_keys_that_torch_asks_for(tmp_path: Path) -> None:
    source = ROOT / "deepspeed" / "z3-dp4-fp32"
    ucp.convert(source / "checkpoint", tmp_path / "out", to="dcp", topology="dp=2")
    found, kept = by_torch(tmp_path / "out"), by_torch(ROOT / "torch" / "fsdp2-dp4" / "checkpoint")
    assert kept["model"].keys() <= found["model"].keys()
    assert kept["optimizer"]["param_groups"][0].keys() == found["optimizer"]["param_groups"][0].keys()
    truth = load_file(source / "truth.safetensors")
    for name, states in found["optimizer"]["state"].items():
        assert states["step"].dtype == torch.float32
        assert states["step"].shape == ()
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[state], truth[f"{name}/{state}"])
        assert torch.equal(found["model"][name], truth[f"{name}/weight"])


def test_accelerate_has_model_and_optimizer_in_folders_of_their_own(tmp_path: Path) -> None:
    source = Path(shutil.copytree(ROOT / "torch" / "fsdp2-dp4" / "checkpoint", tmp_path / "source"))
    (source / "trainer_state.json").write_text("{}")
    ucp.convert(source, tmp_path / "out", to="dcp", topology="dp=2", settings={"style": "accelerate"})
    wanted = by_torch(source)
    assert same(by_torch(tmp_path / "out" / "pytorch_model_fsdp_0"), {"model": wanted["model"]})
    assert same(by_torch(tmp_path / "out" / "optimizer_0"), {"optimizer": wanted["optimizer"]})
    assert (tmp_path / "out" / "trainer_state.json").read_text() == "{}"
    assert ucp.diff(source, tmp_path / "out").equal
    told = [ucp.plan(source, to="dcp", settings=own).notes for own in ({}, {"style": "accelerate"})]
    assert [any("pass --set style=accelerate" in note for note in own) for own in told] == [True, False]


def test_a_step_with_dims_is_refused(tmp_path: Path) -> None:
    source = ROOT / "deepspeed" / "z1-dp2-counting" / "checkpoint"
    with pytest.raises(MisfitError, match=r"step .*\[1\]"):
        ucp.convert(source, tmp_path / "out", to="dcp", topology="dp=2")


def test_what_torch_asks_for_and_is_not_there_is_said() -> None:
    source = ROOT / "torch" / "fsdp2-dp4" / "checkpoint"
    plan = ucp.plan(source, to="dcp", exclude=["*/exp_avg"], settings={"style": "torchtitan"})
    assert any("12 trained parameters lack optimizer states" in note for note in plan.notes)
    assert any("no train_state" in note for note in plan.notes)


def test_a_scalar_in_no_group_is_a_buffer_unless_it_is_named_as_frozen(tmp_path: Path) -> None:
    """ZeRO-3 keeps parameters apart from the model's tensors, and does not load a buffer that is written as one."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("scale", torch.tensor(2.0))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    ucp.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    for source in (tmp_path / "a.pt", tmp_path / "dcp"):
        report = ucp.inspect(source)
        assert report.atoms["scale"].kind == "buffer"
        assert any("taken for buffers" in note and "scale" in note for note in report.notes)
    for number, (frozen, kind) in enumerate({"none": "buffer", "sc*": "buffer", "scale": "frozen"}.items()):
        zero3 = tmp_path / f"zero3-{number}"
        ucp.convert(source, zero3, to="deepspeed", topology="dp=2,zero=3", settings={"frozen": frozen})
        assert ucp.inspect(zero3).atoms["scale"].kind == kind


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_does_not_ask_for_states_of_frozen_parameters(tmp_path: Path) -> None:
    def new_run() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model.get_parameter("1.weight").requires_grad = False
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = new_run()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "source.pt")
    report = ucp.convert(tmp_path / "source.pt", tmp_path / "out", to="dcp")
    assert not any("optimizer states, such as" in note for note in report.notes)
    later, stepped = new_run()
    weights, states = get_state_dict(later, stepped)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(weights, model.state_dict())
    assert torch.equal(
        states["state"]["0.weight"]["exp_avg"], optimizer.state[model.get_parameter("0.weight")]["exp_avg"]
    )
    assert "1.weight" not in states["state"]


def test_every_rank_has_one_chunk_of_what_it_loads(tmp_path: Path) -> None:
    ucp.convert(ROOT / "torch" / "ddp-dp2" / "checkpoint", tmp_path / "out", to="dcp", topology="dp=4")
    metadata = FileSystemReader(tmp_path / "out").read_metadata()
    chunks = metadata.state_dict_metadata["model.l1.weight"].chunks
    assert [tuple(own.sizes) for own in chunks] == [(4, 7), (4, 7), (4, 7), (1, 7)]
    files = {
        tuple(index.offset): info.relative_path
        for index, info in metadata.storage_data.items()
        if index.fqn == "model.l1.weight"
    }
    assert files == {(4 * rank, 0): f"__{rank}_0.distcp" for rank in range(4)}


def test_replicas_of_shards_are_found_again(tmp_path: Path) -> None:
    source = ROOT / "deepspeed" / "z3-dp4-fp32" / "checkpoint"
    ucp.convert(source, tmp_path / "out", to="dcp", topology="dp_replicate=2,dp_shard=2")
    assert str(ucp.inspect(tmp_path / "out").topology) == "dp_replicate=2,dp_shard=2"
    with pytest.raises(UsageError, match=r"--to deepspeed .*dp_replicate=2,dp_shard=2"):
        ucp.convert(tmp_path / "out", tmp_path / "z", to="deepspeed", topology="dp_replicate=2,dp_shard=2,zero=1")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"settings": {"style": "keras"}}, "style=nested"),
        ({"settings": {"stile": "nested"}}, "style"),
        ({"settings": {"decoupled_weight_decay": "yes"}}, "true|false"),
        ({"compress": True}, "compress"),
        ({"topology": "dp=2,zero=1"}, "got zero"),
        ({"tag": "last"}, "no tag"),
        ({"dtypes": {"step": "bfloat16"}}, "step in float32"),
        ({"settings": {"decoupled_weight_decay": "false"}}, "drop --set decoupled_weight_decay"),
    ],
)
def test_what_torch_cannot_have_is_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=match):
        ucp.convert(ROOT / "torch" / "ddp-dp2" / "checkpoint", tmp_path / "out", to="dcp", **options)


GPT2 = ROOT / "huggingface" / "gpt2" / "model"


def test_a_second_name_of_other_elements_does_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_file(GPT2 / "model.safetensors")
    save_file({"lm_head.weight": weights["transformer.wte.weight"] + 1}, tmp_path / "other.safetensors")
    wrong = ucp.inspect(tmp_path / "other.safetensors").atoms["lm_head.weight"]

    def read_other(path: Path, **_: object) -> Index:
        index = index_of(path, unfinished=True)
        return replace(index, atoms={**index.atoms, "lm_head.weight": wrong})

    monkeypatch.setattr("ucp.conversion.convert.read_with_options", read_other)
    with pytest.raises(CorruptError, match=r"lm_head\.weight/weight values"):
        ucp.convert(GPT2, tmp_path / "out", to="dcp", verify=True)


LIGHTNING = ROOT / "torch" / "lightning" / "checkpoint" / "last.ckpt"


def lightning_values() -> dict[str, Any]:
    """What Lightning saved beside model and optimizer."""
    saved: dict[str, Any] = torch.load(LIGHTNING, weights_only=False)
    return {key: value for key, value in saved.items() if key not in ("state_dict", "optimizer_states")}


def test_lightning_finds_its_epochs_and_loops(tmp_path: Path) -> None:
    ucp.convert(LIGHTNING, tmp_path / "out", to="dcp", settings={"style": "lightning"}, verify=True)
    assert torch.load(tmp_path / "out" / "meta.pt") == lightning_values()


def test_lightning_finds_them_in_the_client_state_of_deepspeed(tmp_path: Path) -> None:
    """`DeepSpeedStrategy` hands them to the engine, which puts them into the files of the model."""
    source = shutil.copytree(ROOT / "deepspeed" / "z1-dp4-bf16" / "checkpoint", tmp_path / "source")
    settings = {"style": "lightning"}
    with pytest.raises(MisfitError, match=r"meta\.pt"):
        ucp.plan(source, to="dcp", settings=settings)
    (file,) = source.rglob("mp_rank_00_model_states.pt")
    torch.save({**torch.load(file, weights_only=False), **lightning_values()}, file)
    ucp.convert(source, tmp_path / "out", to="dcp", settings=settings, verify=True)
    saved = torch.load(tmp_path / "out" / "meta.pt", weights_only=False)
    assert {key: saved[key] for key in lightning_values()} == lightning_values()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model, one parameter of which is frozen, and an optimizer of two groups, after two steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    model[1].bias.requires_grad_(False)
    groups = [
        {"params": [model[0].weight, model[1].weight], "weight_decay": 0.1},
        {"params": [model[0].bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for _ in range(2):
        model(torch.randn(3, 6)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def optim_keys() -> dict[str, Any]:
    model, optim = get_state_dict(*trained())
    return {"model": model, "optim": optim, "epoch": 3}


def app() -> dict[str, Any]:
    model, optim = get_state_dict(*trained(), options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {"state": {"model": model, "optim": optim, "scheduler": {"last_epoch": 2}}, "step": 7}


def bare() -> dict[str, Any]:
    return trained()[0].state_dict()


def compiled() -> dict[str, Any]:
    """With `_orig_mod.` in names, and an optimizer that numbers parameters."""
    model, optimizer = trained()
    names = {f"_orig_mod.{name}": own for name, own in model.state_dict().items()}
    return {"net": names, "opt": {"inner": optimizer.state_dict()}}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("save", [optim_keys, app, bare, compiled])
def test_the_keys_of_the_source_are_kept(save: Any, tmp_path: Path) -> None:
    """The script that saved it loads it by its own state dict, which has other values before."""
    wanted = save()
    dcp.save(wanted, checkpoint_id=tmp_path / "source", no_dist=True)
    ucp.convert(
        tmp_path / "source", tmp_path / "out", to="dcp", topology="dp=3", settings={"style": "source"}, verify=True
    )
    state = copy.deepcopy(wanted)
    for tensor in tree_leaves(state):
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(state, wanted)
    first, second = (FileSystemReader(tmp_path / own).read_metadata().state_dict_metadata for own in ("source", "out"))
    assert first.keys() <= second.keys()


def test_what_has_no_keys_has_none_to_keep(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--set style=source"):
        ucp.plan(ROOT / "deepspeed" / "z1-dp4-bf16" / "checkpoint", to="dcp", settings={"style": "source"})
