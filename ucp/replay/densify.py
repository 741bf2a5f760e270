"""Make the states of a sparse window one dense state: replay its iterations on the live model.

1. `find_window` finds the newest links that form a window;
2. the first link is loaded: some operators in full, of the others the weights with which the model computes;
3. the caller's step trains the operators that are complete; the next link then completes some, and gives the others
   the weights of that iteration, until all are complete.

Gradients are those of the run, because every weight is. What depends on the gradients of all operators (the norm that
clips them, whether the loss scaler skips the step) must be known from the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from ucp.chain.merge import LinkIndex
from ucp.chain.window import CLIP_NORM, LR, STEPS, HoldsLinks, find_window, list_full, list_needed, list_views
from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import recognise
from ucp.conversion.option import TopologyLike, type_path
from ucp.core.gaps import check_cover
from ucp.core.index import STEP, WEIGHT, Index
from ucp.core.text.page import Page, Report, facts
from ucp.core.union import state_from_number
from ucp.errors import MissingStateError, UsageError, format_list
from ucp.live.adapters import LiveRequest
from ucp.live.checkpoint import Checkpoint
from ucp.live.load import find_model_device, load_index
from ucp.live.match.decide import Decision
from ucp.live.optimizer.torch_optimizer import unwrap_optimizer
from ucp.live.report import Clock
from ucp.live.resume.beside import ResumeOptions
from ucp.live.resume.values import load_extra
from ucp.live.run.ranks import Ranks, find_ranks, run_together
from ucp.live.run.request import LoadRequest

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

Scalars: TypeAlias = Mapping[str, object]
"""Name to value: what an iteration used and computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DensifyReport(Report):
    """What was replayed."""

    path: str
    """The chain or window."""
    first: int
    """Iteration of the first link of the window."""
    iteration: int
    """Iteration of which the model and the optimizer now hold the whole state."""
    active: tuple[int, ...]
    """For each replayed iteration the number of parameters of this rank that it trained."""

    def as_dict(self) -> dict[str, object]:
        """Everything as JSON values."""
        return {"path": self.path, "first": self.first, "iteration": self.iteration, "active": list(self.active)}

    def page(self) -> Page:
        """What was replayed."""
        yield facts(
            [
                ("dense", f"{self.path}, iteration {self.iteration}"),
                ("window", f"iterations {self.first} to {self.iteration}"),
                ("trained", ", ".join(f"{count} parameters" for count in self.active) or "nothing: no replay needed"),
            ]
        )


def densify(
    chain: type_path,
    step: Callable[[int, frozenset[str], Scalars], object],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer,
    topology: TopologyLike | DeviceMesh | None = None,
    *,
    at: int | None = None,
    scalars: Mapping[int, Scalars] | None = None,
    masters: Mapping[str, torch.Tensor] | None = None,
    scheduler: object = None,
    scaler: object = None,
    rank_extras: Literal["drop", "carry", "replicate"] = "carry",
    keep: bool = False,
    verify: bool = False,
    process_group: ProcessGroup | Ranks | None = None,
) -> DensifyReport:
    """Load the newest window of a chain into a live model, and replay it to the state of one iteration.

    Bit for bit the state of the run, if `step` computes what the run computed. All ranks of the run must call this.

    Parameters
    ----------
    chain
        A chain whose links were saved with `SparseWindow`, or a window of MoEvement.
    step
        The training step. `step(iteration, active, scalars)` does iteration `iteration` of the run with `model` and
        `optimizer`: `active` are the names of parameters (in this rank's model) that are to be trained, the others
        need no gradient (`ucp.replay.frozen`). `scalars` are the extras of the link of that iteration, such as
        `clip_norm`, with which the step clips (`ucp.replay.clip`).
    model, optimizer, topology, masters, scheduler, scaler, process_group, verify
        As for `load_into`. Each link is loaded with the hyper-parameters, buffers and states of that iteration.
    at
        Iteration of the state, at most.
    scalars
        {iteration: {name: value}}: what links do not hold, or in place of what they hold. A window of MoEvement has no
        `clip_norm` and no `lr` (a number, or one for each parameter group).
    rank_extras
        As for `load_into`; "carry" gives each rank its random generators, for dropout.
    keep
        Whether this rank keeps what it holds, because only other pipeline stages failed. Its `step` then has no
        `active` parameters, and sends those stages what it sent them before (`ucp.replay.StageLog`).

    Raises
    ------
    MissingStateError
        There is no whole window, or a number that the replay needs is neither in a link nor in `scalars`. Nothing is
        loaded then.
    UsageError
        `chain` is no chain.
    LoadError, SourceError, CoverError, CorruptError
        As `load_into`.
    """
    ranks = find_ranks(process_group, find_model_device(model))
    request = run_together(
        ranks,
        lambda: LoadRequest.parse(
            topology, chain, rank=ranks.rank, ranks=ranks.count, rank_extras=rank_extras, verify=verify
        ),
    )
    links = run_together(ranks, lambda: _read_window(request.path, at))
    given = scalars or {}
    numbers = run_together(ranks, lambda: _collect_scalars(links, given))
    views = [_count_steps(view, numbers[link.iteration]) for link, view in zip(links, list_views(links), strict=True)]
    live = LiveRequest(
        model=model, optimizer=unwrap_optimizer(optimizer), mesh=request.mesh, ranks=ranks, masters=masters
    )
    resume = ResumeOptions(scheduler=scheduler, scaler=scaler, policy=request.rank_extras)
    if keep:
        resume, request = (
            ResumeOptions(),
            replace(request, options=replace(request.options, kept=frozenset(views[0].atoms))),
        )
    objects = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "masters": masters}
    decision, _ = load_index(live, request, resume, objects, clock=Clock(), saved=views[0])
    params = [(item.name, item.slice.param) for item in decision.items if item.state == WEIGHT]
    complete = list_full(links[0])
    counts = []
    for link, view in zip(links[1:], views[1:], strict=True):
        active = frozenset(name for name, param in params if param in complete)
        if not keep:
            _set_learning_rate(decision, numbers[link.iteration])
        step(link.iteration, active, numbers[link.iteration])
        counts.append(len(active))
        rest = replace(request, options=replace(request.options, kept=request.options.kept | complete))
        decision, _ = load_index(live, rest, resume, objects, clock=Clock(), saved=view)
        complete |= list_full(link)
    return DensifyReport(
        path=str(request.path), first=links[0].iteration, iteration=links[-1].iteration, active=tuple(counts)
    )


