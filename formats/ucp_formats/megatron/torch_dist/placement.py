"""How parameters of a torch_dist checkpoint lie over the mesh: by the rules of their family, and Megatron's own laws.

`.metadata` records boxes of tensors, and no rank. So a layout is computed from the recorded arguments, and the boxes
are compared with what it places. Tensors that ranks cut otherwise are in doubt: their family may be another one, which
joins and splits rows in another order. Where arguments were not saved, the family is not known, or a tensor is recorded
whole, no layout is stated; the boxes alone tell where tensors lie.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from ucp.contract.layouts import holder_axes
from ucp.contract.plugins import pattern
from ucp.core.index import Doubt, DoubtKind
from ucp.core.layout import AxisLayout, Layout, place
from ucp.core.region import Box
from ucp.errors import FamilyError, TopologyError, UnsupportedError, listed
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
_LAST = ("decoder.", "output_layer.")
"""Beginnings of names of what is on the last stage, layers left out."""
_NO_LAYERS = 2
"""Chunks without a layer, at most: those of the embedding and of the loss, where these count as layers."""
_INSTANCES = "num_distributed_optimizer_instances"
"""Argument: groups of data-parallel ranks that each hold all states."""
_MODEL_SPACE = "fully_sharded_model_space"

_MOST_RANKS = 1 << 14
"""Tensor-parallel ranks of the model times those of an expert, at most; more is a damaged number."""

_Axes = tuple[AxisLayout, ...]
_Cut = _Axes | str | FamilyError
"""The axes of a rule; why recorded pieces are not those that they place; or why they cannot be computed."""


@dataclass(slots=True)
class Layouts:
    """What is known of how parameters lie."""

    by_name: dict[str, Layout] = field(default_factory=dict)
    """Parameter to its layout."""
    contradicted: dict[str, str] = field(default_factory=dict)
    """Parameter that ranks cut in other pieces than its rule, to what these are."""
    unstated: dict[str, str] = field(default_factory=dict)
    """Parameter of which no layout is stated, to the reason: it is recorded whole, or its rule cannot be computed."""

    def get(self, name: str) -> Layout:
        """The layout of a parameter; one without an axis where it is not stated."""
        return self.by_name.get(name, _NOWHERE)

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """What `.metadata` and the rules say differently."""
        lines = listed(f"{name}: {why}" for name, why in self.contradicted.items())
        text = (
            "expected the pieces that the rules of the family place over the ranks of the arguments; .metadata has "
            f"others, and rows may lie in another order than these rules join and split them in:\n{lines}\nChoose the "
            "family of the model (--family, --patterns)"
        )
        return (Doubt(kind=DoubtKind.LAYOUT, text=text),) if self.contradicted else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Which layouts are not stated."""
        lines = listed(f"{name}: {why}" for name, why in self.unstated.items())
        return (f"read as .metadata records them, with no layout stated:\n{lines}",) if self.unstated else ()


_NOWHERE = Layout()


def place_params(
    weights: Mapping[str, GlobalTensor], names: DistNames, common: CommonState, states: DistStates
) -> Layouts:
    """Layouts of the parameters `weights`, whose states are `states`."""
    found = Layouts()
    mesh = common.arguments.topology()
    if names.family is None or not common.arguments.raw or (mesh.ranks, mesh.ep) == (1, 1):
        return found
    laws = _Laws(names.family, common, weights, states)
    for name, whole in weights.items():
        cut = laws.cut(whole)
        if isinstance(cut, FamilyError):
            found.unstated[name] = str(cut)
        elif isinstance(cut, str):
            is_cut = any(piece.box.sizes != whole.shape for piece in whole.boxes)
            (found.contradicted if is_cut else found.unstated)[name] = cut
        else:
            found.by_name[name] = laws.layout(name, cut)
    return found


