"""What a rank holds of the states of a run: facts that all ranks share, and the tensors behind them.

The model and the optimizer are described as for a load (`ucp.live`); where a part lies in the global tensor is computed
by `place` from its layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ucp.core.index import STEP, WEIGHT, Kind, ParamGroup
from ucp.core.layout import Layout, PlacedBox, RankShard, locate_shard, place
from ucp.core.tensor import DType, InlineTensor
from ucp.core.union import state_from_number
from ucp.errors import UnsupportedError
from ucp.live.adapters import LiveRun, ReadableOptimizer
from ucp.live.match.decide import globalize
from ucp.live.model.dtensor import dtensor_part, is_dtensor, local_of
from ucp.live.model.module import dtype_of
from ucp.live.parts import LiveParam, LivePart, LiveTensor
from ucp.saving.plan import SaveItem

if TYPE_CHECKING:
    import torch
    from torch import nn

COMPUTED = "compute_weight"
"""State of a parameter that has a master: the weight with which the model computes, for sparse saves."""
_SAMPLE = 8
"""Elements by which replicas are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """What a rank says of a state, besides its elements."""

    shape: tuple[int, ...]
    """Elements per dim of the global tensor."""
    dtype: DType
    """Dtype."""
    layout: Layout = field(default_factory=Layout)
    """Its layout over the ranks."""
    value: InlineTensor | None = None
    """Its value, if that is a count or has no elements: the same on all ranks."""
    sample: bytes = b""
    """First elements, if the rank holds all of a parameter's state: replicas that differ are noticed by them."""

    def fits(self, other: StateFacts) -> bool:
        """Whether both can be of one state. Stages with a tied parameter may partition it at other elements (ZeRO)."""
        return self == replace(other, layout=Layout(other.layout.axes, self.layout.flat))


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomFacts:
    """What a rank says of a parameter or buffer."""

    kind: Kind
    """Trained, frozen or a buffer."""
    shape: tuple[int, ...]
    """Elements per dim of the global tensor."""
    aliases: tuple[str, ...] = ()
    """Names that are tied to it."""
    model_dtype: DType | None = None
    """Dtype of the model's weight, if the optimizer steps a master."""
    states: Mapping[str, StateFacts]
    """State name to its facts; only states that this rank keeps."""
    is_cast: bool = False
    """Whether only the weight with which the model computes is saved."""

    def narrow(self, *, is_cast: bool) -> AtomFacts:
        """With the states that are saved: the weight with which the model computes, or all others."""
        if not is_cast:
            return replace(self, states={name: state for name, state in self.states.items() if name != COMPUTED})
        name = COMPUTED if COMPUTED in self.states else WEIGHT
        return replace(self, states={name: self.states[name]}, model_dtype=None, is_cast=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What a rank says of its part of the run."""

    atoms: Mapping[str, AtomFacts]
    """By the name in the whole model."""
    groups: tuple[ParamGroup, ...]
    """Parameter groups of its optimizer, with the parameters that it steps."""
    items: tuple[SaveItem, ...]
    """What it holds."""
    plan: str = ""
    """Digest of the plan that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A state, and the part of it in the memory of this rank."""

    facts: StateFacts
    """The state."""
    tensor: torch.Tensor | None = None
    """The rank's elements, in row-major order: a local tensor, or a flat range of one; None for none."""
    boxes: tuple[PlacedBox, ...] = ()
    """Where they lie in the global tensor."""


@dataclass(slots=True)
class Holdings:
    """What this rank holds."""

    atoms: dict[str, AtomFacts] = field(default_factory=dict)
    """Facts by the name in the whole model."""
    tensors: dict[SaveItem, Holding] = field(default_factory=dict)
    """What is written, to its memory."""
    groups: tuple[ParamGroup, ...] = ()
    """Parameter groups of the optimizer."""

    def facts(self) -> RankFacts:
        """What the other ranks must know."""
        return RankFacts(atoms=self.atoms, groups=self.groups, items=tuple(self.tensors))


def collect_holdings(run: LiveRun, modules: Sequence[nn.Module], *, with_computed: bool = False) -> Holdings:
    """What this rank holds of the run. Raises UnsupportedError for what cannot be saved, with all names.

    `with_computed`: also the weights that the model has beside masters (`COMPUTED`).
    """
    optimizer = run.optimizer
    if optimizer is not None and not isinstance(optimizer, ReadableOptimizer):
        raise UnsupportedError(
            f"expected an optimizer whose states can be read (`values`); got {type(optimizer).__name__}. Save with the "
            "framework's own function, and convert with `ucp convert`"
        )
    holdings = Holdings()
    tensors = {tensor.name: tensor for tensor in run.model.tensors}
    kinds = _find_kinds(run, modules)
    marked = run.model.marked_params
    problems: list[str] = []
    groups = [] if optimizer is None else optimizer.groups()
    stepped = [] if optimizer is None else optimizer.params([group.hyper for group in groups])
    parts = {tensor.name: tensor.part for tensor in run.model.tensors}
    params = {param.name: globalize(param, parts, run) for param in stepped}
    for tensor in tensors.values():
        values: Mapping[str, object] = {}
        if optimizer is not None and tensor.name in params:
            values = optimizer.values(tensor.name)
        states: dict[str, object] = {} if WEIGHT in values else {WEIGHT: run.model.handles[tensor.name]}
        states |= {state: value for state, value in values.items() if value is not None}
        if with_computed and WEIGHT in values:
            states[COMPUTED] = run.model.handles[tensor.name]
        try:
            dtype = dtype_of(marked[tensor.name]) if tensor.name in marked else tensor.dtype  # not of a master
            atom = replace(tensor, dtype=dtype)
            if with_computed and dtype is not tensor.dtype:
                raise UnsupportedError(
                    f"{tensor.name}: expected weights beside masters for a sparse window; its {dtype} weight is what "
                    "DeepSpeed makes of the master. Save with plan=Full() or PartialExperts"
                )
            _add_atom(holdings, atom, states, kinds.get(tensor.name, Kind.PARAMETER), params.get(tensor.name))
        except UnsupportedError as error:
            problems.append(str(error))
    if problems:
        raise UnsupportedError("\n".join(problems))
    names = {tensor.name: tensor.global_names[0] for tensor in tensors.values()}
    holdings.groups = tuple(
        ParamGroup(params=tuple(names[name] for name in group.params if name in names), hyper=dict(group.hyper))
        for group in groups
    )
    return holdings


def _find_kinds(run: LiveRun, modules: Sequence[nn.Module]) -> dict[str, Kind]:
    """Name of each tensor whose module says so to its kind."""
    from torch import nn

    owners, named = run.model.owners, dict(run.model.marked_params)
    for module in modules:
        tensors = (*module.buffers(), *module.parameters())
        named |= {owners[id(tensor)]: tensor for tensor in tensors if id(tensor) in owners}
    return {
        name: Kind.BUFFER
        if not isinstance(tensor, nn.Parameter)
        else Kind.PARAMETER
        if tensor.requires_grad
        else Kind.FROZEN
        for name, tensor in named.items()
    }


def _add_atom(
    holdings: Holdings,
    tensor: LiveTensor,
    values: Mapping[str, object],
    kind: Kind,
    param: LiveParam | None,
) -> None:
    """Add the states of a parameter or buffer. `values`: state to its value; `param`: how the optimizer steps it."""
    name, *aliases = tensor.global_names
    shape = tensor.part.global_shape
    assert shape is not None  # as a save has no checkpoint to take it from
    facts: dict[str, StateFacts] = {}
    for state, value in values.items():
        part = tensor.part
        if param is not None and state != COMPUTED:
            part = param.apart.get(state) or param.part or part
        holding = _describe_state(f"{name}/{state}", value, part, shape)
        facts[state] = holding.facts
        if holding.tensor is not None:
            if part.is_full and kind is not Kind.BUFFER:  # buffers of replicas may differ, e.g. running means
                head = holding.tensor.reshape(-1)[:_SAMPLE]
                facts[state] = replace(holding.facts, sample=to_bytes(head).tobytes())
            boxes = tuple(placed.box for placed in holding.boxes)
            nbytes = holding.tensor.numel() * holding.facts.dtype.itemsize
            holdings.tensors[SaveItem(param=name, state=state, boxes=boxes, nbytes=nbytes)] = holding
    master = facts[WEIGHT].dtype if WEIGHT in facts else tensor.dtype
    holdings.atoms[name] = AtomFacts(
        kind=kind,
        shape=shape,
        aliases=tuple(aliases),
        model_dtype=None if master is tensor.dtype else tensor.dtype,
        states=facts,
    )


def _describe_state(label: str, value: object, part: LivePart, shape: tuple[int, ...]) -> Holding:
    """The facts of a state, and what this rank holds of it.

    `label`: <parameter>/<state>. `part`: of the parameter, whose shape is `shape`.
    """
    import torch

    if isinstance(value, bool | int | float):
        number = state_from_number(value).fragments[0].ref
        assert isinstance(number, InlineTensor)
        return Holding(facts=StateFacts(shape=(), dtype=number.dtype, value=number))
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"{label}: expected a tensor or a number; got a {type(value).__name__}")
    if is_dtensor(value):
        part, shape = dtensor_part(value, label), tuple(value.shape)
    local, dtype = local_of(value).detach(), dtype_of(value)
    if local.is_meta:
        raise UnsupportedError(f"{label}: expected a tensor with memory; got one on the meta device")
    is_range = bool(part.layout.flat and local.ndim)  # of a flat tensor, perhaps of one element
    is_other = not is_range and tuple(local.shape) != part.local_shape
    is_count = local.numel() == 1 and (label.endswith(f"/{STEP}") or is_other)
    if is_count or 0 in shape:
        inline = InlineTensor(data=to_bytes(local).tobytes(), dtype=dtype, shape=() if is_count else shape)
        return Holding(facts=StateFacts(shape=inline.shape, dtype=dtype, value=inline))
    if part.is_full:  # factored moments have other shapes than their parameter
        part, shape = LivePart.full(tuple(local.shape)), tuple(local.shape)
    layout, shard, boxes = _locate(part.layout, shape, tuple(part.coords.items()))
    if shard.numel != local.numel() or not (
        part.layout.flat or shard.local_shape == tuple(local.shape) or not shard.numel
    ):
        cut = ", ".join(f"{axis.axis}={axis.parts} {axis.pattern.name}" for axis in part.layout.all_axes)
        raise UnsupportedError(
            f"{label}: expected the {shard.numel} elements that {cut} gives this rank of {list(shape)}; got a tensor "
            f"of shape {list(local.shape)}, and it is not known which elements these are"
        )
    facts = StateFacts(shape=shape, dtype=dtype, layout=layout)
    return Holding(facts=facts, tensor=local, boxes=boxes) if boxes else Holding(facts=facts)


