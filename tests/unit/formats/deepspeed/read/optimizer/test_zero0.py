"""Optimizers without ZeRO, whose parameters have numbers and no names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ucp_formats.deepspeed.read.optimizer.zero0 import INFERRED
from ucp_formats.deepspeed.read.source import DeepSpeedFormat

import ucp
from ucp.contract.optimizer import OptimizerPlan
from ucp.core.gaps import check_cover
from ucp.core.index import Index, Kind
from ucp.errors import MalformedError, UnsupportedError
from ucp.transfer.probe import Prober

AMBIGUOUS = ({"a": (3,), "b": (3,)}, {"c": (3,)})
"""Any of the three can be in the second group."""


def read(path: Path, names=None) -> Index:
    index = DeepSpeedFormat(names).read(path)
    check_cover(index)
    return index


def fuse(run, *, unfused: bool = False) -> None:
    """Turn the torch optimizer of a run into FP16_Optimizer's or FP16_UnfusedOptimizer's dict."""
    model = run.models[0]
    old, module = model["optimizer"], model["module"]
    sizes = [len(group["params"]) for group in old["param_groups"]]
    names = iter(name for name in run.weights if name != "frozen")
    own = [[next(names) for _ in range(size)] for size in sizes]
    numbers = {"dynamic_loss_scale": True, "cur_scale": 256.0, "cur_iter": 7}
    if unfused:
        masters = [[run.weights[name] for name in group] for group in own]
        model["optimizer"] = {**numbers, "optimizer_state_dict": old, "fp32_groups": masters}
        return
    flats = [torch.cat([run.weights[name].flatten() for name in group]) for group in own]
    for group, flat in zip(own, flats, strict=True):
        views = flat.to(torch.bfloat16)
        at = 0
        for name in group:
            numel = run.weights[name].numel()
            module[name] = views[at : at + numel].view(run.weights[name].shape)
            at += numel
    module["head"] = module[own[0][0]]
    state = {number: {"step": 7, "exp_avg": 2 * flat, "exp_avg_sq": 3 * flat} for number, flat in enumerate(flats)}
    groups = [{**group, "params": [number]} for number, group in enumerate(old["param_groups"])]
    inner = {"state": state, "param_groups": groups}
    model["optimizer"] = {**numbers, "optimizer_state_dict": inner, "fp32_groups_flat": flats, "clip_grad": 1.0}


def check_values(run, path: Path) -> None:
    checkpoint = ucp.open(path)
    for name, weight in run.weights.items():
        if name != "frozen":
            torch.testing.assert_close(checkpoint.read(name, "weight").float(), weight, rtol=0, atol=0)
            torch.testing.assert_close(checkpoint.read(name, "exp_avg"), 2 * weight, rtol=0, atol=0)


@pytest.mark.parametrize("groups", [None, AMBIGUOUS])
def test_views_of_the_flat_tensor_tell_the_names(tmp_path: Path, fake_run, groups) -> None:
    run = fake_run(0, 2, **({"groups": groups} if groups else {}))
    fuse(run)
    index = read(run.save(tmp_path))
    assert INFERRED not in index.notes
    check_values(run, tmp_path)
    assert {extra.name: extra.value for extra in index.extras}["optimizer"]["clip_grad"] == 1.0


def test_a_flat_tensor_that_nothing_views_is_matched_by_its_length(tmp_path: Path, fake_run) -> None:
    run = fake_run(0, 2)
    fuse(run)
    module = run.models[0]["module"]
    del module["frozen"]  # of the length of a group
    for name in list(module):
        module[name] = module[name].clone()
    run.models[0]["shared_params"] = {"head": "a.weight"}
    assert INFERRED in read(run.save(tmp_path)).notes
    check_values(run, tmp_path)


@pytest.mark.parametrize(
    ("groups", "unfused"), [(({"a": (3,)}, {"b": (3,)}), False), (AMBIGUOUS, True), (AMBIGUOUS, None)]
)
def test_several_answers_are_refused_by_name(tmp_path: Path, fake_run, groups, unfused: bool | None) -> None:
    """Flat tensors of one length; and three parameters of one shape, of which any can be in the second group."""
    run = fake_run(0, 2, groups=groups)
    if unfused is not None:
        fuse(run, unfused=unfused)
    with pytest.raises(UnsupportedError, match=r"(?s)\n  (a|b)\n.*param_shapes"):
        read(run.save(tmp_path))


def test_names_that_the_user_gives(tmp_path: Path, fake_run) -> None:
    run = fake_run(0, 2, groups=AMBIGUOUS, dtype=torch.float32)
    index = read(run.save(tmp_path), [["a", "b"], ["c"]])
    assert [group.params for group in index.groups] == [("a", "b"), ("c",)]
    assert INFERRED not in index.notes


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        ([["a", "b"]], "2 parameter groups .*; got 1 group"),
        ([["a", "b"], ["nobody"]], r"\n  nobody$"),
        ([["a"], ["b", "c"]], r"group 0 .* 1: a\n  group 1 .* 2: b, c\n"),
    ],
)
def test_wrong_names_that_the_user_gives(tmp_path: Path, fake_run, names, facts: str) -> None:
    run = fake_run(0, 2, groups=AMBIGUOUS)
    with pytest.raises(MalformedError, match=facts):
        read(run.save(tmp_path), names)


@pytest.mark.parametrize("kind", ["torch", "unfused", "fused"])
def test_names_that_ucp_recorded_come_first(tmp_path: Path, fake_run, kind: str) -> None:
    run = fake_run(0, 2, groups=AMBIGUOUS, **({"dtype": torch.float32} if kind == "torch" else {}))
    if kind != "torch":
        fuse(run, unfused=kind == "unfused")
    model = run.models[0]
    for name in list(model["module"]):
        model["module"][name] = model["module"][name].clone()  # no views that tell
    model["param_shapes"] = [{name: torch.Size(shape) for name, shape in own.items()} for own in AMBIGUOUS]
    index = read(run.save(tmp_path))
    assert [group.params for group in index.groups] == [("a", "b"), ("c",)]
    assert index.topology.zero == 0
    assert INFERRED not in index.notes
    check_values(run, tmp_path)


def test_the_remedy_for_several_answers_is_one(tmp_path: Path, fake_run) -> None:
    run = fake_run(0, 2, groups=AMBIGUOUS, dtype=torch.float32)
    with pytest.raises(UnsupportedError) as error:
        read(run.save(tmp_path))
    (told,) = re.findall(r"(saved\['param_shapes'\] = .*?); torch.save", str(error.value))
    file = tmp_path / "global_step7" / "mp_rank_00_model_states.pt"
    saved = torch.load(file)
    shapes = {name: ref.shape for name, ref in saved["module"].items()}
    exec(
        told, {"saved": saved, "GROUPS": [["a", "b"], ["c"]], "SHAPES": shapes}
    )  # what the message says, word for word
    torch.save(saved, file)
    assert [group.params for group in read(tmp_path).groups] == [("a", "b"), ("c",)]


@pytest.mark.parametrize(
    ("recorded", "facts"),
    [
        ([{"a": (3,), "b": (3,)}], "2 parameter groups .*; got 1 group"),
        ([{"a": (3,), "nobody": (3,)}, {"c": (3,)}], r"\n  nobody$"),
        ([{"a": (3,), "b": (1, 3)}, {"c": (3,)}], r"b: \[1, 3\] in param_shapes, \[3\] in module"),
        ([{"a": (3,)}, {"b": (3,), "c": (3,)}], r"group 0 .* 1: a\n  group 1 .* 2: b, c\n"),
    ],
)
def test_recorded_names_that_do_not_fit_are_not_passed_over(tmp_path: Path, fake_run, recorded, facts: str) -> None:
    run = fake_run(0, 2, groups=AMBIGUOUS, dtype=torch.float32)
    run.models[0]["param_shapes"] = recorded
    with pytest.raises(MalformedError, match=facts):
        read(run.save(tmp_path))


def test_nothing_fits(tmp_path: Path, fake_run) -> None:
    run = fake_run(0, 2)
    run.models[0]["optimizer"]["state"][0] = {"exp_avg": torch.zeros(9, 9)}
    with pytest.raises(UnsupportedError, match="no assignment"):
        read(run.save(tmp_path))


def test_an_optimizer_that_never_stepped_keeps_its_groups_as_an_extra(tmp_path: Path, fake_run) -> None:
    run = fake_run(0, 2)
    run.models[0]["optimizer"]["state"] = {}
    index = read(run.save(tmp_path / "run"))
    assert index.groups == ()
    assert [len(group["params"]) for group in {e.name: e.value for e in index.extras}["param_groups"]] == [2, 2]
    assert any("never stepped" in note for note in index.notes)
    ucp.convert(tmp_path / "run", tmp_path / "out", to="deepspeed", topology="dp=2,zero=0", workers=1)
    (file,) = (tmp_path / "out").glob("*/mp_rank_00_model_states.pt")
    assert torch.load(file, weights_only=False)["optimizer"] == run.models[0]["optimizer"]


def test_steps_that_fused_adam_counts_in_the_last_parameter(tmp_path: Path, fake_run) -> None:
    """Others keep what they began with: 0, or the count of the checkpoint that was resumed."""
    run = fake_run(0, 1)
    saved = run.models[0]["optimizer"]
    for group in saved["param_groups"]:
        group |= {"bias_correction": True, "step": 0}
    for number, step in enumerate((0, 25, 4, 30)):
        saved["state"][number]["step"] = step
    run.save(tmp_path / "run")
    index = read(tmp_path / "run")
    with Prober() as prober:
        plan = OptimizerPlan(index, prober)
    assert [plan.count(name) for group in index.groups for name in group.params] == [25, 25, 30, 30]
    assert any("FusedAdam counts" in note for note in index.notes)
    assert ucp.plan(tmp_path / "run", to="deepspeed", topology="dp=2,zero=1")


def test_a_checkpoint_without_an_optimizer(tmp_path: Path, fake_run) -> None:
    run = fake_run(0, 2)
    run.models[0]["optimizer"] = None
    index = read(run.save(tmp_path))
    assert index.groups == ()
    assert {atom.kind for atom in index.atoms.values()} == {Kind.PARAMETER, Kind.BUFFER}
    assert any("without an optimizer" in note for note in index.notes)
