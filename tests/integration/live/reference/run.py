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
from tests.integration.live.reference.grid import Grid, cut
from tests.integration.live.reference.model import Chunk, Share, Style
from tests.integration.live.reference.pipeline import train
from tests.integration.live.reference.sizes import ROWS, SEQUENCE, Sizes, initial, is_decayed, tokens
from tests.integration.live.reference.zero import FlatAdamW

__all__ = ["ADAM", "Run", "named_groups"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter of this rank, and which of the whole model it is part of."""

    name: str
    """With the layer's and the expert's number in the whole model."""
    param: nn.Parameter


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
        self.sizes, self.grid, self.style = sizes, grid, style or Style()
        self.groups = Groups.of(grid)
        at, share = grid.at(dist.get_rank()), Share(tp=self.groups.tp, ep=self.groups.ep)
        self.at, self.numbers = at, grid.layers(sizes.layers, stage=at.pp)
        ends = [(at.pp == run == 0, at.pp == grid.pp - 1 and run == grid.vpp - 1) for run in range(grid.vpp)]
        self.chunks = [
            Chunk(sizes, layers, share, first=first, last=last, style=self.style)
            for layers, (first, last) in zip(self.numbers, ends, strict=True)
        ]
        self.held = list(self._held())
        whole = {"weight": initial(sizes, seed=seed)}
        with torch.no_grad():
            for own in self.held:
                own.param.copy_(self.expected(own.name, "weight", whole))
        self.optimizer = self._optimizer(lr, zero=zero)

    @property
    def model(self) -> nn.Module | list[nn.Module]:
        """What is loaded into."""
        return list(self.chunks) if len(self.chunks) > 1 else self.chunks[0]

    def _held(self) -> Iterator[Held]:
        """Every parameter, under the name that it has in the whole model."""
        each = self.sizes.experts // self.grid.ep
        for chunk, layers in zip(self.chunks, self.numbers, strict=True):
            for name, param in chunk.named_parameters():
                words = name.split(".")
                if self.style.local and words[1] == "layers":
                    words[2] = str(layers[int(words[2])])
                if self.style.local and "experts" in words:
                    words[5] = str(int(words[5]) + self.at.dp % self.grid.ep * each)
                yield Held(name=".".join(words), param=param)

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
        total = train(self.chunks, list(self._batches(at)), _loss, self.groups.pp)
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
        return cut(whole["weight" if state == "master" else state][name], name, rank=self.at.tp, ranks=self.grid.tp)


def named_groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, object]]:
    """Two groups of an optimizer: what is decayed, and what is not."""
    decayed = [own for name, own in named if is_decayed(name)]
    others = [own for name, own in named if not is_decayed(name)]
    groups: list[dict[str, object]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _loss(logits: Tensor, rows: Tensor) -> Tensor:
    """A part of the mean over the global batch."""
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum") / (ROWS * SEQUENCE)
