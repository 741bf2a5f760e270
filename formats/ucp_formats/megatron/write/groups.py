"""The optimizers of a run of Megatron and their parameter groups, made from the groups of any source.

Megatron finds a saved group again by what sets it apart (`wd_mult`, `lr_mult`, `is_expert_parallel`, ...), not by its
place (optimizer.py: param_group_identifier_keys). With more than one expert-parallel rank experts have an optimizer of
their own, second in a chain; without, they are parameters like others. So groups are split and joined here as the
expert-parallel degree asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ucp.contract.optimizer import OptimizerPlan
from ucp.contract.ranks import Checksums
from ucp.core.index import STEP, Index, Kind, ParamGroup
from ucp.core.tensor import DType

_EXPERT = "is_expert_parallel"
_FROM_RUN = {"params", "step", "param_names"}
"""Keys that are no hyper-parameters: they come from the states."""
_TRANSLATED = (
    "the parameter groups of {format} are written in Megatron's terms: a run applies its own rule for which "
    "parameters decay (all but biases and vectors); megatron-core 0.19 finds groups by --lr and --min-lr as well, "
    "which have to be those of the source"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """One parameter group of one optimizer."""

    params: tuple[str, ...]
    """Names of its atoms, in no particular order."""
    hyper: Mapping[str, object]
    """Hyper-parameters and what sets it apart."""
    step: int | float | None
    """Steps taken, the same for all its parameters; None where the source has no count."""
    counts: bool = True
    """Whether a group counts, in whole numbers, as Apex's and Transformer Engine's Adam do; torch's counts in float."""
    each: bool = False
    """Whether every parameter has the count too, where the optimizer is not distributed: torch's Adam looks for it."""

    def entry(self) -> dict[str, object]:
        """As Megatron saves it, without its parameters."""
        return dict(self.hyper) if self.step is None else {**self.hyper, "step": self.step}


def optimizer_chain(
    index: Index, experts: frozenset[str], optimizer: OptimizerPlan, *, split: bool
) -> tuple[tuple[tuple[OptimizerGroup, ...], ...], tuple[str, ...]]:
    """Groups of each optimizer of the chain, and what was assumed, for the user.

    Parameters
    ----------
    index
        The source.
    experts
        Names of the atoms that are parameters of experts.
    optimizer
        Its counts; casts of the steps are noted there.
    split
        Whether experts have an optimizer of their own (more than one expert-parallel rank).

    Raises
    ------
    UnsupportedError
        Parameters of a group counted different steps.
    """
    if not index.groups:
        return (), ()
    native = is_native(index)
    # Megatron has those with `requires_grad` (core/optimizer/__init__.py, _get_param_groups)
    trained = {name for name, atom in index.atoms.items() if atom.kind is not Kind.FROZEN}
    groups = [replace(group, params=tuple(n for n in group.params if n in trained)) for group in index.groups]
    merged = _merged(groups if native else map(_translated, groups))
    if not native:
        lacking = {1.0, 0.0} - {group.hyper["wd_mult"] for group in merged}  # Megatron's optimizer asks for both
        merged += [ParamGroup(params=(), hyper={**merged[0].hyper, "wd_mult": mult}) for mult in lacking]
        merged.sort(key=lambda group: not group.hyper["wd_mult"])
    steps = [_step(index, group, optimizer, exact=native) for group in merged]
    overall = next((step for step in steps if step is not None), None)
    counts = not native or not any(isinstance(step, float) for step in steps)

    def part(*, experts_alone: bool | None) -> tuple[OptimizerGroup, ...]:
        return tuple(
            OptimizerGroup(
                params=tuple(own for own in group.params if experts_alone in (None, own in experts)),
                hyper={**_settings(group), _EXPERT: bool(experts_alone)},
                step=overall if step is None else step,
                counts=counts,
                each=not native or not counts,
            )
            for group, step in zip(merged, steps, strict=True)
        )

    notes = () if native else (_TRANSLATED.format(format=index.format),)
    if not split:
        return (part(experts_alone=None),), notes
    return (part(experts_alone=False), tuple(own for own in part(experts_alone=True) if own.params)), notes


def is_native(index: Index) -> bool:
    """Whether the groups are in Megatron's terms."""
    return all("wd_mult" in group.hyper or "pre_wd_mult" in group.hyper for group in index.groups)


def _settings(group: ParamGroup) -> dict[str, object]:
    """Hyper-parameters of a group, however it is cut."""
    return {key: value for key, value in group.hyper.items() if key not in _FROM_RUN and key != _EXPERT}


def _merged(groups: Iterable[ParamGroup]) -> list[ParamGroup]:
    """Groups that differ in nothing but whether they hold experts are one; decayed ones come first."""
    found: list[ParamGroup] = []
    same = Checksums(()).is_same
    for group in groups:
        at = next((at for at, own in enumerate(found) if same(_settings(own), _settings(group))), None)
        if at is None:
            found.append(group)
        else:
            found[at] = replace(found[at], params=(*found[at].params, *group.params))
    return sorted(found, key=lambda group: not group.hyper.get("wd_mult", group.hyper.get("pre_wd_mult")))


def _translated(group: ParamGroup) -> ParamGroup:
    """A group of another framework in Megatron's terms."""
    decay = group.hyper.get("weight_decay", 0.0)
    lr = group.hyper.get("lr")
    apart: dict[str, object] = {
        "wd_mult": 1.0 if decay else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": group.hyper.get("initial_lr", lr),
        "min_lr": 0.0,
    }
    return replace(group, hyper={**apart, **group.hyper})


def _step(index: Index, group: ParamGroup, optimizer: OptimizerPlan, *, exact: bool) -> int | float | None:
    """Steps that all parameters of a group have taken; `exact`: in the source's own type, else a whole number.

    Apex's and Transformer Engine's Adam take nothing but a whole number.
    """
    remedy = "convert to atoms or to stage-0 files of DeepSpeed, which keep one per parameter"
    first = optimizer.find_common_count(group.params, keeper="Megatron keeps it", remedy=remedy)
    recorded = group.hyper.get("step")
    step = recorded if isinstance(recorded, int | float) else None
    step = step if first is None else optimizer.count(first)
    if step is not None and not exact and float(step).is_integer():
        step = int(step)
    for name in group.params:
        if optimizer.count(name) is not None:
            written = DType.FLOAT64 if isinstance(step, float) else DType.INT64
            optimizer.note_cast(STEP, index.atoms[name].states[STEP].dtype, written)
    return step
