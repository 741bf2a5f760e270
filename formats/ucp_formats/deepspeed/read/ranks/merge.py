"""Merges the tensors of all model-parallel ranks into one module and one optimizer of global tensors.

1. Collect the shape of each parameter's shard on every tensor-parallel rank, and ask the rules for its layout.
2. Attach to every parameter its layout over all axes, and to every shard the coordinates of its rank. Fragments are
   made from these later.
3. Merge the parameter groups of the stages, and keep the extras that differ between ranks.
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
from ucp.core.union import ShardedTensor, ShardSet, StateSource, merge_counts
from ucp.errors import MalformedError, UnsupportedError, format_list
from ucp.io.pickle.fields import Shape
from ucp_formats.deepspeed.experts import ExpertNumbers
from ucp_formats.deepspeed.read.module import ModuleEntry, ModulePart
from ucp_formats.deepspeed.read.optimizer.flat_group import OptimizerPart
from ucp_formats.deepspeed.tp.layout import TensorLayout, TensorShapes

if TYPE_CHECKING:
    from ucp.core.index import Doubt
    from ucp_formats.deepspeed.tp.family import FamilyRules
    from ucp_formats.deepspeed.tp.universal_info import UniversalCheckpointInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How the tensors of a run are split over its axes, apart from ZeRO's partitioning."""

    dp: int = 1
    """Data-parallel ranks."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert-parallel ranks."""
    known_from: Mapping[str, str] = field(default_factory=dict)
    """Axis to the file or rule that says how tensors are split over it."""
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensor to the pipeline stages that hold it, where known; a tied tensor can have several."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """Parameter of an expert to the expert-parallel rank that holds it."""
    tensors: Mapping[str, TensorLayout] = field(default_factory=dict)
    """Tensor to its layout over the tensor-parallel ranks; empty if there is only one."""

    def layout(self, name: str, file_layout: Layout) -> Layout:
        """The layout of a tensor over all axes; `file_layout`: over the dp and ep ranks, as its reader set it."""
        stages, axes = self.stages.get(name, ()), file_layout.axes
        if name in self.owners and not axes:
            axes = holder_axes("ep", self.ep, self.known_from.get("ep", ""), (self.owners[name],))
        if stages:
            axes = (*holder_axes("pp", self.pp, self.known_from.get("pp", ""), stages), *axes)
        return self.in_stage(name, file_layout, axes)

    def place_tensor(self, name: str, tensor: ShardedTensor, *, in_stage: bool, **coords: int) -> ShardedTensor:
        """`tensor` of the model-parallel rank at `coords`, with its layout over all axes.

        `in_stage`: whether to leave out the axes outside a pipeline stage.
        """
        shape = self.tensors[name].global_shape if name in self.tensors else tensor.shape
        base = {"dp": 0, **coords}
        parts = []
        for part in tensor.shard_sets:
            layout = self.in_stage(name, part.layout) if in_stage else self.layout(name, part.layout)
            if layout is part.layout:
                parts.append(part)
            else:
                moved = [copy._replace(coords={**base, **copy.coords}) for copy in part.shards]
                parts.append(ShardSet(layout, tuple(moved)))
        if all(new is old for new, old in zip(parts, tensor.shard_sets, strict=True)):
            return tensor
        return ShardedTensor(dtype=tensor.dtype, shape=shape, shard_sets=tuple(parts))

    def in_stage(self, name: str, file_layout: Layout, outer: tuple[AxisLayout, ...] = ()) -> Layout:
        """`outer`, followed by the axes inside a pipeline stage: tp, then dp (as copies, or as in `file_layout`)."""
        if any(axis.axis == "dp" for axis in file_layout.axes):  # data-parallel ranks have different parts
            return file_layout
        if name in self.tensors:
            layout = self.tensors[name]
            outer = (*outer, AxisLayout("tp", layout.parts, layout.pattern, self.known_from.get("tp", "")))
        copies = self.dp // prod([axis.parts for axis in outer if axis.axis == "ep"])
        if copies > 1 and not file_layout.flat:
            return Layout((*outer, *holder_axes("dp", copies, self.known_from.get("dp", ""))))
        return Layout(outer, file_layout.flat) if outer else file_layout


@dataclass(frozen=True, slots=True)
class MergedRanks:
    """Module and optimizer of all ranks."""

    module: ModulePart
    """The module, with global tensors."""
    optimizer: OptimizerPart
    """The optimizer, with global tensors."""
    mesh: Mesh = field(default_factory=Mesh)
    """How tensors are split over ranks."""
    warnings: list[Doubt] = field(default_factory=list)
    """Signs that the files are not complete."""

    @classmethod
    def from_rank(cls, module: ModulePart, optimizer: OptimizerPart, mesh: Mesh) -> MergedRanks:
        """The module and optimizer of the only model-parallel rank, with layouts over all axes of `mesh`."""
        for name, entry in module.entries.items():
            if entry.tensor is not None:
                tensor = mesh.place_tensor(name, entry.tensor, in_stage=True)
                if tensor is not entry.tensor:
                    module.entries[name] = replace(entry, tensor=tensor)
        for name, states in optimizer.states.items():
            for key, state in states.items():
                if isinstance(state, ShardedTensor) and not state.layout.flat:
                    states[key] = mesh.place_tensor(name, state, in_stage=True)
        return cls(module, optimizer, mesh)


Rules: TypeAlias = "UniversalCheckpointInfo | FamilyRules"
"""How the tensor-parallel ranks split each tensor, by the checkpoint's record or by a model family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one model-parallel rank holds."""

    mp: int
    """The rank, for messages and extras."""
    tp: int
    """Its tensor-parallel rank."""
    order: int
    """Its pipeline stage, or its expert-parallel rank. The lowest one that has a tensor decides its kind and dtype."""
    module: ModulePart = field(default_factory=ModulePart)
    """Its module; empty if another part has it."""
    optimizer: OptimizerPart = field(default_factory=OptimizerPart)
    """Its optimizer; empty if another part has it."""
    dp: int = 0
    """The data-parallel rank that wrote the files, in a run whose ranks hold full tensors."""
    untrained: tuple[str, ...] = ()
    """Frozen parameters and buffers of its stage, as far as the files name them."""


