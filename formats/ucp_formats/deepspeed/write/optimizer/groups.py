"""The optimizer in the form of DeepSpeed's files: parameter groups, step counts, and checks of missing states.

A flat group has one tensor per state and one step count. A parameter that was never stepped has zeros in that tensor,
as in DeepSpeed's own buffers. Parameters with different step counts cannot share a group. A parameter that was stepped
and whose states are lost also lacks states, but zeros would be wrong for it. Two signs tell it apart: it is in
`Index.lost`, or it has some states and lacks others.

A step is written in a form from which the optimizer can continue (`RunFacts.step_dtype`). `load_checkpoint` of native
files calls the optimizer's `load_state_dict`: torch's optimizers turn a number into a tensor, DeepSpeed's keep the
number. A universal load puts the step into the optimizer unchanged (`base_optimizer.py` and `stage3.py`, 0.19.8). The
next optimizer step then has these outcomes (tried with torch 2.13 and DeepSpeed 0.19.8):

==================== ============================ ============================================
form                 torch (plain, foreach, fused) DeepSpeed's on CPUs (FusedAdam, CPUAdam)
==================== ============================ ============================================
Python int           fails                        continues
Python float         fails                        fails: its C++ takes no float
tensor of int64      foreach and fused fail       continues
tensor of float32    continues                    continues
==================== ============================ ============================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ucp.contract.optimizer import OptimizerPlan, find_missing_states
from ucp.core.gaps import check_weights
from ucp.core.index import STEP, WEIGHT, AtomIndex, Index, Kind
from ucp.core.tensor import DType
from ucp.errors import MissingStateError, UnsupportedError, UsageError, format_count, format_list
from ucp_formats.deepspeed.config import Precision, plain_scaler, read_loss_scale, scaler_object
from ucp_formats.deepspeed.write.run import AtomDraft, RunFacts, is_plain_number

_ONE_EACH = "write stage-0 files (--to deepspeed --topology zero=0): one per parameter"


@dataclass(frozen=True, kw_only=True)  # no slots: cached properties need a __dict__
class Group:
    """One parameter group."""

    params: tuple[AtomIndex, ...]
    """Parameters that the optimizer steps, in its order: trained ones with at least one element."""
    hyper: Mapping[str, object]
    """All entries of the group except its parameters."""
    dtypes: Mapping[str, DType]
    """The weight, and every state with a value per element, to the dtype of its flat tensor."""
    counts: tuple[str, ...]
    """States with one value per parameter."""
    plan: OptimizerPlan = field(repr=False)
    """Knows the values of the counts."""

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Name and number of elements of each parameter."""
        return tuple((atom.name, atom.states[WEIGHT].numel) for atom in self.params)

    @cached_property
    def elementwise(self) -> tuple[str, ...]:
        """States with a value per element, apart from the weight."""
        return tuple(name for name in self.dtypes if name != WEIGHT)

    @cached_property
    def state_names(self) -> tuple[str, ...]:
        """All states except the weight, in the order in which the parameters have them."""
        known = {*self.elementwise, *self.counts}
        return tuple(dict.fromkeys(name for atom in self.params for name in atom.states if name in known))

    @cached_property
    def lacking(self) -> Mapping[str, tuple[str, ...]]:
        """Parameter to the states that it lacks and other parameters of the group have."""
        return find_missing_states({atom.name: atom.states for atom in self.params}, self.state_names)

    @cached_property
    def counters(self) -> Mapping[str, AtomIndex]:
        """Count to a parameter that has the group's value of it. Raises UnsupportedError if values differ."""
        return {state: self.counter(state) for state in self.counts}

    def counter(self, state: str, params: Iterable[str] | None = None) -> AtomIndex:
        """A parameter that has the value of count `state` for `params`, or for the group if none of them has one."""
        atoms = {atom.name: atom for atom in self.params}
        for names in ([] if params is None else [params], [atoms]):
            for members in names:
                name = self.plan.find_common_count(members, state, keeper="stages 1 to 3 keep it", remedy=_ONE_EACH)
                if name is not None:
                    return atoms[name]
        raise KeyError(state)


def is_optimized(atom: AtomIndex) -> bool:
    """Whether DeepSpeed's optimizers update the parameter (`is_optimized_parameter`, runtime/utils.py, 0.19.8)."""
    return atom.kind is Kind.PARAMETER and 0 not in atom.global_shape


