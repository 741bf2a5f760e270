"""How the tensors of a plain module that holds local shapes lie over the ranks of the run.

1. `Finder.ways` lists, per tensor, the layouts that give the shape that this rank holds, by evidence in this order:
   attributes of the parameter, rules of the model family, how the checkpoint itself was cut. Nothing is taken from
   shapes alone but that a tensor of the whole's shape is the whole.
2. Ranks share which of several ways fit them (a dim that does not divide can be cut in two ways), and `placed` takes
   the first that fits all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from ucp.contract.model import recorded_arguments
from ucp.contract.plugins import pattern
from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import choose_family
from ucp.core.index import AtomIndex, Index
from ucp.core.layout import AxisLayout, Layout, Pattern, locate_shard
from ucp.errors import FamilyError, UnknownFamilyError, UsageError, listed
from ucp.live.adapters import LiveModel
from ucp.live.match.tensors import find_atoms
from ucp.live.model.parallel.experts import ExpertMap
from ucp.live.model.parallel.numbering import expert_in, layer_in
from ucp.live.model.parallel.rules import Attributes, FamilyRules, RuleLayouts, cut_patterns
from ucp.live.parts import LiveTensor
from ucp.live.run.mesh import RunMesh

_EXPERTS = re.compile(r"(^|\.)(local_)?experts\.")
_MULTIPLE = "make_vocab_size_divisible_by"
_MULTIPLES = tuple(1 << power for power in range(12))
"""What runs make the rows of each rank a multiple of, where that is not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """How a tensor may lie."""

    layouts: tuple[Layout, ...]
    """Those that give the shape this rank holds, the likeliest first."""
    is_open: bool = False
    """Whether another rank may rule one out."""
    padded: tuple[int, ...] | None = None
    """Shape of the whole in this run, where that has rows that no checkpoint has."""
    refused: Layout = field(default_factory=Layout)
    """How it is said to lie where that does not give the shape; whole where nothing says it."""
    left_out: str = ""
    """What of the checkpoint's no rank holds."""
    hint: str = ""
    """What to do where there is no way."""

    def keys(self) -> frozenset[str]:
        """The layouts, as ranks compare them."""
        return frozenset(map(_key, self.layouts))


