"""Extras in Megatron's files (scheduler, counts), and messages about extras and states that are dropped.

Megatron does not load an optimizer without a scheduler state (checkpointing.py: load_checkpoint). For a source of
another framework a scheduler state is written that only counts samples; its other values come from the run's options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from ucp.contract.run_extras import ExtraRow, ExtraTable, ExtraValues
from ucp.core.index import STEP, WEIGHT, Index, Kind
from ucp.core.target import Placement
from ucp.errors import format_count
from ucp_formats.megatron.names import MODULES
from ucp_formats.megatron.write.checks import vocabulary_notes
from ucp_formats.megatron.write.groups import OptimizerGroup
from ucp_formats.megatron.write.model import TargetRun

_VERSION = 3.0
"""`checkpoint_version`: the order of rows in fused attention."""
_SCHEDULER = "opt_param_scheduler"
"""Learning rate and weight decay."""
_RANDOM = "rng_state"
"""RNG states of one rank, by its place in the grid (`rng_state/pp1.tp0`): only the same topology can use them."""
_NOT_CARRIED = ExtraRow(is_carried=False)

_EXTRAS: ExtraTable = {
    _SCHEDULER: ExtraRow(),
    "num_floating_point_operations_so_far": ExtraRow(),
    "checkpoint_version": ExtraRow(),
    # arguments of the run, layout of the writer, modules of the layers
    "args": _NOT_CARRIED,
    "client_state/args": _NOT_CARRIED,
    "iteration": _NOT_CARRIED,
    "content_metadata": _NOT_CARRIED,
    MODULES: _NOT_CARRIED,
    # other entries of an optimizer, or of the Nth of a chain: gradient scaler, sharding type
    "optimizer": _NOT_CARRIED,
    "optimizer/": _NOT_CARRIED,
    # `_extra_state` of modules
    "extra_state/": _NOT_CARRIED,
    _RANDOM: _NOT_CARRIED,
    f"{_RANDOM}/": _NOT_CARRIED,
    # has no meaning in another run; Megatron starts without it
    "rerun_state_machine": _NOT_CARRIED,
    "rerun_state_machine/": _NOT_CARRIED,
    "rerun_state_machine_state": _NOT_CARRIED,
    "rerun_state_machine_state/": _NOT_CARRIED,
}


def common_state(
    index: Index, chain: tuple[tuple[OptimizerGroup, ...], ...], *, iteration: int, samples: int
) -> dict[str, object]:
    """Counts and scheduler state, equal on all ranks. `samples`: seen in training so far."""
    extras = ExtraValues(index, _EXTRAS)
    carried = [name for name in extras.names() if name in _EXTRAS and _EXTRAS[name].is_carried]
    state = {name: value for name in carried if (value := extras.get(name)) is not None}
    if chain and _SCHEDULER not in state:
        hyper = chain[0][0].hyper
        state[_SCHEDULER] = {  # only counts samples: the run overrides the other values
            "max_lr": hyper.get("max_lr", hyper.get("lr")),
            "min_lr": hyper.get("min_lr", 0.0),
            "lr_warmup_steps": 0,
            "lr_decay_steps": max(samples, 1),
            "lr_decay_style": "constant",
            "num_steps": samples,
        }
    return {**state, "iteration": iteration, "checkpoint_version": _VERSION}


def consumed_samples(index: Index, arguments: Mapping[str, object]) -> int | None:
    """Samples seen in training, from the arguments or the engine state of DeepSpeed; None if unknown."""
    samples = arguments.get("consumed_train_samples")
    if not isinstance(samples, int):
        samples = ExtraValues(index, _EXTRAS).mapping("engine").get("global_samples")
    return samples if isinstance(samples, int) else None


def extra_notes(run: TargetRun) -> Iterator[str]:
    """Notes on options that the run needs."""
    yield from vocabulary_notes(run)
    if run.chain and _SCHEDULER not in {extra.name for extra in run.index.extras}:
        samples = run.arguments.get("consumed_train_samples")
        count = f"{samples} samples" if samples else "no samples (set them with --set consumed_train_samples=N)"
        yield (
            f"the source has no scheduler state of Megatron: one that has counted {count} is written; start the run "
            "with --override-opt_param-scheduler"
        )


def lost_extras(run: TargetRun) -> Iterator[str]:
    """Lines about extras of the source that are dropped."""
    extras = ExtraValues(run.index, _EXTRAS)
    names = extras.names()
    if not run.rng_states and any(name.partition("/")[0] == _RANDOM for name in names):
        remedy = "start the run with --no-load-rng, or Megatron stops"
        remedy = remedy if run.is_legacy else "the run seeds new ones, even without --no-load-rng"
        yield f"RNG states, which only fit the topology of the source: {remedy}"
    if lost := extras.without_place():
        yield f"Megatron's files have no place for these extras: {', '.join(lost)}"
    if any(name.startswith("extra_state/") for name in names):
        yield "extra states of modules (FP8 scales): the run reinitializes them"


def lost_states(run: TargetRun, placements: Iterable[Placement]) -> dict[str, frozenset[str]]:
    """Parameter to its states that are not written; a step counts as written if its optimizer's group has one."""
    written = {(placement.slice.param, placement.slice.state) for placement in placements}
    lost: dict[str, frozenset[str]] = {}
    for atom, name, state in run.index.states():
        is_in_group = name == STEP and bool(run.chain)
        if state.numel and (atom.name, name) not in written and not is_in_group:
            lost[atom.name] = lost.get(atom.name, frozenset()) | {name}
    return lost


def lost_lines(run: TargetRun, lost: Mapping[str, frozenset[str]], placements: Iterable[Placement]) -> tuple[str, ...]:
    """A line for every set of lost states, and one for masters that are written as weights only."""
    counts = Counter(lost.values()).items()
    lines = [
        f"{', '.join(sorted(states))} of {format_count(n, 'parameter')}: {_reason(run, states)}" for states, n in counts
    ]
    widest: dict[str, int] = {}
    for piece in (placement.slice for placement in placements if placement.slice.state == WEIGHT):
        widest[piece.param] = max(widest.get(piece.param, 0), piece.dtype.itemsize)
    masters = [
        atom.name  # its master is not written, only the weight cast from it
        for atom in run.index.atoms.values()
        if atom.kind is Kind.PARAMETER and atom.model_dtype is not None and WEIGHT in atom.states
        if 0 < widest.get(atom.name, 0) < atom.states[WEIGHT].dtype.itemsize
    ]
    if masters:
        lines.append(
            f"masters of {format_count(len(masters), 'parameter')}: {_reason(run, ())}. Their weights are written in "
            "the type that the model computes in"
        )
    return tuple(lines)


def _reason(run: TargetRun, states: Iterable[str]) -> str:
    if WEIGHT in states:
        return "tensors that Megatron does not save"
    if run.chain:
        return "Megatron's optimizer has no place for them"
    if not run.index.groups:
        return (
            "the source records no parameter groups, and without them Megatron loads no optimizer: none is written "
            "(start the run with --no-load-optim)"
        )
    return "no parameter has a moment, and Megatron loads no optimizer without moments: none is written"