def describe_without_groups(index: Index) -> str:
    """What a source without optimizer groups holds: only weights, or states that no optimizer loads without groups."""
    states = ", ".join(dict.fromkeys(name for _, name, _ in index.states() if name != WEIGHT))
    return f"has {states}, but no optimizer groups to load them with" if states else "holds weights only"


def optimizer_groups(facts: RunFacts) -> tuple[Group, ...]:
    """Groups of the source, each with only the parameters that DeepSpeed updates; empty if no parameter is trained.

    Raises MissingStateError for a trained parameter without a group, or without a weight.
    """
    index = facts.index
    if not index.groups:
        return ()
    owned = {name: atom for name, atom in index.atoms.items() if is_optimized(atom)}
    facts.optimizer.check_grouped(owned, remedy="convert from a checkpoint with the whole optimizer")
    check_weights(index)
    # one number per parameter; if a parameter has a single element, only other parameters show that it is a count
    counts = {name for atom in owned.values() for name in atom.states if atom.is_count(name)}
    groups = []
    for group in index.groups:
        params = tuple(owned[name] for name in group.params if name in owned)
        holders: dict[str, list[AtomIndex]] = {WEIGHT: []}
        for atom in params:
            for state in atom.states:
                holders.setdefault(state, []).append(atom)
        single = [n for n, atoms in holders.items() if n in counts and all(a.states[n].numel == 1 for a in atoms)]
        dtypes = {}
        for name, atoms in holders.items():
            seen = {atom.dtype_of(name, facts.dtypes) for atom in atoms}
            if name not in single:  # the common dtype, or the narrowest that holds all values of several dtypes
                widest = DType.FLOAT64 if DType.FLOAT64 in seen else DType.FLOAT32
                dtypes[name] = next(iter(seen)) if len(seen) == 1 else widest
        hyper = {key: value for key, value in group.hyper.items() if key != "params"}
        groups.append(Group(params=params, hyper=hyper, dtypes=dtypes, counts=tuple(single), plan=facts.optimizer))
    return tuple(groups) if any(group.params for group in groups) else ()


def check_flat(groups: Iterable[Group]) -> None:
    """Raise UnsupportedError for states that neither are one number nor have the shape of their parameter."""
    misshapen = [
        f"{atom.name}/{name}: {list(atom.states[name].global_shape)} for a parameter of {list(atom.global_shape)}"
        for group in groups
        for atom in group.params
        for name in group.elementwise
        if name in atom.states and atom.states[name].global_shape != atom.global_shape
    ]
    if misshapen:
        raise UnsupportedError(
            "a flat buffer of DeepSpeed holds only states with the shape of their parameter; "
            f"got\n{format_list(misshapen)}\nWrite stage-0 files (--to deepspeed --topology zero=0)"
        )


def check_stepped(facts: RunFacts, groups: Sequence[Group], *, flat: bool = True) -> None:
    """Raise MissingStateError for parameters that were stepped and lack states, unless the user accepts zeros.

    `flat`: whether missing states would become zeros, because parameters share flat tensors. Otherwise each parameter
    has separate states, and the optimizer initializes those that the user left out.
    """
    if facts.keeps_zeros or not any(group.state_names for group in groups):
        return
    lost, partly = [], []
    for group in groups:
        lacking = group.lacking
        for atom in group.params:
            lacks = lacking.get(atom.name, ())
            loss = facts.index.lost.get(atom.name)
            if loss is not None and (not loss.is_chosen or (flat and lacks)):
                lost.append(atom.name)
            has = [name for name in atom.states if name != WEIGHT]
            missing = [name for name in lacks if name not in group.counts]
            if flat and has and missing:
                partly.append(f"{atom.name}: {', '.join(missing)}, and has {', '.join(has)}")
    reasons = [*facts.index.loss_reasons(lost), *([format_list(partly)] if partly else [])]
    if reasons:
        raise MissingStateError(
            "expected the optimizer states of every parameter that took steps; "
            f"{facts.index.path} lacks some:\n" + "\n".join(reasons) + "\nAdam would resume with zero moments but a "
            "non-zero step. Convert only the weights (--include '*/weight'), so that the optimizer is reinitialized; "
            "or accept zeros (--zero-moments keep)"
        )


