"""How parameters of a torch_dist checkpoint are sharded over the mesh, by the rules of their family and of Megatron.

`.metadata` records boxes of tensors, but no ranks. So a layout is computed from the recorded arguments, and the boxes
that it gives are compared with the recorded ones. If they differ, the layout is in doubt: the model may belong to
another family, which fuses rows in another order. If arguments were not saved, the family is unknown, or a tensor is
recorded in one piece, the layout is unknown, and only the recorded boxes are used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from ucp.contract.layouts import holder_axes
from ucp.contract.plugins import pattern
from ucp.core.index import Doubt, DoubtKind
from ucp.core.layout import AxisLayout, Layout, place
from ucp.core.region import Box
from ucp.errors import FamilyError, TopologyError, UnsupportedError, format_list
from ucp.families.family import Family
from ucp_formats.megatron.buffers.layout import bucket_multiple
from ucp_formats.megatron.groups import expert_numbers
from ucp_formats.megatron.mesh import Chunk, count_replicas, pipeline_axes, split_layers, with_source
from ucp_formats.megatron.names import EMBEDDING, OUTPUT
from ucp_formats.megatron.torch_dist.keys import DistNames
from ucp_formats.megatron.torch_dist.objects import CommonState
from ucp_formats.megatron.torch_dist.states import DistStates
from ucp_formats.megatron.torch_dist.unstack import GlobalTensor

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_LAYER = re.compile(r"\Adecoder\.layers\.(?P<number>\d+)\.")
_ON_LAST_STAGE = ("decoder.", "output_layer.")
"""Prefixes of parameters on the last stage, other than layers."""
_NO_LAYERS = 2
"""The most chunks without a layer: that of the embedding and that of the loss, if these count as layers."""
_INSTANCES = "num_distributed_optimizer_instances"
"""Argument: groups of data-parallel ranks that each hold all states."""
_MODEL_SPACE = "fully_sharded_model_space"

_MOST_RANKS = 1 << 14
"""Most tensor-parallel ranks of the model times those of an expert; a larger product means damaged arguments."""

_Axes = tuple[AxisLayout, ...]
_RuleResult = _Axes | str | FamilyError
"""The axes of a rule; or how recorded boxes differ from those of the rule; or why it cannot be computed."""


@dataclass(slots=True)
class Layouts:
    """Layouts of parameters, if known."""

    by_name: dict[str, Layout] = field(default_factory=dict)
    """Parameter to its layout."""
    contradicted: dict[str, str] = field(default_factory=dict)
    """Parameter whose recorded boxes are not those of its rule, to the difference."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Parameter without a layout, to the reason: it is recorded in one piece, or its rule cannot be computed."""

    def get(self, name: str) -> Layout:
        """The layout of a parameter; one without axes if it is unknown."""
        return self.by_name.get(name, _NO_AXES)

    @property
    def contradictions(self) -> tuple[Doubt, ...]:
        """Where `.metadata` contradicts the rules."""
        lines = format_list(f"{name}: {why}" for name, why in self.contradicted.items())
        text = (
            "expected .metadata to record the pieces that the family's rules give for the topology in the arguments; "
            f"it records others, so rows may be fused in another order:\n{lines}\nChoose the family of the model "
            "(--family, --patterns)"
        )
        return (Doubt(kind=DoubtKind.LAYOUT, text=text),) if self.contradicted else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Which layouts are unknown."""
        lines = format_list(f"{name}: {why}" for name, why in self.unknown.items())
        text = f"the layout of these parameters is unknown; they are read as .metadata records them:\n{lines}"
        return (text,) if self.unknown else ()


_NO_AXES = Layout()


def place_params(
    weights: Mapping[str, GlobalTensor], names: DistNames, common: CommonState, states: DistStates
) -> Layouts:
    """Layouts of the parameters `weights`, whose states are `states`."""
    layouts = Layouts()
    mesh = common.arguments.topology()
    if names.family is None or not common.arguments.raw or (mesh.ranks, mesh.ep) == (1, 1):
        return layouts
    rules = _Rules(names.family, common, weights, states)
    for name, tensor in weights.items():
        axes = rules.tensor_axes(tensor)
        if isinstance(axes, FamilyError):
            layouts.unknown[name] = str(axes)
        elif isinstance(axes, str):
            is_sharded = any(box.sizes != tensor.shape for box, _ in tensor.boxes)
            (layouts.contradicted if is_sharded else layouts.unknown)[name] = axes
        else:
            layouts.by_name[name] = rules.layout(name, axes)
    return layouts


class _Rules:
    """Rules of the family and of Megatron, for one run."""

    def __init__(
        self, family: Family, common: CommonState, weights: Mapping[str, GlobalTensor], states: DistStates
    ) -> None:
        self._family = family
        self._arguments = common.arguments
        self._mesh = common.arguments.topology()
        self._known_from = f"arguments of {os.path.basename(common.file) or 'the common state'}"
        self._weights = weights
        self._states = states
        self._experts = expert_numbers(weights)
        self._results: dict[tuple[object, ...], _RuleResult] = {}
        self._layouts: dict[tuple[object, ...], Layout] = {}

    def tensor_axes(self, tensor: GlobalTensor) -> _RuleResult:
        """The axes of the rule of a parameter, compared with the boxes that are recorded."""
        degrees = {"tp": self._mesh.tp, "etp": self._mesh.expert_tp}
        boxes = tuple(stored.box for stored in tensor.boxes)
        if set(degrees.values()) == {1} and set(boxes) == {Box.full(tensor.shape)}:
            return ()
        key = (_NUMBER.sub("#", tensor.name), tensor.shape, boxes)
        if key not in self._results:
            self._results[key] = self._compute_axes(tensor, boxes, degrees)
        return self._results[key]

    def _compute_axes(self, tensor: GlobalTensor, boxes: Collection[Box], degrees: Mapping[str, int]) -> _RuleResult:
        if prod(degrees.values()) > _MOST_RANKS:
            ranks = " and ".join(map(str, degrees.values()))
            return FamilyError(f"tensor-parallel ranks: {ranks}, more than any run has")
        try:
            match = self._family.match([tensor.name])[tensor.name]
            layout = match.layout(axes=degrees, global_shape=tensor.shape)
        except FamilyError as error:
            return error
        if {box for box in _boxes(layout, tensor.shape) if box.numel} != {box for box in boxes if box.numel}:
            by_rule = ", ".join(f"{axis.axis}={axis.parts} {axis.pattern.name}" for axis in layout.axes)
            return f"{' '.join(map(str, boxes))} of {list(tensor.shape)}, but its rule is {by_rule}"
        return with_source(layout, f"family {self._family.name}")

    def layout(self, name: str, axes: _Axes) -> Layout:
        """The layout of a parameter; the same object for equal layouts."""
        number, count = self._experts.get(name, (0, 0))
        owner = number // (count // self._mesh.ep) if count and count % self._mesh.ep == 0 else -1
        chunks, share = self._chunks(name), self._optimizer_share(name)
        is_copied = name not in self._states.bucket_ranges and self._is_copied(name, axes)
        key = (axes, owner, bool(count), chunks, share, is_copied)
        if key not in self._layouts:
            outer = pipeline_axes(self._mesh.pp, self._mesh.vpp, chunks, self._known_from) if chunks else ()
            if owner >= 0:
                outer += holder_axes("ep", self._mesh.ep, self._known_from, (owner,))
            if is_copied:
                outer += holder_axes("dp", count_replicas(self._mesh, expert=bool(count)), self._known_from)
            self._layouts[key] = Layout((*outer, *axes), () if share is None else (share,))
        return self._layouts[key]

    def _chunks(self, name: str) -> tuple[Chunk, ...]:
        """Chunks of stages that hold a parameter; none if that is unknown."""
        if self._mesh.pp == 1 or not self._chunk_of_layer:
            return ()
        layer = _LAYER.match(name)
        if layer is not None:
            chunk = self._chunk_of_layer.get(int(layer["number"]))
            return () if chunk is None else (chunk,)
        first, last = (0, 0), (self._mesh.pp - 1, self._mesh.vpp - 1)
        if name == EMBEDDING and OUTPUT not in self._weights and not self._arguments.has_output_weight:
            return (first, last)
        return (first,) if name.startswith("embedding.") else (last,) if name.startswith(_ON_LAST_STAGE) else ()

    @cached_property
    def _chunk_of_layer(self) -> Mapping[int, Chunk]:
        """Layer to the chunk that holds it; empty if the arguments do not determine that."""
        matches = filter(None, map(_LAYER.match, self._weights))
        layers = 1 + max((int(match["number"]) for match in matches), default=-1)
        pp, vpp = self._mesh.pp, self._mesh.vpp
        if not layers or pp * vpp > layers + _NO_LAYERS:
            return {}
        try:
            chunks = split_layers(layers, pp=pp, vpp=vpp, arguments=self._arguments.raw)
        except (TopologyError, UnsupportedError):
            return {}
        chunk_of_layer = {layer: chunk for chunk, numbers in chunks.items() for layer in numbers}
        return chunk_of_layer if len(chunk_of_layer) == layers else {}

    def _optimizer_share(self, name: str) -> AxisLayout | None:
        """How the distributed optimizer partitions a parameter's states; None if it does not, or if that is unknown."""
        bucket_range = self._states.bucket_ranges.get(name)
        ranks = count_replicas(self._mesh, expert=name in self._experts)
        if bucket_range is None or ranks == 1 or self._arguments.raw.get(_INSTANCES) not in (None, 1):
            return None
        multiple = bucket_multiple(ranks, for_busbw=bool(self._arguments.pads_buckets))
        share = bucket_range.find_share(ranks, multiple=multiple)
        if share is None:
            return None
        partition = pattern("partition", start=bucket_range.start, share=share)
        return AxisLayout("dp", ranks, partition, "buckets of the distributed optimizer")

    def _is_copied(self, name: str, axes: _Axes) -> bool:
        """Whether every data-parallel rank holds all of a parameter; false if the files show that it is partitioned."""
        if self._states.layout != _MODEL_SPACE or name not in self._states.fragments:
            return True
        boxes = set(_boxes(Layout(axes), self._weights[name].shape))
        by_state = self._states.fragments[name].values()
        return all(fragment.box in boxes for fragments in by_state for fragment in fragments)


def _boxes(layout: Layout, shape: tuple[int, ...]) -> Iterator[Box]:
    """Boxes that a layout places on its ranks."""
    for rank in layout.ranks():
        for placed in place(layout, shape, coords=rank):
            yield placed.box
