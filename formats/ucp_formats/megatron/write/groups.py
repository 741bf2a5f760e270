"""The optimizers of a run of Megatron and their parameter groups, made from the groups of any source.

Megatron finds a saved group again by what sets it apart (`wd_mult`, `lr_mult`, `is_expert_parallel`, ...), not by its
place (optimizer.py: param_group_identifier_keys). With more than one expert-parallel rank experts have an optimizer of
their own, second in a chain; without, they are parameters like others. So groups are split and joined here as the
expert-parallel degree asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from struct import unpack

from ucp.contract.rank_extras import Checksums
from ucp.core.dtypes import DType
from ucp.core.index import AtomIndex, Index, ParamGroup
from ucp.core.names import STEP, WEIGHT
from ucp.core.tensor import InlineTensor, Tensor, TensorRef
from ucp.errors import MissingStateError, UnsupportedError, counted, listed
from ucp.transfer.probe import Prober, cast_bits

__all__ = ["OptimizerGroup", "check_members", "optimizer_chain"]

_EXPERT = "is_expert_parallel"
_FROM_RUN = {"params", "step", "param_names"}
"""Keys that are no hyper-parameters: they come from the states."""


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
    index: Index, experts: frozenset[str], *, split: bool
) -> tuple[tuple[tuple[OptimizerGroup, ...], ...], tuple[str, ...]]:
    """Groups of each optimizer of the chain, and what was assumed, for the user.

    Parameters
    ----------
    index
        The source.
    experts
        Names of the atoms that are parameters of experts.
    split
        Whether experts have an optimizer of their own (more than one expert-parallel rank).

    Raises
    ------
    UnsupportedError
        Parameters of a group counted different steps.
    """
    if not index.groups:
        return (), ()
    native = all("wd_mult" in group.hyper or "pre_wd_mult" in group.hyper for group in index.groups)
    merged = _merged(index.groups if native else [_translated(group) for group in index.groups])
    notes = () if native else _translation_notes(index)
    if not native:
        merged = _with_both_decays(merged)
    with Prober() as prober:
        steps = [_step(index, group, prober, exact=native) for group in merged]
    overall = next((step for step in steps if step is not None), None)
    steps = [overall if step is None else step for step in steps]
    counts = not native or not any(isinstance(step, float) for step in steps)
    each = not native or not counts
    kinds = {"counts": counts, "each": each}
    dense = _part(merged, steps, keep=lambda name: not (split and name in experts), expert=False, **kinds)
    if not split:
        return (dense,), notes
    own = _part(merged, steps, keep=lambda name: name in experts, expert=True, **kinds)
    return (dense, tuple(group for group in own if group.params)), notes


def check_members(index: Index, params: Collection[str], *, remedy: str) -> None:
    """Raise MissingStateError for trained parameters among `params` that are in no group of the source.

    For files that list the parameters of a group, or have an optimizer of experts alone: these would lose their states.
    `remedy`: files that do not.
    """
    grouped = {name for group in index.groups for name in group.params}
    lost = [
        name
        for name in params
        if name in index.atoms and name not in grouped and index.atoms[name].states.keys() - {WEIGHT}
    ]
    if lost:
        reasons = index.reasons(lost) or (listed(lost),)
        raise MissingStateError(
            f"expected every trained parameter in an optimizer group, as these files record it; {index.path} has "
            f"{counted(len(lost), 'parameter')} in none:\n" + "\n".join(reasons) + f"\n{remedy}"
        )


def _part(
    groups: Sequence[ParamGroup],
    steps: Sequence[int | float | None],
    *,
    keep: Callable[[str], bool],
    expert: bool,
    counts: bool,
    each: bool,
) -> tuple[OptimizerGroup, ...]:
    return tuple(
        OptimizerGroup(
            params=tuple(name for name in group.params if keep(name)),
            hyper={**{key: value for key, value in group.hyper.items() if key not in _FROM_RUN}, _EXPERT: expert},
            step=step,
            counts=counts,
            each=each,
        )
        for group, step in zip(groups, steps, strict=True)
    )


def _merged(groups: Iterable[ParamGroup]) -> list[ParamGroup]:
    """Groups that differ in nothing but whether they hold experts are one; decayed ones come first."""
    found: list[ParamGroup] = []
    kept: list[dict[str, object]] = []
    same = Checksums(()).same
    for group in groups:
        hyper = {key: value for key, value in group.hyper.items() if key not in _FROM_RUN and key != _EXPERT}
        step = {"step": group.hyper["step"]} if "step" in group.hyper else {}
        at = next((at for at, own in enumerate(kept) if same(own, hyper)), None)
        if at is None:
            kept.append(hyper)
            found.append(ParamGroup(params=group.params, hyper={**hyper, **step}))
        else:
            found[at] = ParamGroup(params=(*found[at].params, *group.params), hyper=found[at].hyper)
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
    hyper = {key: value for key, value in group.hyper.items() if key not in _FROM_RUN}
    step = {"step": group.hyper["step"]} if isinstance(group.hyper.get("step"), int | float) else {}
    return ParamGroup(params=group.params, hyper={**apart, **hyper, **step})


def _with_both_decays(groups: list[ParamGroup]) -> list[ParamGroup]:
    """Groups with and without weight decay: Megatron's optimizer asks for both."""
    present = {group.hyper["wd_mult"] for group in groups}
    lacking = [mult for mult in (1.0, 0.0) if mult not in present]
    extra = [ParamGroup(params=(), hyper={**groups[0].hyper, "wd_mult": mult}) for mult in lacking]
    return sorted([*groups, *extra], key=lambda group: not group.hyper["wd_mult"])