def filled_with_zeros(groups: Iterable[Group]) -> dict[str, frozenset[str]]:
    """Parameter to the states that the source lacks and that are written as zeros."""
    return {name: frozenset(states) for group in groups for name, states in group.lacking.items()}


def group_notes(groups: Sequence[Group], *, flat: bool) -> Iterable[str]:
    """Notes on states that the source lacks; `flat`: whether the parameters of a group share flat tensors."""
    missing = [name for group in groups for name in group.lacking]
    if flat and missing:
        yield (
            f"{format_count(len(missing), 'parameter lacks', 'parameters lack')} "
            f"states that others of their group have ({missing[0]}, ...): these are written as zeros, with the group's "
            "step count, as DeepSpeed does for a parameter that was never stepped"
        )
    filled = [group for group in groups if group.params]
    stateless = [str(number) for number, group in enumerate(filled) if not group.state_names]
    if stateless:
        which = "the optimizer" if len(stateless) == len(filled) else f"groups {', '.join(stateless)} of the optimizer"
        yield f"the source has no states of {which}: a run that loads the files initializes them"


def note_step_casts(facts: RunFacts, groups: Iterable[Group]) -> None:
    """Record the steps that are cast to whole numbers, for the plan."""
    for atom in (atom for group in groups for atom in group.params if STEP in atom.states):
        count = facts.optimizer.count(atom.name)
        if count is not None and _is_unpacked(facts, atom) and float(count).is_integer():
            facts.optimizer.note_cast(STEP, atom.states[STEP].dtype, DType.INT64)


def _is_unpacked(facts: RunFacts, atom: AtomIndex) -> bool:
    """Whether the step of a parameter is written as a Python int."""
    return facts.step_dtype is DType.INT64 and (facts.unpacks_steps or is_plain_number(atom, STEP))


def write_count(draft: AtomDraft, facts: RunFacts, atom: AtomIndex, state: str) -> object:
    """A count of one parameter: a Python number, or a 0-d tensor of this file. Raises UsageError for --dtype of it."""
    if state in facts.dtypes:
        raise UsageError(f"{state} must keep the dtype in which DeepSpeed's optimizers count; drop --dtype {state}=...")
    number = facts.optimizer.count(atom.name, state)
    dtype = facts.step_dtype if state == STEP else None
    if dtype is DType.FLOAT32:
        remedy = (
            "Write numbers for an optimizer of DeepSpeed (--set optimizer=deepspeed), or native files (--to deepspeed)"
        )
        facts.optimizer.check_float32(atom.name, state, remedy=remedy)
        return draft.full(atom.name, state, dtype)
    if number is not None and dtype is DType.INT64 and _is_unpacked(facts, atom):
        return int(number) if float(number).is_integer() else number
    return number if is_plain_number(atom, state) else draft.full(atom.name, state, atom.states[state].dtype)


def group_entry(draft: AtomDraft, facts: RunFacts, group: Group, numbers: Iterable[int]) -> dict[object, object]:
    """A parameter group of a torch optimizer; `numbers`: those of its parameters."""
    hyper = draft.copy_extra(dict(group.hyper))
    assert isinstance(hyper, dict)
    # Adam of torch and of Megatron always corrects the bias; FusedAdam and DeepSpeedCPUAdam read the key in each step
    is_foreign_adam = facts.is_foreign and {"betas", "eps"} <= hyper.keys()
    return {**({"bias_correction": True} if is_foreign_adam else {}), **hyper, "params": list(numbers)}


def common_keys(facts: RunFacts, rank: int) -> dict[str, object]:
    """Loss scale and overflow, in the form of stages 1 to 3."""
    scaler, dynamic = plain_scaler(), False
    if facts.precision is Precision.FP16:
        saved = facts.extras.get("loss_scaler", rank)
        scaler, dynamic = scaler_object(saved, facts.config), read_loss_scale(saved, facts.config)["dynamic"] is True
    return {
        "loss_scaler": scaler,
        "dynamic_loss_scale": dynamic,
        "overflow": bool(facts.extras.mapping("optimizer", rank).get("overflow", False)),
    }


def clipping_keys(facts: RunFacts, rank: int) -> dict[str, object]:
    """Norm at which gradients are clipped; empty if the source records none, so that the engine keeps its own."""
    norm = facts.extras.mapping("optimizer", rank).get("clip_grad", facts.config.gradient_clipping)
    return {} if norm is None else {"clip_grad": norm}
