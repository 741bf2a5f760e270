"""Optimizers that number their parameters: named where there is one answer, one problem on the page elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from ucp_formats.torch.state_dict.numbered import UnnamedError, name_params

import ucp
from ucp.errors import IdleOptionError, LoadError, MissingStateError, UsageError
from ucp_cli.verbs import cli as command

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Split = Callable[[nn.Module], list[Any]]


class Model(nn.Module):
    """An embedding, two equal blocks and an output matrix of the embedding's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 4), "gate": nn.Linear(4, 4)}) for _ in range(2)
        )
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of tokens."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block["up"](block["norm"](hidden)) * block["gate"](hidden)
        return self.head(hidden)


def trained(split: Split, *, frozen: Sequence[str] = ()) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    for name in frozen:
        model.get_parameter(name).requires_grad = False
    optimizer = torch.optim.AdamW(split(model))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(8).reshape(2, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def saved(split: Split, folder: Path, *, way: str = "torch", frozen: Sequence[str] = ()) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and the states of the optimizer by name."""
    model, optimizer = trained(split, frozen=frozen)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    folder.mkdir(exist_ok=True)
    if way == "dcp":
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    else:
        torch.save(state, folder / "checkpoint.pt")
    return folder, {name: optimizer.state[own] for name, own in model.named_parameters() if own in optimizer.state}


def in_one(model: nn.Module) -> list[Any]:
    return list(model.parameters())


def by_dim(model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    return [
        {"params": [own for own in params if own.dim() > 1]},
        {"params": [own for own in params if own.dim() < 2], "weight_decay": 0.0},
    ]


def by_layer(model: nn.Module) -> list[Any]:
    """Groups that shapes do not tell apart."""
    named = dict(model.named_parameters())
    first = [own for name, own in named.items() if name.startswith("blocks.0")]
    return [{"params": first}, {"params": [own for own in named.values() if not any(own is one for one in first)]}]


def check(folder: Path, states: dict[str, Any]) -> None:
    checkpoint = ucp.open(folder)
    assert checkpoint.index.unnamed is None
    assert {atom.name for atom in checkpoint.index.atoms.values() if "exp_avg" in atom.states} == states.keys()
    for name, own in states.items():
        assert torch.equal(checkpoint.read(name, "exp_avg"), own["exp_avg"]), name


@pytest.mark.parametrize("way", ["torch", "dcp"])
@pytest.mark.parametrize("split", [in_one, by_dim])
@pytest.mark.parametrize("frozen", [(), ("blocks.0.up.weight",), ("blocks.1.norm.bias", "embed.weight", "head.weight")])
def test_a_number_without_states_is_a_parameter_that_was_not_stepped(
    way: str, split: Split, frozen: Sequence[str], tmp_path: Path
) -> None:
    folder, states = saved(split, tmp_path / "run", way=way, frozen=frozen)
    check(folder, states)


@pytest.mark.parametrize("way", ["torch", "dcp"])
@pytest.mark.parametrize(("split", "more"), [(in_one, 12), (by_dim, 12)])
def test_a_note_names_parameters_whose_moments_may_be_exchanged(
    way: str, split: Split, more: int, tmp_path: Path
) -> None:
    folder, _ = saved(split, tmp_path / "run", way=way)
    (note,) = [note for note in ucp.inspect(folder).notes if "numbers its parameters" in note]
    assert f"shapes cannot tell embed.weight from head.weight (and {more} more)" in note
    assert "--param-order" in note
    assert "all shapes fit" not in note


@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_states_without_names_are_one_problem_and_weights_are_read(way: str, tmp_path: Path) -> None:
    folder, _ = saved(by_layer, tmp_path / "run", way=way)
    model, _ = trained(by_layer)

    index = ucp.inspect(folder)
    assert index.unnamed is not None
    assert index.unnamed.states == ("exp_avg", "exp_avg_sq", "step")
    for name, own in model.state_dict().items():
        assert torch.equal(ucp.open(folder).read(name, "weight"), own)
    report = ucp.verify(folder)
    assert report.problems == report.unnamed == (index.unnamed.reason,)

    for to in ("ucp", "dcp", "torch", "deepspeed"):
        with pytest.raises(MissingStateError, match="--param-order"):
            ucp.convert(folder, tmp_path / "refused", to=to)
    ucp.convert(folder, tmp_path / "weights", to="dcp", include=["*/weight"], verify=True)
    same_names = "huggingface:huggingface"
    ucp.convert(
        folder, tmp_path / "export", to="huggingface", settings={"config": "none"}, names=same_names, verify=True
    )


def test_a_load_needs_the_states_only_with_an_optimizer(tmp_path: Path) -> None:
    folder, _ = saved(by_layer, tmp_path / "run")
    model = Model()
    ucp.load_into(model, checkpoint=folder)
    assert torch.equal(model.head.weight, ucp.open(folder).read("head.weight", "weight"))
    other = torch.optim.AdamW(model.parameters())  # in another order than the saved one
    with pytest.raises(LoadError, match=r"number 0 .*--param-order"):
        ucp.load_into(model, checkpoint=folder, optimizer=other)


@pytest.mark.parametrize("flat", [False, True])
def test_frozen_parameters_that_get_state_dict_ignored_are_left_out(flat: bool, tmp_path: Path) -> None:
    model, optimizer = trained(in_one, frozen=["embed.weight", "blocks.0.up.bias"])
    options = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "run", no_dist=True)

    index = ucp.inspect(tmp_path / "run")
    assert any("embed.weight" in note and "left out" in note for note in index.notes)
    assert "embed.weight" not in index.atoms
    assert not any("embed.weight" in group.params for group in index.groups)
    moments = {name: optimizer.state[own] for name, own in model.named_parameters() if own.requires_grad}
    check(tmp_path / "run", moments)


ORDERS: dict[str, Callable[[list[list[str]]], object]] = {
    "groups": lambda groups: groups,
    "one list": lambda groups: [name for group in groups for name in group],
}


def names_of(split: Split) -> list[list[str]]:
    """Names in the groups of an optimizer."""
    model, optimizer = trained(split)
    names = {id(own): name for name, own in model.named_parameters()}
    return [[names[id(own)] for own in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("way", ["torch", "dcp"])
@pytest.mark.parametrize("form", ORDERS)
def test_an_order_that_the_user_gives(way: str, form: str, tmp_path: Path) -> None:
    folder, states = saved(by_layer, tmp_path / "run", way=way)
    order = ORDERS[form](names_of(by_layer))
    (tmp_path / "order.json").write_text(json.dumps(order))
    for asked in (order, tmp_path / "order.json"):
        checkpoint = ucp.open(folder, param_order=asked)
        for name, own in states.items():
            assert torch.equal(checkpoint.read(name, "exp_avg"), own["exp_avg"]), name
    ucp.convert(folder, tmp_path / "out", to="dcp", param_order=tmp_path / "order.json", verify=True)
    assert ucp.verify(tmp_path / "out", against=folder, param_order=order).ok
    words = [
        "convert",
        str(folder),
        str(tmp_path / "cli"),
        "--to",
        "dcp",
        "--param-order",
        str(tmp_path / "order.json"),
    ]
    assert CliRunner().invoke(command, words).exit_code == 0


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda groups: groups[:1], r"\[6, 8\] .*; got lists of \[6\]"),
        (
            lambda groups: [[*groups[0][1:], groups[0][0]], groups[1]],
            r"number 1 .*\[4\], .*blocks\.0\.up\.weight .*\[4, 4\]",
        ),
        (lambda groups: [groups[0], [*groups[1][:-1], "nothing"]], r"\n  nothing "),
        (lambda groups: [groups[0], [*groups[1][:-1], groups[1][0]]], r"\n  embed\.weight .*\b2 times"),
        (lambda groups: {"groups": groups}, r"order\.json holds"),
        (lambda groups: [[1, 2]], r"order\.json holds"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(change: Callable[[Any], object], facts: str, tmp_path: Path) -> None:
    folder, _ = saved(by_layer, tmp_path / "run")
    (tmp_path / "order.json").write_text(json.dumps(change(names_of(by_layer))))
    with pytest.raises(UsageError, match=facts):
        ucp.inspect(folder, param_order=tmp_path / "order.json")


def test_an_order_that_nobody_needs_is_refused(tmp_path: Path) -> None:
    folder, _ = saved(lambda model: list(model.named_parameters()), tmp_path / "run")
    with pytest.raises(IdleOptionError, match="--param-order"):
        ucp.inspect(folder, param_order=names_of(in_one))
    ucp.convert(folder, tmp_path / "atoms")
    with pytest.raises(IdleOptionError, match="--param-order"):
        ucp.inspect(tmp_path / "atoms", param_order=names_of(in_one))


@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_the_order_of_the_live_optimizer_is_taken(way: str, tmp_path: Path) -> None:
    folder, states = saved(by_layer, tmp_path / "run", way=way)
    model = Model()
    optimizer = torch.optim.AdamW(by_layer(model))
    ucp.load_into(model, checkpoint=folder, optimizer=optimizer)
    for name, own in model.named_parameters():
        assert torch.equal(optimizer.state[own]["exp_avg"], states[name]["exp_avg"]), name


def test_a_live_order_that_contradicts_the_model_is_refused(tmp_path: Path) -> None:
    """Matrices of one shape, exchanged in one of two scripts: nothing tells in which."""

    def exchanged(model: nn.Module) -> list[Any]:
        params = list(model.parameters())
        at, other = (next(n for n, own in enumerate(params) if own is one) for one in blocks_of(model))
        params[at], params[other] = params[other], params[at]
        return params

    def blocks_of(model: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
        return model.get_parameter("blocks.0.up.weight"), model.get_parameter("blocks.0.gate.weight")

    folder, states = saved(exchanged, tmp_path / "run")
    model = Model()
    optimizer = torch.optim.AdamW(exchanged(model))
    with pytest.raises(LoadError, match=r"blocks\.0\.(up|gate)\.weight; .*blocks\.0\.(up|gate)\.weight"):
        ucp.load_into(model, checkpoint=folder, optimizer=optimizer)
    ucp.load_into(model, checkpoint=folder, optimizer=optimizer, param_order=names_of(exchanged))
    for name, own in model.named_parameters():
        assert torch.equal(optimizer.state[own]["exp_avg"], states[name]["exp_avg"]), name


FORMS = [(2, 2), (3, 2), (2,), (3,), ()]
ENDS = ["weight", "bias", "norm.weight", "running_mean"]


def shuffled(draw: random.Random) -> tuple[dict[str, tuple[int, ...]], list[list[str]]]:
    """A model, and groups of an optimizer: by decay or at random, of all parameters or of some."""
    model = {f"m{at}.{draw.choice(ENDS)}": draw.choice(FORMS) for at in range(draw.randint(1, 9))}
    groups: list[list[str]] = [[] for _ in range(draw.randint(1, 3))]
    by_decay, without = draw.random() < 0.4, draw.choice([0, 0, 0.2])
    for name, shape in model.items():
        if not name.endswith("running_mean") and draw.random() >= without:
            group = len(shape) < 2 if by_decay and len(groups) == 2 else draw.randrange(len(groups))
            groups[group].append(name)
    return model, groups


def named(
    model: dict[str, tuple[int, ...]], groups: list[list[str]], draw: random.Random
) -> list[tuple[str, str]] | None:
    """Parameters with states, each with the name that was inferred for it; None where none could be."""
    names = [name for group in groups for name in group]
    numbers = iter(range(len(names)))
    share = draw.choice([0, 0.2, 0.5])
    states = {str(number): model[name] for number, name in enumerate(names) if draw.random() >= share}
    try:
        found = name_params([[next(numbers) for _ in group] for group in groups], states, model, shapes=model).names
    except UnnamedError:
        return None
    return [(name, found[number]) for number, name in enumerate(names) if str(number) in states]


@pytest.mark.parametrize("seed", range(4))
def test_no_wrong_name_is_ever_taken(seed: int) -> None:
    """Frozen parameters in groups, some in none, buffers between them: groups keep the order of the model."""
    draw = random.Random(seed)
    answers = [named(*shuffled(draw), draw) for _ in range(2000)]
    assert all(name == inferred for answer in answers for name, inferred in answer or ())
    assert sum(answer is not None for answer in answers) > 1000


@pytest.mark.parametrize("seed", range(4))
def test_another_order_is_taken_only_where_shapes_cannot_show_it(seed: int) -> None:
    """The order of the model within a group is assumed: of a permutation all that shapes can show is refused."""
    draw = random.Random(seed)
    for _ in range(2000):
        model, groups = shuffled(draw)
        for group in groups:
            draw.shuffle(group)
        answer = named(model, groups, draw)
        assert all(model[name] == model[inferred] for name, inferred in answer or ())


class Pooled(nn.Module):
    """Buffers beside parameters, some of a parameter's shape and some with names of its own, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(5, 5))
        self.conv, self.norm = nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)
        self.unused, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Scores of a batch."""
        return self.head(self.norm(self.conv(batch)).mean(2))


@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_buffers_are_in_no_group(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Pooled()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 5)).square().mean().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if way == "dcp":
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    else:
        torch.save(state, tmp_path / "checkpoint.pt")
    check(tmp_path, {name: optimizer.state[own] for name, own in model.named_parameters() if own in optimizer.state})


def test_the_moments_of_a_scalar_are_moments(tmp_path: Path) -> None:
    """A learned temperature first in the model, and a buffer that is in no group."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = torch.nn.Parameter(torch.tensor(2.0))
            self.linear = torch.nn.Linear(3, 2)
            self.register_buffer("seen", torch.zeros(7))

    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters())
    (model.linear(torch.ones(1, 3)) * model.temperature).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
    checkpoint = ucp.open(tmp_path / "ckpt.pt")
    assert checkpoint.index.unnamed is None
    for name, param in model.named_parameters():
        assert torch.equal(checkpoint.read(name, "exp_avg"), optimizer.state[param]["exp_avg"]), name