def merge_ranks(parts: Sequence[RankPart], rules: Rules, checksums: Checksums, where: str, mesh: Mesh) -> MergedRanks:
    """Merge `parts`; `rules`: how tensor-parallel ranks split tensors. Raises SourceError.

    `mesh`: the degrees of all axes; this function fills in its other fields.
    """
    stages: dict[str, set[int]] = {}
    for part in parts:
        members = (name for group in part.optimizer.groups for name in group.params)
        for name in (*part.optimizer.states, *members, *part.untrained):
            stages.setdefault(name, set()).add(part.order)
    names = _unique(owner for part in parts for owner in (part.module.entries, part.optimizer.states))
    mesh = replace(
        mesh,
        tensors=_find_layouts(parts, mesh.tp, rules, where) if mesh.tp > 1 else {},
        stages={name: tuple(sorted(orders)) for name, orders in stages.items()},
        owners=ExpertNumbers.of(names).owners(names, mesh.ep) if mesh.ep > 1 else {},
        known_from={**mesh.known_from, **rules.known_from},
    )
    merger = _Merger(parts, mesh, checksums)
    problems = Problems()
    groups = _merge_groups(parts, checksums, problems)
    optimizer = OptimizerPart(
        states={name: merger.states(name) for name in _unique(part.optimizer.states for part in merger.parts)},
        groups=groups,
        extras=merge_extras([(part.mp, part.optimizer.extras) for part in parts], checksums),
        notes=_unique(part.optimizer.notes for part in parts),
        dropped=_unique(part.optimizer.dropped for part in parts),
        lost={name: loss for part in parts for name, loss in part.optimizer.lost.items()},
    )
    module = ModulePart(
        entries={name: merger.entry(name) for name in _unique(part.module.entries for part in parts)},
        aliases={alias: name for part in parts for alias, name in part.module.aliases.items()},
        extras=merge_extras([(part.mp, part.module.extras) for part in parts], checksums) + merger.extras,
        notes=_unique(part.module.notes for part in parts) + merger.notes,
        dropped=_unique(part.module.dropped for part in parts),
    )
    problems.wrong += merger.wrong
    problems.raise_any(where, "model-parallel ranks")
    return MergedRanks(module=module, optimizer=optimizer, mesh=mesh)


