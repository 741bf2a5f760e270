"""Layouts over tensor-parallel ranks by the rules of a model family, for checkpoints that do not record them.

Names stay those of the files: a family only states which parameter a name stands for, and how it is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ucp.contract import registry
from ucp.contract.protocols import SourceOptions
from ucp.core.layout import Layout, infer_global_shape
from ucp.errors import MalformedError, UnknownFamilyError, UnsupportedError, format_count, format_list
from ucp.families.match import find_cut_dim
from ucp.io.pickle.fields import Shape
from ucp.io.pickle.values import Stub
from ucp_formats.deepspeed.tp.layout import (
    MisfitError,
    TensorLayout,
    TensorShapes,
    cut_layout,
    equal_layout,
    even_parts,
)

if TYPE_CHECKING:
    from ucp.families.family import Family
    from ucp.families.naming import ParsedName


def script_arguments(saved: object) -> dict[str, object]:
    """Arguments of the training script: `args`, which Megatron-DeepSpeed saves with the client state."""
    state = saved.state if isinstance(saved, Stub) else saved
    return {str(key): value for key, value in state.items()} if isinstance(state, dict) else {}


class FamilyRules:
    """Rules of a checkpoint's model family: the one in `options`, or one chosen by names, shapes and arguments.

    `arguments`: those of the training script, as recorded. `where`: the checkpoint, for messages.
    """

    def __init__(self, options: SourceOptions, arguments: Mapping[str, object], where: str) -> None:
        self._options = options
        self._arguments = arguments
        self._where = where
        self.notes: list[str] = []
        """How the family was chosen."""
        self.known_from: Mapping[str, str] = {}
        """Axis to the family that states how tensors are split over it."""

    def layouts(self, tensors: Mapping[str, TensorShapes]) -> dict[str, TensorLayout]:
        """Layout of every tensor. Raises UnknownFamilyError, FamilyError or MalformedError, listing all tensors."""
        parts = max((len(shapes.local) for shapes in tensors.values()), default=1)
        family = self._choose_family({name: shapes.local[0] for name, shapes in tensors.items()}, parts)
        return self._find_layouts(family, tensors)

    def layouts_of(self, tensors: Mapping[str, tuple[Shape, bool]], parts: int) -> dict[str, TensorLayout]:
        """Layout of global tensors over `parts` ranks; `tensors`: name to shape, and whether a rule must name it.

        Raises UnknownFamilyError, FamilyError, TopologyError or MalformedError, listing every tensor it is about.
        """
        family = self._choose_family({name: shape for name, (shape, _) in tensors.items()}, 1, over=parts)
        local = even_parts({name: (shape, find_cut_dim(family, name)) for name, (shape, _) in tensors.items()}, parts)
        shapes = {name: TensorShapes(local=local[name], declared=declared) for name, (_, declared) in tensors.items()}
        return self._find_layouts(family, shapes)

    def _choose_family(self, shapes: Mapping[str, Shape], parts: int, *, over: int = 0) -> Family:
        """The family of the tensors that have these shapes on each of `parts` ranks; `over`: ranks of a target."""
        try:
            family, why = registry.choose_family(
                names=list(shapes),
                shapes=shapes,
                arguments=self._arguments,
                axes={"tp": parts},
                options=self._options,
            )
        except UnknownFamilyError as error:
            if over:
                raise UnknownFamilyError(
                    f"expected a model family that says how {format_count(len(shapes), 'tensor is', 'tensors are')} "
                    f"split over {over} tensor-parallel ranks; {error}"
                ) from None
            raise UnknownFamilyError(
                f"expected universal_checkpoint_info in the model-states files of {self._where}, which records how "
                f"{format_count(len(shapes), 'tensor is', 'tensors are')} "
                f"split over {parts} tensor-parallel ranks; there is none, and {error}"
            ) from None
        self.notes.append(f"tensor-parallel layout inferred from the family {family.name}: {', '.join(why)}")
        self.known_from = {"tp": f"family {family.name}"}
        return family

    def _find_layouts(self, family: Family, tensors: Mapping[str, TensorShapes]) -> dict[str, TensorLayout]:
        canonical = {name: family.read(name) for name in tensors}
        family.match([name for name, param in canonical.items() if param is None and tensors[name].declared])
        layouts: dict[str, TensorLayout] = {}
        wrong: list[str] = []
        for name, shapes in tensors.items():
            param = canonical[name]
            try:
                if param is None:
                    layouts[name] = equal_layout("replicate", shapes.local)
                else:
                    layouts[name] = _find_layout(family, param, shapes.local)
            except (MisfitError, ValueError) as error:
                wrong.append(f"{name}: {error}")
        if wrong:
            raise MalformedError(
                f"the rules of the family {family.name} do not fit {format_count(len(wrong), 'parameter')} "
                f"of {self._where}:\n"
                f"{format_list(wrong)}\nName another family with --family, or pass a file of rules with --patterns"
            )
        return layouts

    def padded_vocabulary(self, name: str, global_shape: Shape) -> int | None:
        """None: a family does not state the size of the vocabulary."""
        return None


def _find_layout(family: Family, named: ParsedName, shapes: Sequence[Shape]) -> TensorLayout:
    """Layout of a tensor that is a canonical tensor of the family, or one of several parts of it."""
    if named.stacked:
        raise UnsupportedError(f"{named.canonical}: DeepSpeed has no tensors that stack several layers")
    degrees = {"tp": len(shapes), "etp": 1}
    match = family.match([named.canonical])[named.canonical]
    alias = named.alias
    if alias is not None and (len(alias.names) > 1 or alias.view or alias.order or alias.groups is not None):
        dims = {axis.dim for axis in match.rule.axes if axis.axis == "tp" and axis.pattern == "shard"}
        if alias.view or alias.order or len(alias.names) == 1 or len(dims) > 1:
            raise MisfitError(f"the family has no rule for its arrangement of {named.canonical}")
        return cut_layout(dims.pop(), shapes, None) if dims else equal_layout("replicate", shapes)
    if not match.axes(degrees):
        return equal_layout("replicate", shapes)
    if match.axes(degrees) != ("tp",):
        raise MisfitError("DeepSpeed has no expert tensor parallelism (etp)")
    layout: Layout = match.layout(axes=degrees, local_shapes=list(shapes))
    (axis,) = layout.axes
    return TensorLayout(axis.pattern, infer_global_shape(layout, list(shapes)), len(shapes))
