"""An optimizer for a source that has none: moments of zero, a step of 0, one parameter group.

A published model holds weights only, but a run of DeepSpeed or Megatron resumes from weights and optimizer. Adam starts
with moments of zero, so these are what a run would have saved before its first step. The index stores them as a single
zero that stands for all elements.

Loaders take the hyper-parameters of a group from the checkpoint, so they must be given: with `--set`, or else those of
torch's AdamW by default. A note lists them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import StrEnum

from ucp.core.index import STEP, WEIGHT, AtomIndex, Fragment, Index, Kind, ParamGroup, StateIndex
from ucp.core.region import Box
from ucp.core.tensor import DType, InlineTensor
from ucp.core.union import state_from_number
from ucp.errors import UsageError, format_count

HYPER: Mapping[str, float] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
"""Setting to the default of torch's AdamW (torch 2.13, optim/adamw.py)."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class NewOptimizer(StrEnum):
    """What to make for a source without optimizer states."""

    ZERO = "zero"
    """Moments of zero, as Adam starts."""


def add_optimizer(index: Index, settings: Mapping[str, str]) -> Index:
    """`index` with moments of zero for every trained parameter. Raises UsageError if it has optimizer states.

    `settings`: texts that the user gave; those in `HYPER` are for the new group.
    """
    existing = dict.fromkeys(name for _, name, _ in index.states() if name != WEIGHT)
    if existing:
        raise UsageError(
            f"expected a source without optimizer states (--optimizer zero); {index.path} has {', '.join(existing)}: "
            "drop --optimizer, or leave them out to start from zero (--include '*/weight')"
        )
    atoms = dict(index.atoms)
    for name, atom in index.atoms.items():
        if atom.kind is Kind.PARAMETER and (weight := atom.states[WEIGHT]).dtype.is_floating and weight.numel:
            atoms[name] = _add_zero_moments(atom)
    params = tuple(name for name, atom in atoms.items() if STEP in atom.states)
    if index.groups:  # of a source whose states were left out
        ignored = [name for name in HYPER if name in settings]
        if ignored:
            raise UsageError(
                f"{index.path} has optimizer groups with hyper-parameters of their own: drop --set {ignored[0]}"
            )
        stepless = ({key: value for key, value in group.hyper.items() if key != STEP} for group in index.groups)
        groups = tuple(replace(group, hyper=hyper) for group, hyper in zip(index.groups, stepless, strict=True))
        description = "the groups of the source"
    else:
        groups, description = _make_group(params, settings)
    note = (
        f"an optimizer was made (--optimizer zero): moments of zero and a step of 0 for "
        f"{format_count(len(params), 'trained parameter', 'trained parameters')}, in {description}"
    )
    return replace(index, atoms=atoms, groups=groups, notes=(*index.notes, note))


def _make_group(params: tuple[str, ...], settings: Mapping[str, str]) -> tuple[tuple[ParamGroup, ...], str]:
    """One group, and its description for a note."""
    hyper = {
        name: _parse_hyper(name, settings[name]) if name in settings else default for name, default in HYPER.items()
    }
    values = ", ".join(f"{name}={value:g}" for name, value in hyper.items())
    betas = hyper.pop("beta1"), hyper.pop("beta2")
    description = (
        f"one group with {values}. A run that loads it takes these from the checkpoint unless it has a schedule of its "
        "own; --set changes them"
    )
    return (ParamGroup(params=params, hyper={**hyper, "betas": betas}),), description


def drop_hyper(settings: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Settings for the target; those of the new group only if the target takes them, too."""
    return {name: value for name, value in settings.items() if name not in HYPER or name in known}


def _parse_hyper(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < (1 if name.startswith("beta") else float("inf")):
        raise UsageError(
            f"expected {name} of the new optimizer as a number, as in --set {name}={HYPER[name]:g}; got {text}"
        )
    return value


def _add_zero_moments(atom: AtomIndex) -> AtomIndex:
    shape = atom.global_shape
    zero = InlineTensor(data=bytes(DType.FLOAT32.itemsize), dtype=DType.FLOAT32, shape=shape, repeats=True)
    piece = Fragment(box=Box.full(shape), ref=zero)
    moment = StateIndex(dtype=DType.FLOAT32, global_shape=shape, fragments=(piece,))
    return replace(atom, states={**atom.states, **dict.fromkeys(_MOMENTS, moment), STEP: state_from_number(0)})
