"""A run of the reference model by hand: tensor, pipeline (also interleaved), expert and data parallelism over gloo.

    run = Run(DENSE, Grid.parse("tp2 pp2 dp2"), style=Style(local=True, marked=True), zero=True)
    losses = [run.step(at) for at in range(50)]

Whatever the grid, weights start alike, the global batch is the same, and gradients are those of its mean loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.integration.live.reference.collectives import Group
from tests.integration.live.reference.grid import Grid
from tests.integration.live.reference.live_zero import LiveZero
from tests.integration.live.reference.model import Share, Style
from tests.integration.live.reference.pipeline import train
from tests.integration.live.reference.rank_model import RankModel
from tests.integration.live.reference.sizes import ROWS, SEQUENCE, Sizes, is_decayed, tokens
from tests.integration.live.reference.zero import FlatAdamW

ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""Hyper-parameters of every run, beside its sizes' `lr`; norms are not decayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Process groups of this rank; None where it is alone."""

    tp: Group | None
    dp: Group | None
    ep: Group | None
    edp: Group | None
    """Ranks with the same experts."""
    pp: Group | None

    @classmethod
    @cache
    def of(cls, grid: Grid) -> Groups:
        """The groups of the grid, made once. Collective."""
        axes = {"pp": grid.pp, "edp": grid.dp // grid.ep, "ep": grid.ep, "tp": grid.tp}
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        data = mesh["edp", "ep"]._flatten("dp")  # no public name for it in torch 2.13
        groups = {name: mesh.get_group(name) for name in axes} | {"dp": data.get_group()}
        return cls(**{name: own if own.size() > 1 else None for name, own in groups.items()})


class Run:
    """A model on this rank, its optimizer, and the next step. Collective."""

    def __init__(
        self,
        sizes: Sizes,
        grid: Grid,
        *,
        style: Style | None = None,
        zero: bool = False,
        seed: str = "",
        lr: float | None = None,
    ) -> None:
        self.sizes, self.grid, self.groups = sizes, grid, Groups.of(grid)
        share = Share(tp=self.groups.tp, ep=self.groups.ep)
        self.part = RankModel(sizes, grid, dist.get_rank(), share, style=style or Style(), seed=seed)
        self.held, self.at, self.model = self.part.held, self.part.at, self.part.model
        self.optimizer = self._optimizer(lr, zero=zero)
        self.live_optimizer: object = self.optimizer
        if isinstance(self.optimizer, FlatAdamW):
            self.live_optimizer = LiveZero(self.optimizer, self.part.chunks[0])

    def _optimizer(self, lr: float | None, *, zero: bool) -> torch.optim.Optimizer:
        groups = named_groups([(own.name, own.param) for own in self.held])
        options = ADAM | {"lr": lr or self.sizes.lr}
        if not zero:
            return torch.optim.AdamW(groups, **options)
        names = {own.param: own.name for own in self.held}
        return FlatAdamW(groups, group_of=lambda param: self._replicas(names[param]), **options)

    def _replicas(self, name: str) -> Group | None:
        """Ranks that hold the same of a parameter."""
        return self.groups.edp if ".experts." in name else self.groups.dp

    def step(self, at: int) -> float:
        """Take a step; the mean loss of the global batch before it."""
        for own in self.held:
            own.param.grad = torch.zeros_like(own.param)
        total = train(self.part.chunks, list(self._batches(at)), _loss, self.groups.pp)
        self._sum_gradients()
        self.optimizer.step()
        if self.at.tp:
            total.zero_()
        dist.all_reduce(total)
        return float(total)

    def _sum_gradients(self) -> None:
        """Over the ranks that hold the same of a parameter, all in one go."""
        by_ranks: dict[Group | None, list[Tensor]] = {}
        for own in self.held:
            by_ranks.setdefault(self._replicas(own.name), []).append(own.param.grad)
        for ranks, gradients in by_ranks.items():
            if ranks is not None:
                flat = parameters_to_vector(gradients)
                dist.all_reduce(flat, group=ranks)
                vector_to_parameters(flat, gradients)

    def _batches(self, at: int) -> Iterator[Tensor]:
        """Micro-batches of this rank."""
        own = tokens(at).chunk(self.grid.dp)[self.at.dp]
        yield from own.chunk(min(len(own), self.grid.pp))

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Name in the whole model, state, and what this rank holds of it, or its data-parallel peers together."""
        own_states = self.optimizer.states() if isinstance(self.optimizer, FlatAdamW) else self.optimizer.state
        for own in self.held:
            yield own.name, "weight", own.param.detach()
            for state, tensor in own_states[own.param].items():
                yield own.name, "master" if state == "weight" else state, tensor

    def steps(self) -> set[float]:
        """What the optimizer counts."""
        held = self.optimizer.inner if isinstance(self.optimizer, FlatAdamW) else self.optimizer
        return {float(own["step"]) for own in held.state.values()}

    def expected(self, name: str, state: str, whole: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """The part of whole tensors, by state and name, that `states` should give."""
        return self.part.cut(name, whole["weight" if state == "master" else state])


def named_groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, object]]:
    """Two groups of an optimizer: what is decayed, and what is not."""
    decayed = [own for name, own in named if is_decayed(name)]
    others = [own for name, own in named if not is_decayed(name)]
    groups: list[dict[str, object]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _loss(logits: Tensor, rows: Tensor) -> Tensor:
    """A part of the mean over the global batch."""
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum") / (ROWS * SEQUENCE)
