"""Decide a load: look at the model, the optimizer and the checkpoint; match them. No tensor is read or written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ucp.contract.protocols import SourceOptions
from ucp.conversion.prepare import index_of
from ucp.conversion.source.zero_moments import ZeroMoments, check_moments
from ucp.core.index import DoubtKind, Index, ParamGroup, check_doubts
from ucp.core.tensor import InlineTensor, TensorRef
from ucp.core.topology import Topology
from ucp.errors import LoadError, UnsupportedError, UsageError, listed
from ucp.io.elements import viewed
from ucp.io.files import open_source
from ucp.live.groups import match_groups
from ucp.live.match import Findings, LoadItem, match_states, match_tensors, want_weights
from ucp.live.model import LiveModel, describe_model
from ucp.live.optimizer import Forms, LiveOptimizer, describe_optimizer, forms_of, live_params
from ucp.live.run.ranks import Ranks

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Decision", "check_agreement", "check_topology", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Everything that is to be done."""

    index: Index
    """The checkpoint."""
    model: LiveModel
    """What to load into."""
    optimizer: LiveOptimizer | None
    """What to load states into."""
    wants: tuple[LoadItem, ...]
    """What to bring, state by state: neighbours in a flat source stay neighbours."""
    fresh: tuple[str, ...]
    """Parameters to be left without a state."""
    forms: Mapping[str, Forms]
    """Parameter to the form of the states that the optimizer keeps of it, where known."""
    hyper: tuple[Mapping[str, object], ...]
    """Hyper-parameters to set in each group of the optimizer."""
    findings: Findings
    """What did not fit, and what is worth knowing."""


def decide(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: Path,
    *,
    strict: bool,
    rename: Callable[[str], str] | None,
    zero_moments: ZeroMoments = ZeroMoments.ERROR,
    accept: frozenset[DoubtKind] = frozenset(),
    source: SourceOptions | None = None,
) -> Decision:
    """What to load from `path`. Writes nothing. Raises LoadError, UnsupportedError, SourceError, CoverError.

    `accept`: doubts of the checkpoint to be passed over. `source`: what the user says of it.
    """
    live = describe_model(model)
    stepped = None if optimizer is None else describe_optimizer(optimizer, live)
    index = index_of(path, source=source)
    check_doubts(index, accept)
    if optimizer is not None:
        check_moments(index, zero_moments)
    findings = Findings(notes=[*live.notes, *(f"--accept {doubt.kind}: {doubt.text}" for doubt in index.doubts)])
    matched = match_tensors(live.tensors, index, rename=rename, findings=findings)
    wants = want_weights(live.tensors, matched, index, findings=findings)
    fresh: list[str] = []
    forms: dict[str, Forms] = {}
    hyper: list[dict[str, object]] = []
    if stepped is not None:
        hyper = match_groups(stepped.hyper(matched), _plain_groups(index), findings=findings)
        forms = forms_of(stepped, hyper)
        states, fresh = match_states(live_params(stepped, forms), matched, index, findings=findings)
        wants += states
    if strict:
        findings.check(index.path)
    if not matched and live.tensors:
        raise findings.nothing(index.path)
    order = {state: at for at, state in enumerate(dict.fromkeys(want.state for want in wants))}
    return Decision(
        index=index,
        model=live,
        optimizer=stepped,
        wants=tuple(sorted(wants, key=lambda want: order[want.state])),
        fresh=tuple(fresh),
        forms=forms,
        hyper=tuple(hyper),
        findings=findings,
    )


def check_topology(topology: Topology, ranks: Ranks) -> None:
    """Raise UnsupportedError for sharded targets, UsageError where it is not that of the process group."""
    cut = [
        f"{axis}={getattr(topology, axis)}"
        for axis in ("tp", "pp", "ep", "dp_shard")
        if (getattr(topology, axis) or 1) > 1
    ]
    cut += [f"zero={topology.zero}"] if topology.zero else []
    if cut:
        raise UnsupportedError(
            f"expected a topology with whole parameters and states on every rank; got {', '.join(cut)}. "
            "Sharded targets are not loaded yet: convert for the framework, e.g. `ucp convert --to deepspeed`"
        )
    if topology.dp * topology.cp != ranks.count:
        raise UsageError(
            f"expected a topology of {ranks.count} ranks, as the process group has; got {topology}. "
            "Leave it out, or initialise torch.distributed first"
        )


def check_agreement(ranks: Ranks, decision: Decision, options: object) -> None:
    """Raise LoadError, on all ranks, when they are about to do different things."""
    stepped = decision.optimizer
    marks = {
        "checkpoint": [
            decision.index.step,
            [(os.path.relpath(file.path, decision.index.path), file.nbytes) for file in decision.index.files],
        ],
        "model": decision.model.tensors,
        "optimizer": None if stepped is None else (stepped.groups, decision.hyper),
        "plan": (options, [(want.name, want.slice) for want in decision.wants]),
    }
    digests = {what: xxhash.xxh3_128_hexdigest(repr(value).encode()) for what, value in marks.items()}
    told = ranks.share(digests)
    differing = [
        f"{what} of rank {rank}" for what in digests for rank, own in enumerate(told) if own[what] != told[0][what]
    ]
    if differing:
        raise LoadError(f"expected the same on every rank; these are not those of rank 0:\n{listed(differing)}")


def _plain_groups(index: Index) -> list[ParamGroup]:
    """Parameter groups in which hyper-parameters that were stored as tensors are numbers."""
    return [replace(group, hyper={key: _number(value) for key, value in group.hyper.items()}) for group in index.groups]


def _number(value: object) -> object:
    if isinstance(value, InlineTensor) and value.numel == 1:
        return viewed(memoryview(value.data), value.dtype)[0].item()
    if isinstance(value, TensorRef) and value.numel == 1:
        with open_source(value.path) as file:
            return viewed(memoryview(file.read(value.offset, value.nbytes)), value.dtype)[0].item()
    return value