@lru_cache(maxsize=4096)
def _locate(
    layout: Layout, shape: tuple[int, ...], coords: tuple[tuple[str, int], ...]
) -> tuple[Layout, RankShard, tuple[PlacedBox, ...]]:
    """Where a part lies. The same objects for states of one layout, which makes facts short, and later saves fast."""
    shard = locate_shard(layout, shape, coords=dict(coords))
    boxes = tuple(placed for placed in place(layout, shape, coords=dict(coords)) if placed.box.numel)
    return layout, shard, boxes


def copy_to_host(
    holdings: Mapping[SaveItem, Holding], earlier: Mapping[SaveItem, Holding] | None = None
) -> dict[SaveItem, Holding]:
    """Copies in host memory. `earlier`: copies whose memory is used again, as new memory takes most of the time."""
    import torch

    copies, devices = {}, set()
    for item, holding in holdings.items():
        used = (earlier or {}).get(item)
        assert holding.tensor is not None
        source, target = holding.tensor.detach(), None if used is None else used.tensor
        is_cuda = source.is_cuda  # copies to pinned memory overlap
        if target is None or (target.shape, target.dtype) != (source.shape, source.dtype):
            target = torch.empty(source.shape, dtype=source.dtype, pin_memory=is_cuda)
        copies[item] = replace(holding, tensor=target.copy_(source, non_blocking=is_cuda))
        devices |= {source.device} if is_cuda else set()
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order, in host memory."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # an array has the buffer protocol