def _read_window(path: Path, at: int | None) -> tuple[LinkIndex, ...]:
    """The links of the newest window. Raises UsageError, SourceError, MissingStateError, CoverError."""
    fmt, evidence = recognise(path, options=SourceOptions(at=at))
    if not isinstance(fmt, HoldsLinks):
        raise UsageError(
            f"expected a chain with links of a sparse window, or a window of MoEvement; {path} is read as {fmt.name} "
            f"({evidence.reasons[0]}): load it with load_into"
        )
    links = find_window(fmt.read_links(path), path=str(path))
    for link in links:
        check_cover(link.index)
    return links


def _collect_scalars(links: Sequence[LinkIndex], given: Mapping[int, Scalars]) -> dict[int, dict[str, object]]:
    """Iteration to what is known of it. Raises MissingStateError with everything that a replay lacks."""
    collected, lacking = {}, []
    for number, link in enumerate(links):
        checkpoint = Checkpoint(link.index)
        extras = [extra for extra in link.index.extras if extra.rank is None]
        known = {extra.name: load_extra(extra, checkpoint.tensor) for extra in extras}
        known |= given.get(link.iteration, {})
        needed = list_needed([extra.name for extra in extras]) if number else []
        if number and any(LR not in group.hyper for group in links[number - 1].index.groups):
            needed.append(LR)
        if any("exp_avg" in atom.states and STEP not in atom.states for atom in link.index.atoms.values()):
            needed.append(STEPS)
        missing = [name for name in needed if name not in known]
        lacking += [f"iteration {link.iteration}: {', '.join(missing)}"] if missing else []
        collected[link.iteration] = known
    if lacking:
        raise MissingStateError(
            f"expected the numbers that a replay of the window cannot compute; its links lack\n{format_list(lacking)}\n"
            f"Pass them as the run had them: scalars={{iteration: {{name: value}}}} ({CLIP_NORM}=None if it did not "
            "clip gradients)"
        )
    return collected


def _count_steps(view: Index, numbers: Scalars) -> Index:
    """The index, with the given step counts of optimizer states that have none."""
    count = numbers.get(STEPS)
    if not isinstance(count, int | float):
        return view
    state = state_from_number(float(count))
    atoms = {
        name: replace(atom, states={**atom.states, STEP: state})
        if "exp_avg" in atom.states and STEP not in atom.states
        else atom
        for name, atom in view.atoms.items()
    }
    return replace(view, atoms=atoms)


def _set_learning_rate(decision: Decision, numbers: Scalars) -> None:
    """Set the learning rate of the iteration, if the caller or the link names it."""
    rate, optimizer = numbers.get(LR), decision.run.optimizer
    if rate is None or optimizer is None:
        return
    rates = list(rate) if isinstance(rate, list | tuple) else [rate] * len(optimizer.groups())
    optimizer.put_hyper([{LR: value} for value in rates])
