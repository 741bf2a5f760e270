"""What model-parallel ranks hold, put together: one module and one optimizer of whole tensors.

1. Collect the shapes that the tensor-parallel ranks hold of each parameter, and ask the rules for its layout.
2. Say of every parameter how it lies over all axes, and of every rank where it stands. Pieces are made later.
3. Join the parameter groups of the stages, and keep the extras that ranks have for themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from ucp.contract.layouts import holder_axes
from ucp.contract.ranks import Checksums, Problems
from ucp.core.index import WEIGHT, Extra, Kind, ParamGroup, StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.tensor import InlineTensor
from ucp.core.union import ShardedTensor, ShardSet, StateSource, StoredShard, merge_counts
from ucp.errors import MalformedError, UnsupportedError, listed
from ucp.io.pickle.fields import Shape
from ucp_formats.deepspeed.experts import Numbered
from ucp_formats.deepspeed.read.module import ModuleEntry, ModulePart
from ucp_formats.deepspeed.read.optimizer.flat_group import OptimizerPart
from ucp_formats.deepspeed.tp.layout import TensorLayout, TensorShapes

if TYPE_CHECKING:
    from ucp.core.index import Doubt
    from ucp_formats.deepspeed.tp.family import FamilyRules
    from ucp_formats.deepspeed.tp.universal_info import UniversalCheckpointInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How the tensors of a run lie over its axes, but for what the data-parallel ranks cut of them."""

    dp: int = 1
    """Data-parallel ranks."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert-parallel ranks."""
    known_from: Mapping[str, str] = field(default_factory=dict)
    """Axis to where it is known from how tensors lie over it."""
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensor to the pipeline stages that hold it, where that is known; several for a tied one."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """Parameter of an expert to the expert-parallel rank that holds it."""
    tensors: Mapping[str, TensorLayout] = field(default_factory=dict)
    """Tensor to its layout over the tensor-parallel ranks; empty with one."""

    def layout(self, name: str, own: Layout) -> Layout:
        """The layout of a tensor over all axes; `own`: as its own file says, over the ranks that cut it."""
        stages, axes = self.stages.get(name, ()), own.axes
        if name in self.owners and not axes:
            axes = holder_axes("ep", self.ep, self.known_from.get("ep", ""), (self.owners[name],))
        if stages:
            axes = (*holder_axes("pp", self.pp, self.known_from.get("pp", ""), stages), *axes)
        return self.in_stage(name, own, axes)

    def laid_out(self, name: str, tensor: ShardedTensor, *, in_stage: bool, **coords: int) -> ShardedTensor:
        """A tensor of the model-parallel rank at `coords`, over all axes; `in_stage`: but for those outside a stage."""
        shape = self.tensors[name].global_shape if name in self.tensors else tensor.shape
        base = {"dp": 0, **coords}
        parts = []
        for part in tensor.shard_sets:
            layout = self.in_stage(name, part.layout) if in_stage else self.layout(name, part.layout)
            if layout is part.layout:
                parts.append(part)
            else:
                moved = [StoredShard({**base, **one.coords}, one.ref, one.start) for one in part.shards]
                parts.append(ShardSet(layout, tuple(moved)))
        if all(new is old for new, old in zip(parts, tensor.shard_sets, strict=True)):
            return tensor
        return ShardedTensor(dtype=tensor.dtype, shape=shape, shard_sets=tuple(parts))

    def in_stage(self, name: str, own: Layout, outer: tuple[AxisLayout, ...] = ()) -> Layout:
        """The layout in a pipeline stage, which has its modules in files of layers and experts, by their names."""
        if name in self.tensors:
            layout = self.tensors[name]
            outer = (*outer, AxisLayout("tp", layout.parts, layout.pattern, self.known_from.get("tp", "")))
        copies = self.dp // prod([axis.parts for axis in outer if axis.axis == "ep"])
        if copies > 1 and not own.flat:
            return Layout((*outer, *holder_axes("dp", copies, self.known_from.get("dp", ""))))
        return Layout(outer, own.flat) if outer else own


@dataclass(frozen=True, slots=True)
class Merged:
    """All ranks as one."""

    module: ModulePart
    """The whole module."""
    optimizer: OptimizerPart
    """The whole optimizer."""
    mesh: Mesh = field(default_factory=Mesh)
    """How tensors lie over ranks."""
    doubts: list[Doubt] = field(default_factory=list)
    """What speaks against the files."""

    @classmethod
    def of_one(cls, module: ModulePart, optimizer: OptimizerPart, mesh: Mesh) -> Merged:
        """What one model-parallel rank has, which is all."""
        for name, entry in module.entries.items():
            if entry.tensor is not None:
                tensor = mesh.laid_out(name, entry.tensor, in_stage=True)
                if tensor is not entry.tensor:
                    module.entries[name] = replace(entry, tensor=tensor)
        for name, own in optimizer.states.items():
            for key, state in own.items():
                if isinstance(state, ShardedTensor) and not state.layout.flat:
                    own[key] = mesh.laid_out(name, state, in_stage=True)
        return cls(module, optimizer, mesh)


Rules: TypeAlias = "UniversalCheckpointInfo | FamilyRules"
"""Says how tensors lie over the tensor-parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one model-parallel rank holds."""

    mp: int
    """The rank, for messages and extras."""
    tp: int
    """Its tensor-parallel rank."""
    order: int
    """Its pipeline stage, or expert-parallel rank; where several have a tensor, that of the first is taken."""
    module: ModulePart = field(default_factory=ModulePart)
    """Its module; empty where another part has it."""
    optimizer: OptimizerPart = field(default_factory=OptimizerPart)
    """Its optimizer; empty where another part has it."""
    dp: int = 0
    """Data-parallel rank that wrote it, where each tensor is whole on every rank."""
    untrained: tuple[str, ...] = ()
    """Frozen parameters and buffers that its stage is known to have."""


def merge(parts: Sequence[RankPart], rules: Rules, checksums: Checksums, where: str, mesh: Mesh) -> Merged:
    """Join `parts`; `rules` say how tensors lie over tensor-parallel ranks. Raises SourceError.

    `mesh`: the degrees of all axes, to be filled in.
    """
    stages: dict[str, set[int]] = {}
    for part in parts:
        members = (name for group in part.optimizer.groups for name in group.params)
        for name in (*part.optimizer.states, *members, *part.untrained):
            stages.setdefault(name, set()).add(part.order)
    names = _unique(each for part in parts for each in (part.module.entries, part.optimizer.states))
    mesh = replace(
        mesh,
        tensors=_layouts(parts, mesh.tp, rules, where) if mesh.tp > 1 else {},
        stages={name: tuple(sorted(orders)) for name, orders in stages.items()},
        owners=Numbered.of(names).owners(names, mesh.ep) if mesh.ep > 1 else {},
        known_from={**mesh.known_from, **rules.known_from},
    )
    merger = _Merger(parts, mesh, checksums)
    problems = Problems()
    groups = _groups(parts, checksums, problems)
    optimizer = OptimizerPart(
        states={name: merger.states(name) for name in _unique(part.optimizer.states for part in merger.parts)},
        groups=groups,
        extras=merged_extras([(part.mp, part.optimizer.extras) for part in parts], checksums),
        notes=_unique(part.optimizer.notes for part in parts),
        dropped=_unique(part.optimizer.dropped for part in parts),
        lost={name: loss for part in parts for name, loss in part.optimizer.lost.items()},
    )
    module = ModulePart(
        entries={name: merger.entry(name) for name in _unique(part.module.entries for part in parts)},
        aliases={alias: name for part in parts for alias, name in part.module.aliases.items()},
        extras=merged_extras([(part.mp, part.module.extras) for part in parts], checksums) + merger.extras,
        notes=_unique(part.module.notes for part in parts) + merger.notes,
        dropped=_unique(part.module.dropped for part in parts),
    )
    problems.wrong += merger.wrong
    problems.raise_any(where, "model-parallel ranks")
    return Merged(module=module, optimizer=optimizer, mesh=mesh)


def _layouts(parts: Sequence[RankPart], tp: int, rules: Rules, where: str) -> dict[str, TensorLayout]:
    """Layout of every parameter and buffer."""
    held: dict[str, dict[int, Shape]] = {}
    buffers: set[str] = set()
    for part in parts:
        weights = ((name, states.get(WEIGHT)) for name, states in part.optimizer.states.items())
        own = {name: weight.shape for name, weight in weights if isinstance(weight, ShardedTensor)}
        own |= {name: entry.shape for name, entry in part.module.entries.items()}
        buffers |= {name for name, entry in part.module.entries.items() if entry.kind is Kind.BUFFER}
        for name, shape in own.items():
            if held.setdefault(name, {}).setdefault(part.tp, shape) != shape:
                raise MalformedError(
                    f"expected one shape of {name} on tensor-parallel rank {part.tp} of {where}; got "
                    f"{list(held[name][part.tp])} and {list(shape)}. The files are of different runs"
                )
    lone = [f"{name}: on rank {', '.join(map(str, own))} only" for name, own in held.items() if len(own) < tp]
    if lone:
        raise UnsupportedError(
            f"expected every parameter on all {tp} tensor-parallel ranks of {where}; got\n{listed(lone)}\nExperts that "
            "are spread over tensor-parallel ranks are not read: resume with tensor-parallel degree 1 and save again"
        )
    shapes = {
        name: TensorShapes(local=tuple(own[rank] for rank in range(tp)), declared=name not in buffers)
        for name, own in held.items()
    }
    return rules.layouts(shapes)


class _Merger:
    """Puts together what ranks hold of each tensor."""

    def __init__(self, parts: Sequence[RankPart], mesh: Mesh, checksums: Checksums) -> None:
        self.parts = sorted(parts, key=lambda part: (part.order, part.tp))
        self.mesh = mesh
        self.checksums = checksums
        self.wrong: list[str] = []
        self.extras: list[Extra] = []
        self.notes: list[str] = []
        self._counts: dict[tuple[int, ...], StateIndex] = {}

    def states(self, name: str) -> dict[str, StateSource]:
        """Whole states of a parameter."""
        holders = [(part, part.optimizer.states[name]) for part in self.parts if name in part.optimizer.states]
        first = holders[0][1]
        self.wrong += [
            f"model-parallel rank {part.mp}: {name} has the states {', '.join(own)}; rank {holders[0][0].mp} has "
            f"{', '.join(first)}"
            for part, own in holders
            if own.keys() != first.keys()
        ]
        return {key: self._state(name, key, [(part, own[key]) for part, own in holders if key in own]) for key in first}

    def _state(self, name: str, key: str, held: Sequence[tuple[RankPart, StateSource]]) -> StateSource:
        layout = self.mesh.tensors.get(name)
        if len({(own.dtype, _shape(own) if layout is None else None) for _, own in held}) > 1:
            where = dict.fromkeys(f"{own.dtype} {list(_shape(own)) if layout is None else ''}" for _, own in held)
            self.wrong.append(f"{name}/{key}: {' and '.join(where)} on several model-parallel ranks")
        counts = [(part, own) for part, own in held if isinstance(own, StateIndex)]
        if len(counts) == len(held):
            return self._count(f"{name}/{key}", counts)
        tensors = [(part, own) for part, own in held if isinstance(own, ShardedTensor)]
        odd = [part.mp for part, _ in counts]
        if layout is not None:
            odd += [part.mp for part, own in tensors if own.shape != layout.local_shape(part.tp)]
        if odd:
            self.wrong.append(f"{name}/{key}: of another shape than the parameter on model-parallel rank {odd}")
            return held[0][1]
        return self._joined(name, tensors)

    def _count(self, what: str, counts: Sequence[tuple[RankPart, StateIndex]]) -> StateIndex:
        """A count of several ranks as one: made once for all parameters that share the counts of the ranks."""
        shared = tuple([id(own) for _, own in counts])
        if shared in self._counts:
            return self._counts[shared]
        refs = [piece.ref for _, own in counts for piece in own.fragments]
        inline = [ref.data for ref in refs if isinstance(ref, InlineTensor)]
        if len(inline) < len(refs):
            made = merge_counts([own for _, own in counts])
        else:  # numbers in the files themselves must agree now
            made = counts[0][1]
            if len({*inline}) > 1:
                ranks = ", ".join(f"model-parallel rank {part.mp}" for part, _ in counts)
                self.wrong.append(f"of another run: {what} differs among {ranks}")
                return made
        self._counts[shared] = made
        return made

    def _joined(
        self, name: str, held: Sequence[tuple[RankPart, ShardedTensor]], *, in_stage: bool = False
    ) -> ShardedTensor:
        """A tensor of several ranks as one; `in_stage`: each copy of it is whole in a file of its own."""
        of_expert = name in self.mesh.owners
        every = [
            self.mesh.laid_out(
                name, own, in_stage=in_stage, pp=part.order, ep=part.order, tp=part.tp, dp=0 if of_expert else part.dp
            )
            for part, own in held
        ]
        return replace(every[0], shard_sets=tuple(laid for own in every for laid in own.shard_sets))

    def entry(self, name: str) -> ModuleEntry:
        """Whole tensor of the module."""
        held = [(part, part.module.entries[name]) for part in self.parts if name in part.module.entries]
        first = held[0][1]
        kinds = {own.kind for _, own in held}
        kind = Kind.PARAMETER if Kind.PARAMETER in kinds else first.kind
        if kind is Kind.BUFFER and first.tensor is not None:
            # those that are known to differ from the first become extras, as those of running statistics
            layout, every, held = self.mesh.tensors.get(name), held, []
            for part, copy in every:
                comparable = layout is None or layout.local_shape(part.tp) == layout.global_shape
                ref = copy.tensor.first if copy.tensor is not None and comparable else None
                if ref is None or self.checksums.has_same_bytes(first.tensor.first, ref) is not False:
                    held.append((part, copy))
                    continue
                self.extras.append(Extra(name=f"mp_rank_{part.mp:02d}/buffer/{name}", value=ref))
                self.notes.append(
                    f"buffer {name} of model-parallel rank {part.mp} differs from rank {every[0][0].mp}'s, which is "
                    "taken; its own is an extra"
                )
        if len({own.dtype for _, own in held}) > 1:
            self.wrong.append(f"{name}: of several types on the model-parallel ranks")
        tensors = [(part, own.tensor) for part, own in held if own.tensor is not None]
        whole = self._joined(name, tensors, in_stage=True) if tensors else None
        shape = self.mesh.tensors[name].global_shape if name in self.mesh.tensors else first.shape
        return replace(first, kind=kind, shape=shape, tensor=whole)


def _shape(state: StateSource) -> Shape:
    return state.global_shape if isinstance(state, StateIndex) else state.shape


def _groups(parts: Sequence[RankPart], checksums: Checksums, problems: Problems) -> list[ParamGroup]:
    """Groups of all stages, joined where their hyper-parameters are the same.

    Several groups of one stage with the same hyper-parameters stay apart, and are joined with those of other stages in
    their order. Tensor-parallel ranks of a stage have the same groups.
    """
    by_order: dict[int, list[RankPart]] = {}
    for part in sorted(parts, key=lambda part: (part.order, part.tp)):
        if part.optimizer.groups:
            by_order.setdefault(part.order, []).append(part)
    joined: list[tuple[dict[str, None], Mapping[str, object]]] = []
    for own in by_order.values():
        first = own[0]
        problems.wrong += [
            f"model-parallel rank {other.mp}: of another run: its parameter groups differ from those of rank {first.mp}"
            for other in own[1:]
            if not checksums.is_same(*([(g.params, dict(g.hyper)) for g in p.optimizer.groups] for p in (first, other)))
        ]
        free = list(joined)
        for group in first.optimizer.groups:
            match = next((one for one in free if checksums.is_same(dict(one[1]), dict(group.hyper))), None)
            if match is None:
                joined.append((dict.fromkeys(group.params), group.hyper))
            else:
                free = [one for one in free if one is not match]
                match[0].update(dict.fromkeys(group.params))
    return [ParamGroup(params=tuple(params), hyper=hyper) for params, hyper in joined]


def merged_extras(owned: Sequence[tuple[int, Sequence[Extra]]], checksums: Checksums) -> list[Extra]:
    """Extras of the first rank; those of others that are not known to be the same, under a name of their own."""
    found: list[Extra] = []
    first: dict[tuple[str, int | None], object] = {}
    for mp, extras in owned:
        for extra in extras:
            key = (extra.name, extra.rank)
            if key not in first and (not found or mp == owned[0][0]):
                first[key] = extra.value
                found.append(extra)
            elif key not in first or not checksums.is_same(first[key], extra.value):
                found.append(replace(extra, name=f"mp_rank_{mp:02d}/{extra.name}"))
    return found


def _unique(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(text for own in lists for text in own))