class _Laws:
    """Rules of the family and of Megatron, for one run."""

    def __init__(
        self, family: Family, common: CommonState, weights: Mapping[str, GlobalTensor], states: DistStates
    ) -> None:
        self._family = family
        self._arguments = common.arguments
        self._mesh = common.arguments.topology()
        self._from = f"arguments of {os.path.basename(common.file) or 'the common state'}"
        self._weights = weights
        self._states = states
        self._experts = expert_numbers(weights)
        self._cuts: dict[tuple[object, ...], _Cut] = {}
        self._layouts: dict[tuple[object, ...], Layout] = {}

    def cut(self, whole: GlobalTensor) -> _Cut:
        """The axes of the rule of a parameter, compared with the pieces that are recorded."""
        degrees = {"tp": self._mesh.tp, "etp": self._mesh.expert_tp}
        boxes = tuple(piece.box for piece in whole.boxes)
        if set(degrees.values()) == {1} and set(boxes) == {Box.full(whole.shape)}:
            return ()
        key = (_NUMBER.sub("#", whole.name), whole.shape, boxes)
        if key not in self._cuts:
            self._cuts[key] = self._compared(whole, boxes, degrees)
        return self._cuts[key]

    def _compared(self, whole: GlobalTensor, boxes: Collection[Box], degrees: Mapping[str, int]) -> _Cut:
        if prod(degrees.values()) > _MOST_RANKS:
            ranks = " and ".join(map(str, degrees.values()))
            return FamilyError(f"tensor-parallel ranks: {ranks}, more than any run has")
        try:
            match = self._family.match([whole.name])[whole.name]
            layout = match.layout(axes=degrees, global_shape=whole.shape)
        except FamilyError as error:
            return error
        placed = (own.box for rank in layout.ranks() for own in place(layout, whole.shape, coords=rank))
        if {box for box in placed if box.numel} != {box for box in boxes if box.numel}:
            by_rule = ", ".join(f"{axis.axis}={axis.parts} {axis.pattern.name}" for axis in layout.axes)
            return f"{' '.join(map(str, boxes))} of {list(whole.shape)}, and by its rule {by_rule}"
        return with_source(layout, f"family {self._family.name}")

    def layout(self, name: str, cut: _Axes) -> Layout:
        """The layout, the same object again for parameters that lie alike."""
        number, count = self._experts.get(name, (0, 0))
        owner = number // (count // self._mesh.ep) if count and count % self._mesh.ep == 0 else -1
        chunks, share = self._chunks(name), self._share(name)
        copied = name not in self._states.bucket_ranges and self._is_copied(name, cut)
        key = (cut, owner, bool(count), chunks, share, copied)
        if key not in self._layouts:
            axes = pipeline_axes(self._mesh.pp, self._mesh.vpp, chunks, self._from) if chunks else ()
            if owner >= 0:
                axes += holder_axes("ep", self._mesh.ep, self._from, (owner,))
            copies = count_replicas(self._mesh, expert=bool(count))
            if copied:
                axes += holder_axes("dp", copies, self._from)
            self._layouts[key] = Layout((*axes, *cut), () if share is None else (share,))
        return self._layouts[key]

    def _chunks(self, name: str) -> tuple[Chunk, ...]:
        """Chunks of stages that hold a parameter; none where no law says it."""
        if self._mesh.pp == 1 or not self._homes:
            return ()
        layer = _LAYER.match(name)
        if layer is not None:
            home = self._homes.get(int(layer["number"]))
            return () if home is None else (home,)
        first, last = (0, 0), (self._mesh.pp - 1, self._mesh.vpp - 1)
        if name == EMBEDDING and OUTPUT not in self._weights and not self._arguments.untied:
            return (first, last)
        return (first,) if name.startswith("embedding.") else (last,) if name.startswith(_LAST) else ()

    @cached_property
    def _homes(self) -> Mapping[int, Chunk]:
        """Layer to the chunk that holds it; empty where the arguments do not deal the layers out."""
        found = (_LAYER.match(name) for name in self._weights)
        layers = 1 + max((int(own["number"]) for own in found if own is not None), default=-1)
        pp, vpp = self._mesh.pp, self._mesh.vpp
        if not layers or pp * vpp > layers + _NO_LAYERS:
            return {}
        try:
            chunks = split_layers(layers, pp=pp, vpp=vpp, arguments=self._arguments.raw)
        except (TopologyError, UnsupportedError):
            return {}
        homes = {layer: chunk for chunk, own in chunks.items() for layer in own}
        return homes if len(homes) == layers else {}

    def _share(self, name: str) -> AxisLayout | None:
        """How the distributed optimizer cuts a parameter's states; None where no law says it, or nothing is cut."""
        own = self._states.bucket_ranges.get(name)
        ranks = count_replicas(self._mesh, expert=name in self._experts)
        if own is None or ranks == 1 or self._arguments.raw.get(_INSTANCES) not in (None, 1):
            return None
        share = own.find_share(ranks, multiple=bucket_multiple(ranks, for_busbw=bool(self._arguments.pads_buckets)))
        if share is None:
            return None
        made = pattern("partition", start=own.start, share=share)
        return AxisLayout("dp", ranks, made, "buckets of the distributed optimizer")

    def _is_copied(self, name: str, cut: _Axes) -> bool:
        """Whether every data-parallel rank holds what there is of a parameter; false where files show it cut."""
        if self._states.layout != _MODEL_SPACE or name not in self._states.fragments:
            return True
        layout, shape = Layout(cut), self._weights[name].shape
        boxes = {own.box for rank in layout.ranks() for own in place(layout, shape, coords=rank)}
        pieces = self._states.fragments[name].values()
        return all(piece.box in boxes for own in pieces for piece in own)
