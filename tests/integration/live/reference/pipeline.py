"""A pipeline by hand: all micro-batches forward through one run of layers after another, then all of them back.

With one run a stage it is GPipe; with several, the interleaved schedule that goes breadth first. Hidden states and
their gradients go from stage to stage point to point; stage 0 follows the last one from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integration.live.reference.collectives import Group
from tests.integration.live.reference.sizes import SEQUENCE


def train(
    runs: Sequence[nn.Module], batches: Sequence[Tensor], loss: Callable[[Tensor, Tensor], Tensor], stages: Group | None
) -> Tensor:
    """Add the gradients of all micro-batches; the sum of the losses, 0 but on the last stage."""
    total = torch.zeros(())
    neighbours = _Neighbours(stages)
    passed: list[list[tuple[Tensor, Tensor]]] = []
    for run in runs:
        passed.append([_forward(run, rows, neighbours) for rows in batches])
    for number in reversed(range(len(runs))):
        run = runs[number]
        for (given, made), rows in zip(passed[number], batches, strict=True):
            if run.last:
                own = loss(made, rows)
                own.backward()
                total += own.detach()
            else:
                made.backward(neighbours.receive(made, back=True))
            if not run.first:
                neighbours.send(given.grad, back=True)
    neighbours.finish()
    return total


def _forward(run: nn.Module, rows: Tensor, neighbours: _Neighbours) -> tuple[Tensor, Tensor]:
    """What a run of layers got and made of a micro-batch."""
    given = rows[:, :-1]
    if not run.first:
        given = neighbours.receive(torch.empty(len(rows), SEQUENCE, run.hidden)).requires_grad_()
    made = run(given)
    if not run.last:
        neighbours.send(made.detach())
    return given, made


class _Neighbours:
    """The stages before and after this one, in a ring."""

    def __init__(self, stages: Group | None) -> None:
        self.stages = stages
        self.under_way: list[tuple[dist.Work, Tensor]] = []

    def send(self, own: Tensor, *, back: bool = False) -> None:
        """Send without waiting: the next stage may be busy with what this one is to receive."""
        own = own.contiguous()
        self.under_way.append((dist.isend(own, self._rank(-1 if back else 1), group=self.stages), own))

    def receive(self, like: Tensor, *, back: bool = False) -> Tensor:
        """A tensor like `like`, once it is there."""
        found = torch.empty_like(like)
        dist.recv(found, self._rank(1 if back else -1), group=self.stages)
        return found

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for work, _ in self.under_way:
            work.wait()

    def _rank(self, away: int) -> int:
        return dist.get_global_rank(self.stages, (self.stages.rank() + away) % self.stages.size())