def _translation_notes(index: Index) -> tuple[str, ...]:
    note = (
        f"the parameter groups of {index.format} are written in Megatron's terms: a run applies its own rule for which "
        "parameters decay (all but biases and vectors); megatron-core 0.19 finds groups by --lr and --min-lr as well, "
        "which have to be those of the source"
    )
    return (note,)


def _step(index: Index, group: ParamGroup, prober: Prober, *, exact: bool) -> int | float | None:
    """Steps that all parameters of a group have taken; `exact`: in the source's own type, else a whole number.

    Apex's and Transformer Engine's Adam take nothing but a whole number.
    """
    counts: dict[int | float, str] = {}
    for name in group.params:
        atom = index.atoms.get(name)
        if atom is not None and STEP in atom.states:
            counts.setdefault(_number(_only(atom), prober), name)
    if len(counts) > 1:
        raise UnsupportedError(
            "expected one step count for all parameters of an optimizer group, as Megatron keeps it; got\n"
            f"{listed(f'{name}: {count}' for count, name in counts.items())}\n"
            "convert to atoms or to stage-0 files of DeepSpeed, which keep one per parameter"
        )
    recorded = group.hyper.get("step")
    found = next(iter(counts), recorded if isinstance(recorded, int | float) else None)
    return found if exact or found is None or not float(found).is_integer() else int(found)


def _only(atom: AtomIndex) -> Tensor:
    return atom.states[STEP].fragments[0].ref


def _number(ref: Tensor, prober: Prober) -> int | float:
    """The value of a 0-d tensor, a few bytes that say how the optimizer stands."""
    if isinstance(ref, TensorRef) and ref.codec:
        raise UnsupportedError(
            f"expected the step count as plain bytes; got one compressed with {ref.codec} in {ref.path}. "
            "Convert to atoms without --compress first"
        )
    data = ref.data if isinstance(ref, InlineTensor) else prober.window(ref, 0, 1)
    if not ref.dtype.is_floating:
        return int.from_bytes(data, "little", signed=not ref.dtype.value.startswith("u"))
    wide = cast_bits(data, ref.dtype, DType.FLOAT64)
    return float(unpack("<d", wide)[0])