def _find_layouts(parts: Sequence[RankPart], tp: int, rules: Rules, where: str) -> dict[str, TensorLayout]:
    """Layout of every parameter and buffer."""
    shapes_by_rank: dict[str, dict[int, Shape]] = {}
    buffers: set[str] = set()
    for part in parts:
        weights = ((name, states.get(WEIGHT)) for name, states in part.optimizer.states.items())
        shapes = {name: weight.shape for name, weight in weights if isinstance(weight, ShardedTensor)}
        shapes |= {name: entry.shape for name, entry in part.module.entries.items()}
        buffers |= {name for name, entry in part.module.entries.items() if entry.kind is Kind.BUFFER}
        for name, shape in shapes.items():
            known = shapes_by_rank.setdefault(name, {}).setdefault(part.tp, shape)
            if known != shape:
                raise MalformedError(
                    f"expected {name} to have one shape in all files of tensor-parallel rank {part.tp} of {where}; got "
                    f"{list(known)} and {list(shape)}. The files are from different runs"
                )
    partial = [
        f"{name}: on rank {', '.join(map(str, ranks))} only"
        for name, ranks in shapes_by_rank.items()
        if len(ranks) < tp
    ]
    if partial:
        raise UnsupportedError(
            f"expected every parameter on all {tp} tensor-parallel ranks of {where}; got\n{format_list(partial)}\nucp "
            "does not read experts spread over tensor-parallel ranks: resume with tensor-parallel degree 1 and save "
            "again"
        )
    return rules.layouts(
        {
            name: TensorShapes(local=tuple(shapes[rank] for rank in range(tp)), declared=name not in buffers)
            for name, shapes in shapes_by_rank.items()
        }
    )


class _Merger:
    """Merges the shards and copies of each tensor."""

    def __init__(self, parts: Sequence[RankPart], mesh: Mesh, checksums: Checksums) -> None:
        self.parts = sorted(parts, key=lambda part: (part.order, part.tp))
        self.mesh = mesh
        self.checksums = checksums
        self.wrong: list[str] = []
        self.extras: list[Extra] = []
        self.notes: list[str] = []
        self._counts: dict[tuple[int, ...], StateIndex] = {}

    def states(self, name: str) -> dict[str, StateSource]:
        """States of a parameter."""
        holders = [(part, part.optimizer.states[name]) for part in self.parts if name in part.optimizer.states]
        first_part, first = holders[0]
        self.wrong += [
            f"model-parallel rank {part.mp}: {name} has the states {', '.join(states)}; rank {first_part.mp} has "
            f"{', '.join(first)}"
            for part, states in holders
            if states.keys() != first.keys()
        ]
        return {
            key: self._merge_state(name, key, [(part, states[key]) for part, states in holders if key in states])
            for key in first
        }

    def _merge_state(self, name: str, key: str, copies: Sequence[tuple[RankPart, StateSource]]) -> StateSource:
        layout = self.mesh.tensors.get(name)
        kinds = dict.fromkeys(f"{state.dtype} {list(_shape(state)) if layout is None else ''}" for _, state in copies)
        if len(kinds) > 1:
            self.wrong.append(f"{name}/{key}: model-parallel ranks disagree: {' and '.join(kinds)}")
        counts = [(part, state) for part, state in copies if isinstance(state, StateIndex)]
        if len(counts) == len(copies):
            return self._merge_counts(f"{name}/{key}", counts)
        tensors = [(part, state) for part, state in copies if isinstance(state, ShardedTensor)]
        misfits = [part.mp for part, _ in counts]
        if layout is not None:
            misfits += [part.mp for part, state in tensors if state.shape != layout.local_shape(part.tp)]
        if misfits:
            self.wrong.append(f"{name}/{key}: its shape is not the parameter's on model-parallel rank {misfits}")
            return copies[0][1]
        return self._merge_tensors(name, tensors)

    def _merge_counts(self, what: str, counts: Sequence[tuple[RankPart, StateIndex]]) -> StateIndex:
        """One count for all ranks; parameters that have the same count objects get the same result."""
        identity = tuple([id(count) for _, count in counts])
        if identity not in self._counts:
            refs = [fragment.ref for _, count in counts for fragment in count.fragments]
            inline = [ref.data for ref in refs if isinstance(ref, InlineTensor)]
            if len(inline) < len(refs):
                self._counts[identity] = merge_counts([count for _, count in counts])
            elif len({*inline}) > 1:  # numbers in the pickles can be compared now, tensors only when they are read
                ranks = ", ".join(f"model-parallel rank {part.mp}" for part, _ in counts)
                self.wrong.append(f"of another run: {what} differs among {ranks}")
                return counts[0][1]
            else:
                self._counts[identity] = counts[0][1]
        return self._counts[identity]

    def _merge_tensors(
        self, name: str, shards: Sequence[tuple[RankPart, ShardedTensor]], *, in_stage: bool = False
    ) -> ShardedTensor:
        """The global tensor; `in_stage`: the file of each stage has a copy of it."""
        is_expert = name in self.mesh.owners
        placed = [
            self.mesh.place_tensor(
                name, shard, in_stage=in_stage, pp=part.order, ep=part.order, tp=part.tp, dp=0 if is_expert else part.dp
            )
            for part, shard in shards
        ]
        return replace(placed[0], shard_sets=tuple(part for tensor in placed for part in tensor.shard_sets))

    def entry(self, name: str) -> ModuleEntry:
        """The module's entry for tensor `name`, with the global tensor."""
        copies = [(part, part.module.entries[name]) for part in self.parts if name in part.module.entries]
        first = copies[0][1]
        kind = Kind.PARAMETER if any(entry.kind is Kind.PARAMETER for _, entry in copies) else first.kind
        if kind is Kind.BUFFER:
            copies = self._same_buffers(name, copies)
        if len({entry.dtype for _, entry in copies}) > 1:
            self.wrong.append(f"{name}: its dtype differs between model-parallel ranks")
        shards = [(part, entry.tensor) for part, entry in copies if entry.tensor is not None]
        tensor = self._merge_tensors(name, shards, in_stage=True) if shards else None
        shape = self.mesh.tensors[name].global_shape if name in self.mesh.tensors else first.shape
        return replace(first, kind=kind, shape=shape, tensor=tensor)

    def _same_buffers(
        self, name: str, copies: Sequence[tuple[RankPart, ModuleEntry]]
    ) -> list[tuple[RankPart, ModuleEntry]]:
        """Copies of a buffer that do not differ from the first; those that do, as running statistics, become extras."""
        first = copies[0][1].tensor
        layout, same = self.mesh.tensors.get(name), []
        for part, entry in copies:
            comparable = layout is None or layout.local_shape(part.tp) == layout.global_shape
            ref = entry.tensor.first if entry.tensor is not None and comparable else None
            if first is None or ref is None or self.checksums.has_same_bytes(first.first, ref) is not False:
                same.append((part, entry))
                continue
            self.extras.append(Extra(name=f"mp_rank_{part.mp:02d}/buffer/{name}", value=ref))
            self.notes.append(
                f"buffer {name} of model-parallel rank {part.mp} differs from rank {copies[0][0].mp}'s: the latter is "
                "used, the former is kept as an extra"
            )
        return same


