"""What goes into Megatron's files beside tensors, parameter groups and arguments, and what is left out.

Megatron does not load an optimizer without a scheduler's state (checkpointing.py: load_checkpoint). A source of another
framework has none of Megatron's; then one is written that only counts the samples seen, and the run's own values hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from ucp.contract.run_extras import ExtraRow, ExtraTable, ExtraValues
from ucp.core.index import STEP, WEIGHT, Index, Kind
from ucp.core.target import Placement
from ucp.errors import counted
from ucp_formats.megatron.names import MODULES
from ucp_formats.megatron.write.checks import vocabulary_notes
from ucp_formats.megatron.write.groups import OptimizerGroup
from ucp_formats.megatron.write.model import TargetRun

_WITHOUT_RANDOM = "start the run with --no-load-rng, or Megatron stops"
_VERSION = 3.0
"""`checkpoint_version`: the order of rows in fused attention."""


_SCHEDULER = "opt_param_scheduler"
"""Learning rate and weight decay."""
_RANDOM = "rng_state"
"""RNG states of one rank, by its place in the grid (`rng_state/pp1.tp0`): only the same layout can use them."""

_NOT_CARRIED = ExtraRow(is_carried=False)

_EXTRAS: ExtraTable = {
    _SCHEDULER: ExtraRow(),
    "num_floating_point_operations_so_far": ExtraRow(),
    "checkpoint_version": ExtraRow(),
    # arguments of the run, layout of the writer, modules that layers are built of
    "args": _NOT_CARRIED,
    "client_state/args": _NOT_CARRIED,
    "iteration": _NOT_CARRIED,
    "content_metadata": _NOT_CARRIED,
    MODULES: _NOT_CARRIED,
    # other entries of optimizers (gradient scaler, sharding type), of one or of the Nth of a chain
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
    """What all ranks have in common: counts and the scheduler. `samples`: seen in training so far."""
    extras = ExtraValues(index, _EXTRAS)
    carried = [name for name in extras.names() if name in _EXTRAS and _EXTRAS[name].is_carried]
    state = {name: value for name in carried if (value := extras.get(name)) is not None}
    if chain and _SCHEDULER not in state:
        hyper = chain[0][0].hyper
        state[_SCHEDULER] = {  # one that has counted `samples`; whoever loads it overrides the rest
            "max_lr": hyper.get("max_lr", hyper.get("lr")),
            "min_lr": hyper.get("min_lr", 0.0),
            "lr_warmup_steps": 0,
            "lr_decay_steps": max(samples, 1),
            "lr_decay_style": "constant",
            "num_steps": samples,
        }
    return {**state, "iteration": iteration, "checkpoint_version": _VERSION}


def consumed_samples(index: Index, arguments: Mapping[str, object]) -> int | None:
    """Samples that were trained on: as recorded in the arguments, or counted by another framework; None if unknown."""
    recorded = arguments.get("consumed_train_samples")
    if isinstance(recorded, int):
        return recorded
    samples = ExtraValues(index, _EXTRAS).mapping("engine").get("global_samples")  # of DeepSpeed
    return samples if isinstance(samples, int) else None


def extra_notes(run: TargetRun) -> Iterator[str]:
    """What a run has to know of what is written beside tensors; docs/reference/megatron.md has what it refuses."""
    yield from vocabulary_notes(run)
    if run.chain and _SCHEDULER not in {extra.name for extra in run.index.extras}:
        samples = run.arguments.get("consumed_train_samples")
        seen = f"{samples} samples" if samples else "no sample (say so with --set consumed_train_samples=N)"
        yield (
            f"the source has no scheduler of Megatron: one that has seen {seen} is written; start the run with "
            "--override-opt_param-scheduler"
        )


def lost_extras(run: TargetRun) -> Iterator[str]:
    """What of the source's extras is not in the files."""
    extras = ExtraValues(run.index, _EXTRAS)
    names = extras.names()
    if not run.rng_states and any(name.partition("/")[0] == _RANDOM for name in names):
        drawn = _WITHOUT_RANDOM if run.is_legacy else "the run draws new ones, also without --no-load-rng"
        yield f"random states, which belong to the layout of the source: {drawn}"
    if lost := extras.without_place():
        yield f"Megatron's files have no place for these extras: {', '.join(lost)}"
    if any(name.startswith("extra_state/") for name in names):
        yield "states that modules keep of their own (FP8 scales): the run starts them anew"


def lost_states(run: TargetRun, placements: Iterable[Placement]) -> dict[str, frozenset[str]]:
    """Parameter to its states that hold elements and are in no file; steps are in the groups of an optimizer."""
    written = {(place.slice.param, place.slice.state) for place in placements}
    found: dict[str, frozenset[str]] = {}
    for atom, name, state in run.index.states():
        counted_by_group = name == STEP and bool(run.chain)
        if state.numel and (atom.name, name) not in written and not counted_by_group:
            found[atom.name] = found.get(atom.name, frozenset()) | {name}
    return found


def lost_lines(run: TargetRun, lost: Mapping[str, frozenset[str]], placements: Iterable[Placement]) -> tuple[str, ...]:
    """A line for every set of states that are lost, and one for masters that are written as weights alone."""
    alike = Counter(lost.values()).items()
    lines = [f"{', '.join(sorted(states))} of {counted(n, 'parameter')}: {_why(run, states)}" for states, n in alike]
    widest: dict[str, int] = {}
    for own in (place.slice for place in placements if place.slice.state == WEIGHT):
        widest[own.param] = max(widest.get(own.param, 0), own.dtype.itemsize)
    masters = [
        atom.name  # its master is in no file, only the weight that is made of it
        for atom in run.index.atoms.values()
        if atom.kind is Kind.PARAMETER and atom.model_dtype is not None and WEIGHT in atom.states
        if 0 < widest.get(atom.name, 0) < atom.states[WEIGHT].dtype.itemsize
    ]
    if masters:
        lines.append(
            f"masters of {counted(len(masters), 'parameter')}: {_why(run, ())}. Their weights are written in the type "
            "that the model computes in"
        )
    return tuple(lines)


def _why(run: TargetRun, states: Iterable[str]) -> str:
    if WEIGHT in states:
        return "tensors that Megatron does not save"
    if run.chain:
        return "Megatron's optimizer has no place for them"
    if not run.index.groups:
        return (
            "the source records no parameter groups, and without them Megatron loads no optimizer: none is written "
            "(start the run with --no-load-optim)"
        )
    return "no parameter has a moment, and without Megatron loads no optimizer: none is written"