class LayoutFinder:
    """Finds the ways of the tensors of one rank."""

    def __init__(
        self,
        index: Index,
        mesh: RunMesh,
        *,
        count: int,
        options: SourceOptions,
        rename: Callable[[str], str] | None,
        experts: ExpertMap,
    ) -> None:
        self.notes: list[str] = []
        """From where it is known."""
        self._index, self._mesh, self._rename, self._experts = index, mesh, rename, experts
        self._options, self._count = options, count
        self._degrees = {axis: mesh.degree(axis) for axis in ("tp", "ep", "etp")}
        self._why_none = ""

    def ways(self, model: LiveModel) -> dict[str, Candidates]:
        """By own name, for tensors that the checkpoint has and that are no parts already, but for a flat cut of these.

        Raises FamilyError, UsageError for marks or a map of experts that cannot be.
        """
        found: dict[str, Candidates] = {}
        wrong: list[str] = []
        for own in model.tensors:
            atoms = find_atoms(own, self._index, self._rename)
            if atoms and not own.part.layout.axes:
                atom = self._index.atoms[atoms[0]]
                said = Attributes.of(model.marked_params.get(own.name, model.handles[own.name]))
                dims, dim = len(own.part.local_shape), said.dim
                if dim is not None and not 0 <= dim < dims and self._degrees[_cut_axis(own, said)] > 1:
                    wrong.append(f"{own.name}: partition_dim={dim}, expected one from {-dims} to {dims - 1}")
                beyond, _ = self._differing(own, atom)
                if beyond:
                    numbers, last = ", ".join(map(str, beyond)), atom.global_shape[0] - 1
                    wrong.append(f"{own.name}: experts={{{numbers}: ...}}, expected 0 to {last}")
                is_dealt = bool(self._experts.layers) and _is_stacked(own.global_names[0])
                if own.part.local_shape != atom.global_shape or dim is not None or is_dealt:
                    found[own.name] = self._ways_of(own, atom, said)
        if wrong:
            raise UsageError(f"expected marks on parameters and experts that the tensors have; got\n{listed(wrong)}")
        return found

    def _differing(self, own: LiveTensor, atom: AtomIndex) -> tuple[list[int], list[int]]:
        """Experts that the user's map names and a tensor of all experts lacks, and the other way round."""
        name = own.global_names[0]
        if not _is_stacked(name) or not atom.global_shape:
            return [], []
        return self._experts.differing(atom.global_shape[0], layer=_layer_number(name))

    def _ways_of(self, own: LiveTensor, atom: AtomIndex, said: Attributes) -> Candidates:
        local, shape = own.part.local_shape, atom.global_shape
        if len(local) != len(shape):
            return Candidates(layouts=())
        ruled = self._ruled(atom, local)
        ways = list(dict.fromkeys(self._tried(own, atom, said, ruled)))
        fitting = tuple(way for way in ways if self._fits(way, shape, local))
        padded = None
        if not fitting and ruled is not None and ruled.padded == 0 and self._is_padding(shape, local):
            padded = (local[0] * self._degrees["tp"], *shape[1:])
            fitting = (Layout(self._axis("tp", pattern("shard", dim=0))),)
        _, left = self._differing(own, atom)
        marked, hint = Layout(), ""
        if said.dim is not None and 0 <= said.dim < len(local):
            # the cut along the dim that a parameter says, whether or not its blocks can be cut
            marked = Layout(self._axis(_cut_axis(own, said), pattern("shard", dim=said.dim)))
            if shape[said.dim] % said.blocks:
                hint = f"partition_stride={said.blocks} does not divide dim {said.dim} there: correct it"
        return Candidates(
            layouts=fitting,
            is_open=len(ways) > 1,
            padded=padded,
            refused=next(iter(ways), marked),
            left_out=f"experts {', '.join(map(str, left))} go nowhere, as experts= says" if left else "",
            hint="" if fitting else hint or self._hint(ways),
        )

    def _fits(self, way: Layout, shape: tuple[int, ...], local: tuple[int, ...]) -> bool:
        try:
            part = locate_shard(way, shape, coords=self._mesh.coords)
        except ValueError:
            return False
        return part.local_shape == local or (part.numel == prod(local) == 0)

    def _tried(self, own: LiveTensor, atom: AtomIndex, said: Attributes, ruled: RuleLayouts | None) -> Iterator[Layout]:
        """Layouts by evidence, whatever shape they leave."""
        shape, axis = atom.global_shape, _cut_axis(own, said)
        outer = self._stacked(own.global_names[0], shape) if axis == "etp" else ()
        by_rule = () if ruled is None else ruled.layouts
        if said.dim is not None:
            dims = (said.dim, None)  # copies of all of it on neighbours divide nothing
            by_rule = tuple(way for way in by_rule if said.blocks == 1 and _divided(way, axis, shape) in dims)
        for way in by_rule:  # with experts dealt out as the user says
            yield Layout((*outer, *(each for each in way.axes if each.axis != "ep"))) if outer else way
        if said.dim is not None:
            patterns = self._attributed(axis, shape, own.part.local_shape, said)
            yield from (Layout((*outer, *self._axis(axis, each))) for each in patterns)
        elif not by_rule:
            patterns = self._recorded(axis, atom, own.part.local_shape)
            yield from (Layout((*outer, *self._axis(axis, each))) for each in patterns)
            if outer:
                yield Layout(outer)

    def _attributed(
        self, axis: str, shape: tuple[int, ...], local: tuple[int, ...], said: Attributes
    ) -> Iterator[Pattern]:
        dim = said.dim
        if dim is None or not 0 <= dim < len(shape):
            return
        if said.blocks > 1:
            each, rest = divmod(shape[dim], said.blocks)
            if not rest:
                yield pattern("shard", dim=dim, blocks=(each,) * said.blocks)
        else:
            yield from cut_patterns(dim, self._degrees[axis], shape, local)

    def _recorded(self, axis: str, atom: AtomIndex, local: tuple[int, ...]) -> Iterator[Pattern]:
        """The cut that the checkpoint was stored in, over any number of ranks."""
        parts, shape = self._degrees[axis], atom.global_shape
        for recorded in atom.layout.axes:
            dim = recorded.dim(shape) if recorded.axis == axis and recorded.parts > 1 else None
            if dim is None:
                continue
            yield recorded.pattern
            if len(recorded.pattern.regions(shape, recorded.parts, 0)) == 1:  # the dim is one block
                yield from cut_patterns(dim, parts, shape, local)

    def _axis(self, axis: str, own: Pattern) -> tuple[AxisLayout, ...]:
        parts = self._degrees[axis]
        return (AxisLayout(axis, parts, own),) if parts > 1 else ()

    def _stacked(self, name: str, shape: tuple[int, ...]) -> tuple[AxisLayout, ...]:
        """The axis of a tensor of all experts of a layer, over expert-parallel ranks."""
        parts = self._degrees["ep"]
        if not _is_stacked(name) or not shape:
            return ()
        dealt = self._experts.pattern(shape, layer=_layer_number(name), ep=parts)
        if dealt is None:
            return () if parts == 1 else (AxisLayout("ep", parts, pattern("shard", dim=0)),)
        return (AxisLayout("ep", parts, dealt),)

    def _is_padding(self, shape: tuple[int, ...], local: tuple[int, ...]) -> bool:
        """Whether this run has a vocabulary that is longer by what runs pad it to."""
        rows, parts, recorded = shape[0], self._degrees["tp"], recorded_arguments(self._index).get(_MULTIPLE)
        full = local[0] * parts
        multiples = (*_MULTIPLES, recorded) if isinstance(recorded, int) and recorded > 0 else _MULTIPLES
        is_longer = local[1:] == shape[1:] and full > rows
        return is_longer and any(full == -(-rows // (own * parts)) * own * parts for own in multiples)

    def _ruled(self, atom: AtomIndex, local: tuple[int, ...]) -> RuleLayouts | None:
        rules = self._rules
        try:
            return None if rules is None else rules.of(atom.name, atom.global_shape, local)
        except FamilyError as error:
            self._why_none = str(error)
            return None

    @cached_property
    def _rules(self) -> FamilyRules | None:
        """Those of the model's family; None, and why, where none fits. Raises FamilyError."""
        index = self._index
        try:
            family, why = choose_family(
                names=index.atoms, shapes=index.shapes, arguments=recorded_arguments(index), options=self._options
            )
        except UnknownFamilyError:
            self._why_none = "no model family fits the names of the checkpoint"
            return None
        self.notes.append(f"cut over the ranks of the run by the family {family.name}: {', '.join(why)}")
        return FamilyRules(family=family, degrees=self._degrees)

    def _hint(self, ways: Sequence[Layout]) -> str:
        cuts_alike = self._degrees["etp"] == self._degrees["tp"]
        said = {axis: own for axis, own in self._degrees.items() if own > 1 and not (axis == "etp" and cuts_alike)}
        degrees = ", ".join(f"{axis}={own}" for axis, own in said.items())
        if not degrees:
            is_one = self._mesh.topology is not None or self._count == 1
            return "" if is_one else "pass the topology of the run where ranks hold parts of tensors"
        if ways:
            shown = " or ".join(dict.fromkeys(map(_key, ways)))
            return (
                f"{shown} does not leave that shape. Correct the topology or what says the cut: the "
                "parameter's partition_dim, experts=, or patterns="
            )
        why = f" ({self._why_none})" if self._why_none else ""
        return (
            f"nothing says how {degrees} cuts it{why}. Pass family= or patterns=, or set tensor_model_parallel and "
            "partition_dim on the parameter"
        )


def assign_layouts(
    model: LiveModel, ways: Mapping[str, Candidates], told: Sequence[Mapping[str, frozenset[str]]], mesh: RunMesh
) -> LiveModel:
    """The model with the parts that its tensors are. `told`: what all ranks share of `ways`, by names of the whole."""
    tensors = []
    for own in model.tensors:
        found = ways.get(own.name)
        if found is None:
            tensors.append(own)
            continue
        votes = [keys[name] for keys in told if (name := own.global_names[0]) in keys]
        layout = next((way for way in found.layouts if all(_key(way) in keys for keys in votes)), None)
        coords = {**mesh.coords, **own.part.coords}
        if layout is None:
            hint = "ranks hold shapes of it that no one cut gives" if found.layouts else found.hint
            part = replace(own.part, hint=hint, layout=found.refused, coords=coords)
        else:
            part = replace(
                own.part,
                layout=Layout(layout.axes, own.part.layout.flat),
                coords=coords,
                unassigned=found.left_out,
                global_shape=found.padded,
                is_padded=found.padded is not None,
            )
        tensors.append(replace(own, part=part))
    return replace(model, tensors=tuple(tensors))


def expert_layers(names: Iterable[str]) -> set[int | None]:
    """Layers that have experts; None where a name has no number of one."""
    return {_layer_number(name) for name in names if _EXPERTS.search(name)}


def _cut_axis(own: LiveTensor, said: Attributes) -> str:
    """The axis of tensor-parallel ranks that cut it."""
    return "etp" if said.is_expert or _EXPERTS.search(own.global_names[0]) else "tp"


def _layer_number(name: str) -> int | None:
    found = layer_in(name)
    return found[1] if found else None


def _is_stacked(name: str) -> bool:
    return _EXPERTS.search(name) is not None and expert_in(name) is None


def _key(way: Layout) -> str:
    return " x ".join(f"{own.axis}={own.parts} {own.pattern.name}" for own in way.axes) or "no cut"


def _divided(way: Layout, axis: str, shape: tuple[int, ...]) -> int | None:
    """Dim that the ranks along `axis` divide; None where the tensor cannot lie so."""
    try:
        return way.dim(axis, shape)
    except ValueError:
        return None