def _shape(state: StateSource) -> Shape:
    return state.global_shape if isinstance(state, StateIndex) else state.shape


def _merge_groups(parts: Sequence[RankPart], checksums: Checksums, problems: Problems) -> list[ParamGroup]:
    """Groups of all stages, merged across stages where their hyper-parameters are the same.

    Two groups of one stage with the same hyper-parameters stay separate, and the groups of the next stage join them in
    order. The tensor-parallel ranks of a stage must have the same groups.
    """
    by_order: dict[int, list[RankPart]] = {}
    for part in sorted(parts, key=lambda part: (part.order, part.tp)):
        if part.optimizer.groups:
            by_order.setdefault(part.order, []).append(part)
    merged: list[tuple[dict[str, None], Mapping[str, object]]] = []
    for first, *others in by_order.values():
        problems.wrong += [
            f"model-parallel rank {other.mp}: of another run: its parameter groups differ from those of rank {first.mp}"
            for other in others
            if not checksums.is_same(*([(g.params, dict(g.hyper)) for g in p.optimizer.groups] for p in (first, other)))
        ]
        candidates = list(merged)
        for group in first.optimizer.groups:
            match = next((one for one in candidates if checksums.is_same(dict(one[1]), dict(group.hyper))), None)
            if match is None:
                merged.append((dict.fromkeys(group.params), group.hyper))
            else:
                candidates = [candidate for candidate in candidates if candidate is not match]
                match[0].update(dict.fromkeys(group.params))
    return [ParamGroup(params=tuple(params), hyper=hyper) for params, hyper in merged]


def merge_extras(extras_by_rank: Sequence[tuple[int, Sequence[Extra]]], checksums: Checksums) -> list[Extra]:
    """Extras of the first rank, and those extras of other ranks that differ from them, as `mp_rank_NN/NAME`."""
    merged: list[Extra] = []
    first: dict[tuple[str, int | None], object] = {}
    for mp, extras in extras_by_rank:
        for extra in extras:
            key = (extra.name, extra.rank)
            if key not in first and (not merged or mp == extras_by_rank[0][0]):
                first[key] = extra.value
                merged.append(extra)
            elif key not in first or not checksums.is_same(first[key], extra.value):
                merged.append(replace(extra, name=f"mp_rank_{mp:02d}/{extra.name}"))
    return merged


def _unique(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(text for texts in lists for text in texts))
