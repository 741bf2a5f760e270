"""Layouts over tensor-parallel ranks by the rules of a model family, where the checkpoint itself does not record them.

Names stay as they are in the files: a family only says which parameter a name stands for, and how that is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ucp.contract import registry
from ucp.contract.protocols import SourceOptions
from ucp.core.layout import Layout, infer_global_shape
from ucp.errors import MalformedError, UnknownFamilyError, UnsupportedError, counted, listed
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
    """Rules of the family of one checkpoint: the one that `options` name, else the one that all evidence is for.

    `arguments`: of the training script, as recorded. `where`: the checkpoint, for messages.
    """

    def __init__(self, options: SourceOptions, arguments: Mapping[str, object], where: str) -> None:
        self._options = options
        self._arguments = arguments
        self._where = where
        self.notes: list[str] = []
        """How the family was chosen."""
        self.known_from: Mapping[str, str] = {}
        """Axis to the family that says how tensors lie over it."""

    def layouts(self, tensors: Mapping[str, TensorShapes]) -> dict[str, TensorLayout]:
        """Layout of every tensor. Raises UnknownFamilyError, FamilyError, and others with all names concerned."""
        parts = max((len(own.local) for own in tensors.values()), default=1)
        return self._layouts(self._chosen({name: own.local[0] for name, own in tensors.items()}, parts), tensors)

    def layouts_of(self, wholes: Mapping[str, tuple[Shape, bool]], parts: int) -> dict[str, TensorLayout]:
        """Layout over `parts` ranks of whole tensors: name to shape, and whether it must have a rule.

        Raises UnknownFamilyError, FamilyError, TopologyError and MalformedError, each with all names concerned.
        """
        family = self._chosen({name: shape for name, (shape, _) in wholes.items()}, 1, over=parts)
        dims = {name: (shape, find_cut_dim(family, name)) for name, (shape, _) in wholes.items()}
        local = even_parts(dims, parts)
        shapes = {name: TensorShapes(local=own, declared=wholes[name][1]) for name, own in local.items()}
        return self._layouts(family, shapes)

    def _chosen(self, shapes: Mapping[str, Shape], parts: int, *, over: int = 0) -> Family:
        """The family of tensors of which one of `parts` ranks has these shapes; `over`: ranks, for messages."""
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
                    f"expected a model family that says how {counted(len(shapes), 'tensor is', 'tensors are')} cut "
                    f"over {over} tensor-parallel ranks; {error}"
                ) from None
            raise UnknownFamilyError(
                f"expected universal_checkpoint_info in the model-states files of {self._where}, which says how "
                f"{counted(len(shapes), 'tensor lies', 'tensors lie')} "
                f"over {parts} tensor-parallel ranks; there is none, and {error}"
            ) from None
        self.notes.append(f"laid out over tensor-parallel ranks by the family {family.name}: {', '.join(why)}")
        self.known_from = {"tp": f"family {family.name}"}
        return family

    def _layouts(self, family: Family, tensors: Mapping[str, TensorShapes]) -> dict[str, TensorLayout]:
        read = {name: family.read(name) for name in tensors}
        family.match([name for name, named in read.items() if named is None and tensors[name].declared])
        found: dict[str, TensorLayout] = {}
        wrong: list[str] = []
        for name, own in tensors.items():
            named = read[name]
            try:
                if named is None:
                    found[name] = equal_layout("replicate", own.local)
                else:
                    found[name] = _layout(family, named, own.local)
            except (MisfitError, ValueError) as error:
                wrong.append(f"{name}: {error}")
        if wrong:
            raise MalformedError(
                f"the rules of the family {family.name} do not fit {counted(len(wrong), 'parameter')} "
                f"of {self._where}:\n"
                f"{listed(wrong)}\npass another with --family, or rules of your own with --patterns"
            )
        return found

    def padded_vocabulary(self, name: str, global_shape: Shape) -> int | None:
        """None: a family does not know how large the vocabulary is."""
        return None


def _layout(family: Family, named: ParsedName, shapes: Sequence[Shape]) -> TensorLayout:
    """Layout of a tensor that stands for all of a canonical one, or for one of several that join to it."""
    if named.stacked:
        raise UnsupportedError(f"{named.canonical}: tensors of several layers in one are not known of DeepSpeed")
    degrees = {"tp": len(shapes), "etp": 1}
    match = family.match([named.canonical])[named.canonical]
    alias = named.alias
    if alias is not None and (len(alias.names) > 1 or alias.view or alias.order or alias.groups is not None):
        dims = {axis.dim for axis in match.rule.axes if axis.axis == "tp" and axis.pattern == "shard"}
        if alias.view or alias.order or len(alias.names) == 1 or len(dims) > 1:
            raise MisfitError(f"it stands for {named.canonical} in another arrangement, whose cut is not known")
        return cut_layout(dims.pop(), shapes, None) if dims else equal_layout("replicate", shapes)
    if not match.axes(degrees):
        return equal_layout("replicate", shapes)
    if match.axes(degrees) != ("tp",):
        raise MisfitError("experts over tensor-parallel ranks of their own (etp) are not known of DeepSpeed")
    layout: Layout = match.layout(axes=degrees, local_shapes=list(shapes))
    (axis,) = layout.axes
    return TensorLayout(axis.pattern, infer_global_shape(layout, list(shapes)), len(shapes))
