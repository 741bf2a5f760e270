"""How the tensors of a plain module with local shapes are distributed over the ranks of the run.

For each tensor, `LayoutFinder` lists layouts that give the shape on this rank. The evidence is, in this order:
attributes of the parameter, rules of the model family, the layout in the checkpoint. Shapes alone prove only that a
tensor of the global shape is not cut. Several layouts can fit a tensor (a dim that is not divisible can be cut in two
ways); the ranks then tell each other which fit, and take the first that fits on all ranks (`place_run`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from ucp.contract.model import recorded_arguments
from ucp.contract.plugins import pattern
from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import choose_family
from ucp.core.index import AtomIndex, Index
from ucp.core.layout import AxisLayout, Layout, Pattern, locate_shard
from ucp.errors import FamilyError, UnknownFamilyError, UsageError, format_list
from ucp.live.adapters import LiveModel
from ucp.live.match.items import find_atoms
from ucp.live.model.parallel.experts import ExpertMap
from ucp.live.model.parallel.numbering import find_expert, find_layer
from ucp.live.model.parallel.rules import FamilyRules, RuleLayouts, cut_patterns
from ucp.live.parts import LiveTensor
from ucp.live.run.mesh import RunMesh

_EXPERTS = re.compile(r"(^|\.)(local_)?experts\.")
_MULTIPLE = "make_vocab_size_divisible_by"
_MULTIPLES = tuple(1 << power for power in range(12))
"""Multiples to which runs pad the rows of each rank, if that is not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """How a parameter is cut, by its attributes; without an attribute its default in Megatron applies."""

    dim: int | None = None
    """Dim that tensor-parallel ranks cut, normalised to >= 0; None if the parameter is not marked."""
    blocks: int = 1
    """Blocks of that dim, each cut by itself (Megatron's stride: gate and up)."""
    is_expert: bool = False
    """Whether it is not reduced over all data-parallel ranks, as experts are not."""

    @classmethod
    def read(cls, param: object) -> Attributes:
        """The attributes of a parameter."""
        dim, ndim = getattr(param, "partition_dim", None), getattr(param, "ndim", 0)
        is_cut = getattr(param, "tensor_model_parallel", False) is True and isinstance(dim, int)
        if isinstance(dim, int) and -ndim <= dim < 0:
            dim += ndim
        return cls(
            dim=dim if is_cut else None,
            blocks=max(int(getattr(param, "partition_stride", 1) or 1), 1),
            is_expert=getattr(param, "allreduce", True) is False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The layouts that a tensor may have."""

    layouts: tuple[Layout, ...]
    """Layouts that give the shape this rank holds, the likeliest first."""
    is_open: bool = False
    """Whether another rank may rule one out."""
    padded: tuple[int, ...] | None = None
    """Global shape in this run, if it has padding rows, which no checkpoint has."""
    refused: Layout = field(default_factory=Layout)
    """Layout for the error message if none fits: the first that the evidence gives, else without a cut."""
    unassigned: str = ""
    """Which elements of the checkpoint's tensor no rank holds, as text."""
    hint: str = ""
    """What to do if there is no layout."""


class LayoutFinder:
    """Finds the layouts of the tensors of one rank."""

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
        """What the layouts were inferred from."""
        self._index, self._mesh, self._rename, self._experts = index, mesh, rename, experts
        self._options, self._count = options, count
        self._degrees = {axis: mesh.degree(axis) for axis in ("tp", "ep", "etp", "dp")}
        self._why_no_rules = ""

    def find_candidates(self, model: LiveModel) -> dict[str, Candidates]:
        """Principal name to candidates, for tensors in the checkpoint whose layout has no axes yet.

        Raises FamilyError, UsageError for attributes or a map of experts that cannot be right.
        """
        candidates: dict[str, Candidates] = {}
        errors: list[str] = []
        for tensor in model.tensors:
            atoms = find_atoms(tensor, self._index, self._rename)
            if not atoms or tensor.part.layout.axes:
                continue
            atom = self._index.atoms[atoms[0]]
            attributes = Attributes.read(model.marked_params.get(tensor.name, model.handles[tensor.name]))
            ndim, dim = len(tensor.part.local_shape), attributes.dim
            if dim is not None and not 0 <= dim < ndim and self._degrees[_find_cut_axis(tensor, attributes)] > 1:
                errors.append(f"{tensor.name}: partition_dim={dim}, expected one from {-ndim} to {ndim - 1}")
            unknown, _ = self._compare_experts(tensor, atom)
            if unknown:
                numbers, last = ", ".join(map(str, unknown)), atom.global_shape[0] - 1
                errors.append(f"{tensor.name}: placement={{{numbers}: ...}}, expected 0 to {last}")
            is_mapped = bool(self._experts.layers) and _is_stacked(tensor.global_names[0])
            if tensor.part.local_shape != atom.global_shape or dim is not None or is_mapped:
                candidates[tensor.name] = self._find_candidates_of(tensor, atom, attributes)
        if errors:
            raise UsageError(
                f"expected partition_dim and placement= within the shapes of the tensors; got\n{format_list(errors)}"
            )
        return candidates

    def _compare_experts(self, tensor: LiveTensor, atom: AtomIndex) -> tuple[list[int], list[int]]:
        """Experts in the user's map that a tensor of all experts lacks, and experts that the map lacks."""
        name = tensor.global_names[0]
        if not _is_stacked(name) or not atom.global_shape:
            return [], []
        return self._experts.compare(atom.global_shape[0], layer=_find_layer_number(name))

    def _find_candidates_of(self, tensor: LiveTensor, atom: AtomIndex, attributes: Attributes) -> Candidates:
        local, shape = tensor.part.local_shape, atom.global_shape
        if len(local) != len(shape):
            return Candidates(layouts=())
        rule = self._apply_rules(atom, local)
        proposed = list(dict.fromkeys(self._propose(tensor, atom, attributes, rule)))
        fitting = tuple(layout for layout in proposed if self._fits(layout, shape, local))
        padded = None
        if not fitting and rule is not None and rule.padded == 0 and self._is_padding(shape, local):
            padded = (local[0] * self._degrees["tp"], *shape[1:])
            fitting = (Layout(self._make_axes("tp", pattern("shard", dim=0))),)
        _, unassigned = self._compare_experts(tensor, atom)
        marked, hint = Layout(), ""
        if attributes.dim is not None and 0 <= attributes.dim < len(local):
            # along the dim in the parameter's attributes, even if its blocks cannot be cut
            axes = self._make_axes(_find_cut_axis(tensor, attributes), pattern("shard", dim=attributes.dim))
            marked = Layout(axes)
            if shape[attributes.dim] % attributes.blocks:
                hint = f"partition_stride={attributes.blocks} does not divide its dim {attributes.dim}: correct it"
        numbers = ", ".join(map(str, unassigned))
        return Candidates(
            layouts=fitting,
            is_open=len(proposed) > 1,
            padded=padded,
            refused=next(iter(proposed), marked),
            unassigned=f"experts {numbers} are not assigned to any rank in placement=" if unassigned else "",
            hint="" if fitting else hint or self._describe_remedy(proposed),
        )

    def _fits(self, layout: Layout, shape: tuple[int, ...], local: tuple[int, ...]) -> bool:
        try:
            part = locate_shard(layout, shape, coords=self._mesh.coords)
        except ValueError:
            return False
        return part.local_shape == local or (part.numel == prod(local) == 0)

    def _propose(
        self, tensor: LiveTensor, atom: AtomIndex, attributes: Attributes, rule: RuleLayouts | None
    ) -> Iterator[Layout]:
        """Layouts that the evidence suggests, whether or not they give the right shape."""
        shape, axis = atom.global_shape, _find_cut_axis(tensor, attributes)
        local, dim = tensor.part.local_shape, attributes.dim
        outer = self._make_expert_axes(tensor.global_names[0], shape) if axis == "etp" else ()
        by_rule = () if rule is None else rule.layouts
        if dim is not None:  # a rule may also give copies of the whole tensor, which divide no dim (None)
            by_rule = tuple(layout for layout in by_rule if _find_dim(layout, axis, shape) in (dim, None))
            by_rule = by_rule if attributes.blocks == 1 else ()
        for layout in by_rule:  # with experts assigned as the user says
            yield Layout((*outer, *(part for part in layout.axes if part.axis != "ep"))) if outer else layout
        patterns: Iterable[Pattern] = ()
        if dim is not None:
            patterns = self._cut_marked(axis, shape, local, attributes)
        elif not by_rule:
            patterns = self._cut_as_recorded(axis, atom, local)
        yield from (Layout((*outer, *self._make_axes(axis, cut))) for cut in patterns)
        if outer and dim is None and not by_rule:
            yield Layout(outer)

    def _cut_marked(
        self, axis: str, shape: tuple[int, ...], local: tuple[int, ...], attributes: Attributes
    ) -> Iterator[Pattern]:
        dim, blocks = attributes.dim, attributes.blocks
        if dim is None or not 0 <= dim < len(shape):
            return
        if blocks == 1:
            yield from cut_patterns(dim, self._degrees[axis], shape, local)
        elif shape[dim] % blocks == 0:
            yield pattern("shard", dim=dim, blocks=(shape[dim] // blocks,) * blocks)

    def _cut_as_recorded(self, axis: str, atom: AtomIndex, local: tuple[int, ...]) -> Iterator[Pattern]:
        """The cut that the checkpoint was saved with, over the ranks of this run."""
        shape = atom.global_shape
        for recorded in atom.layout.axes:
            dim = recorded.dim(shape) if recorded.axis == axis and recorded.parts > 1 else None
            if dim is not None:
                yield recorded.pattern
                if len(recorded.pattern.regions(shape, recorded.parts, 0)) == 1:  # the dim is one block
                    yield from cut_patterns(dim, self._degrees[axis], shape, local)

    def _make_axes(self, axis: str, cut: Pattern) -> tuple[AxisLayout, ...]:
        parts = self._degrees[axis]
        return (AxisLayout(axis, parts, cut),) if parts > 1 else ()

    def _make_expert_axes(self, name: str, shape: tuple[int, ...]) -> tuple[AxisLayout, ...]:
        """The expert-parallel axis of a tensor of all experts of a layer; empty for other tensors."""
        parts = self._degrees["ep"]
        if not _is_stacked(name) or not shape:
            return ()
        mapped = self._experts.make_pattern(layer=_find_layer_number(name))
        return self._make_axes("ep", pattern("shard", dim=0)) if mapped is None else (AxisLayout("ep", parts, mapped),)

    def _is_padding(self, shape: tuple[int, ...], local: tuple[int, ...]) -> bool:
        """Whether the local shape is that of a vocabulary with as many padding rows as Megatron adds."""
        rows, parts, recorded = shape[0], self._degrees["tp"], recorded_arguments(self._index).get(_MULTIPLE)
        full = local[0] * parts
        multiples = (*_MULTIPLES, recorded) if isinstance(recorded, int) and recorded > 0 else _MULTIPLES
        is_longer = local[1:] == shape[1:] and full > rows
        return is_longer and any(full == -(-rows // (multiple * parts)) * multiple * parts for multiple in multiples)

    def _apply_rules(self, atom: AtomIndex, local: tuple[int, ...]) -> RuleLayouts | None:
        rules = self._rules
        try:
            return None if rules is None else rules.find_layouts(atom.name, atom.global_shape, local)
        except FamilyError as error:
            self._why_no_rules = str(error)
            return None

    @cached_property
    def _rules(self) -> FamilyRules | None:
        """Rules of the model's family; None if no family fits. Raises FamilyError."""
        index = self._index
        try:
            family, reasons = choose_family(
                names=index.atoms, shapes=index.shapes, arguments=recorded_arguments(index), options=self._options
            )
        except UnknownFamilyError:
            self._why_no_rules = "no model family fits the names of the checkpoint"
            return None
        self.notes.append(f"layout over the ranks of the run inferred from family {family.name}: {', '.join(reasons)}")
        return FamilyRules(family=family, degrees=self._degrees)

    def _describe_remedy(self, proposed: Sequence[Layout]) -> str:
        cuts_alike = self._degrees["etp"] == self._degrees["tp"]
        idle = {"dp", *(["etp"] if cuts_alike else [])}
        cutting = [axis for axis, parts in self._degrees.items() if parts > 1 and axis not in idle]
        degrees = ", ".join(f"{axis}={self._degrees[axis]}" for axis in cutting)
        if not degrees:
            is_one = self._mesh.topology is not None or self._count == 1
            return "" if is_one else "pass the topology of the run if ranks hold parts of tensors"
        if proposed:
            layouts = " or ".join(dict.fromkeys(map(format_layout, proposed)))
            return (
                f"{layouts} does not give that shape. Correct the topology, or what says how it is cut: "
                "partition_dim of the parameter, placement= or patterns="
            )
        why = f" ({self._why_no_rules})" if self._why_no_rules else ""
        return (
            f"it is not known how it is cut over {degrees}{why}. Pass family= or patterns=, or set "
            "tensor_model_parallel and partition_dim on the parameter"
        )


def find_expert_layers(names: Iterable[str]) -> set[int | None]:
    """Layers that have experts; None for a name without the number of a layer."""
    return {_find_layer_number(name) for name in names if _EXPERTS.search(name)}


def format_layout(layout: Layout) -> str:
    """A layout as text, by which ranks compare layouts."""
    return " x ".join(f"{axis.axis}={axis.parts} {axis.pattern.name}" for axis in layout.axes) or "no cut"


def _find_cut_axis(tensor: LiveTensor, attributes: Attributes) -> str:
    """The tensor-parallel axis that cuts a tensor."""
    return "etp" if attributes.is_expert or _EXPERTS.search(tensor.global_names[0]) else "tp"


def _find_layer_number(name: str) -> int | None:
    match = find_layer(name)
    return match[1] if match else None


def _is_stacked(name: str) -> bool:
    return _EXPERTS.search(name) is not None and find_expert(name) is None


def _find_dim(layout: Layout, axis: str, shape: tuple[int, ...]) -> int | None:
    """Dim that the ranks along `axis` divide; None if they divide none, or the layout does not fit the shape."""
    try:
        return layout.dim(axis, shape)
    except ValueError:
        return None
