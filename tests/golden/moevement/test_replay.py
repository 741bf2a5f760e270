"""A window that MoEvement wrote, replayed by `ucp.densify`: the states that its run recorded.

Its code is not needed. What the run computed was found from its files alone: the upstream logs are equal bit for bit to
what `Model` gives for the recorded weights, these batches and this loss, forwards and backwards, in every iteration.

One thing is not the run's: MKL rounds square roots differently on different processors. So a replayed master may be
what AdamW gives for a square root next to that of this processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import ucp
from ucp.errors import MissingStateError

FIXTURES = Path(__file__).parents[3] / "fixtures/moevement"
WINDOW = FIXTURES / "boundary/checkpoint/moevement"
LR = 1e-2
MICRO = 2


class Block(nn.Module):
    """`x + moe(x)` with the best of two experts, as DeepSpeed computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = nn.Module()
        self.moe.deepspeed_moe = moe = nn.Module()
        moe.gate = nn.Module()
        moe.gate.wg = nn.Linear(16, 2, bias=False)
        moe.experts = nn.Module()
        moe.experts.deepspeed_experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moe, tokens = self.moe.deepspeed_moe, x.reshape(-1, 16)
        gates = functional.linear(tokens.float(), moe.gate.wg.weight.float()).softmax(1)
        mask = functional.one_hot(gates.argmax(1), 2)
        places = (torch.cumsum(mask, 0) - 1) * mask
        slots = functional.one_hot(places.sum(1), int(mask.sum(0).max())).float()
        combine = torch.einsum("se,sc->sec", gates * mask, slots)
        sent = torch.einsum("sec,sm->ecm", combine.bool().type_as(tokens), tokens)
        results = torch.stack([expert(sent[n]) for n, expert in enumerate(moe.experts.deepspeed_experts)])
        return x + torch.einsum("sec,ecm->sm", combine.type_as(tokens), results).view_as(x)


class Model(nn.Module):
    """Both pipeline stages."""

    def __init__(self) -> None:
        super().__init__()
        layers = {"0": nn.ModuleDict({"lin": nn.Linear(16, 16)}), "1": Block(), "2": Block()}
        layers["3"] = nn.ModuleDict({"proj": nn.Linear(16, 4)})
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = dict(self.named_children())
        sent = layers["1"](layers["0"]["lin"](x))
        if sent.requires_grad:
            sent.register_hook(lambda gradient: gradient / MICRO)  # DeepSpeed averages once more in the first stage
        return layers["3"]["proj"](layers["2"](sent).mean(1))


class Run:
    """The run that MoEvement saved, without its pipeline."""

    def __init__(self) -> None:
        self.model = Model()
        self.masters = {name: param.detach().float() for name, param in self.model.named_parameters()}
        self.optimizer = torch.optim.AdamW(list(self.masters.values()), lr=0.5)

    def step(self, iteration: int, active: frozenset[str], scalars: Mapping[str, object]) -> None:
        assert scalars["clip_norm"] is None
        with ucp.replay.frozen(self.model, active):
            for micro in range(MICRO):
                generator = torch.Generator().manual_seed(1000 * iteration + 10 * micro)
                x = torch.randn(2, 4, 16, generator=generator).bfloat16()
                labels = torch.randint(0, 4, (2,), generator=generator)
                (functional.cross_entropy(self.model(x).float(), labels) / MICRO).backward()
        params = dict(self.model.named_parameters())
        for name, master in self.masters.items():
            gradient = params[name].grad
            master.grad = None if gradient is None else gradient.float()
        self.optimizer.step()
        self.model.zero_grad()
        for name, master in self.masters.items():
            params[name].data.copy_(master)

    def states(self) -> dict[str, torch.Tensor]:
        """What the run recorded: masters and moments, flattened."""
        states = {}
        for name, master in self.masters.items():
            of_param = self.optimizer.state[master]
            states |= {name: master, **{f"{name}|{state}": of_param[state] for state in ("exp_avg", "exp_avg_sq")}}
        return {name: state.flatten() for name, state in states.items()}


def read_history(iteration: int) -> dict[str, torch.Tensor]:
    """What the run recorded after an iteration."""
    history = {}
    for rank in range(2):
        history |= torch.load(FIXTURES / f"boundary/hist{rank}.pt", weights_only=False)["hist"][iteration]
    return {name: state.detach() for name, state in history.items()}


def step_adamw(before: torch.Tensor, moment: torch.Tensor, root: torch.Tensor, iteration: int) -> torch.Tensor:
    """The master after a step of AdamW, given the square root of its second moment."""
    size, correction = LR / (1 - 0.9**iteration), (1 - 0.999**iteration) ** 0.5
    return before * (1 - LR * 0.01) - size * moment / (root / correction + 1e-8)


def densify(run: Run, scalars: Mapping[int, Mapping[str, object]], step: Any = None) -> ucp.DensifyReport:
    return ucp.densify(
        WINDOW, step or run.step, run.model, run.optimizer, masters=run.masters, scalars=scalars, rank_extras="drop"
    )


def test_a_replayed_window_is_the_run() -> None:
    run, trained = Run(), []

    def step(iteration: int, active: frozenset[str], scalars: Mapping[str, object]) -> None:
        trained.extend(active)
        run.step(iteration, active, scalars)

    report = densify(run, {2: {"clip_norm": None, "lr": LR}}, step)
    assert (report.first, report.iteration) == (1, 2)  # the third slot of the window is empty
    states, before, after = run.states(), read_history(1), read_history(2)
    assert states.keys() == after.keys()
    assert len(states) == 42
    assert sorted(trained) == sorted(name for name in run.masters if "experts" in name)
    for name, state in states.items():
        if name not in trained:  # moments, and masters that the second link has
            assert torch.equal(state, after[name]), name
            continue
        root = after[f"{name}|exp_avg_sq"].sqrt()
        near = [torch.nextafter(root, torch.full_like(root, to)) for to in (-1.0, 9.0)]
        possible = [step_adamw(before[name], after[f"{name}|exp_avg"], other, 2) for other in (root, *near)]
        for values in (state, after[name]):
            assert torch.stack([values == other for other in possible]).any(0).all(), name
    equal = torch.cat([states[name] == after[name] for name in trained])
    assert equal.float().mean() > 0.97
    for name, param in run.model.named_parameters():
        assert torch.equal(param, run.masters[name].bfloat16())
        assert run.optimizer.state[run.masters[name]]["step"].item() == 2


def test_what_the_window_lacks_is_named() -> None:
    for scalars in ({}, {2: {"clip_norm": None}}, {2: {"lr": LR}}):
        missing = [name for name in ("clip_norm", "lr") if name not in scalars.get(2, {})]
        with pytest.raises(MissingStateError, match=f"iteration 2: {', '.join(missing)}"):
            densify(Run(), scalars)


def test_another_learning_rate_differs() -> None:
    run = Run()
    densify(run, {2: {"clip_norm": None, "lr": 2 * LR}})
    history = read_history(2)
    same = [(run.states()[name] == history[name]).float().mean() for name in run.masters if "experts" in name]
    assert max(same) < 0.5
