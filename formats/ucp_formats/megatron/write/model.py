"""The model to write and the run that is to load it: the input of both file layouts.

Tensors have canonical names. `TargetTensor.to_part` gives the slice of an atom that fills a local tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from ucp.contract.layouts import holder_axes
from ucp.core.index import STEP, WEIGHT, Index, Kind
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box, RegionPair
from ucp.core.target import Slice
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import MissingStateError, TopologyError, UnsupportedError, format_list
from ucp.families.family import Family
from ucp.families.match import Match
from ucp.io.torch_file.draft import Part
from ucp_formats.megatron.mesh import count_replicas, pipeline_axes, split_layers
from ucp_formats.megatron.names import EMBEDDING, OUTPUT, GridPlace
from ucp_formats.megatron.source import find_grad_scaler
from ucp_formats.megatron.write.groups import OptimizerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTensor:
    """A global parameter or buffer of the model."""

    match: Match
    """Its canonical name and rule."""
    shape: tuple[int, ...]
    """Elements per dim."""
    kind: Kind
    """Trained, frozen, or a buffer."""
    dtype: DType
    """Type in which the model computes with it."""
    states: Mapping[str, DType]
    """Its elementwise states, with the weight, and the type of each in the source."""

    @property
    def name(self) -> str:
        """Canonical name."""
        return self.match.name

    @property
    def layer(self) -> int | None:
        """Number of its layer in the decoder; None outside the layers."""
        return self.match.fields.get("layer") if self.name.startswith("decoder.layers.") else None

    @property
    def expert(self) -> int | None:
        """Global number of its expert; None outside the routed experts."""
        return self.match.fields.get("expert")

    def to_part(
        self, pairs: tuple[RegionPair, ...], local_shape: tuple[int, ...], state: str, dtype: DType, layout: Layout
    ) -> Part:
        """The slice that fills a local tensor with boxes of this tensor. `layout`: of the state over ranks."""
        numel = Box.full(local_shape).numel
        part = Slice(
            param=self.name, state=state, dtype=dtype, pairs=pairs, local_shape=local_shape, start=0, stop=numel
        )
        return Part(offset=0, slice=part, layout=layout)


@dataclass(frozen=True, kw_only=True)  # no slots: its counts are cached
class TargetModel:
    """All tensors of the model."""

    family: Family
    """Its rules, bound to it."""
    tensors: tuple[TargetTensor, ...]
    """Its tensors, in the order in which Megatron registers them."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name to elements per dim."""
        return {tensor.name: tensor.shape for tensor in self.tensors}

    @cached_property
    def layers(self) -> int:
        """Number of layers of the decoder."""
        return 1 + max((tensor.layer for tensor in self.tensors if tensor.layer is not None), default=-1)

    @cached_property
    def experts(self) -> int:
        """Number of routed experts in a layer; 0 without."""
        return 1 + max((tensor.expert for tensor in self.tensors if tensor.expert is not None), default=-1)

    @property
    def expert_layers(self) -> frozenset[int]:
        """Layers with routed experts."""
        return frozenset(t.layer for t in self.tensors if t.expert is not None and t.layer is not None)

    @property
    def expert_params(self) -> frozenset[str]:
        """Names of the parameters of routed experts."""
        return frozenset(tensor.name for tensor in self.tensors if tensor.expert is not None)


def build_model(index: Index, family: Family, *, weights: DType | None = None) -> TargetModel:
    """The model in `index`, by the rules of `family`. `weights`: type to compute in, if not that of the source.

    Raises FamilyError naming all names without a rule.
    """
    matches = family.match(index.atoms)
    tensors = []
    for name in family.sort_canonical(matches):
        match, atom = matches[name], index.atoms[name]
        shape, states = atom.global_shape, atom.states
        is_buffer = match.buffer or atom.kind is Kind.BUFFER
        dtype = atom.model_dtype or states[WEIGHT].dtype
        elementwise = {key: state for key, state in states.items() if state.global_shape == shape and key != STEP}
        tensors.append(
            TargetTensor(
                match=match,
                shape=shape,
                kind=Kind.BUFFER if is_buffer else atom.kind,
                dtype=weights if weights and not is_buffer else dtype,
                states={key: state.dtype for key, state in elementwise.items()},
            )
        )
    return TargetModel(family=family, tensors=tuple(tensors))


def check_layers(model: TargetModel, *, alike: bool) -> None:
    """Check that no layer and no expert lacks a parameter, which Megatron would look for. Raises MissingStateError.

    `alike`: whether all layers have the same parameters, by the arguments of the run.
    """
    shapes_by_layer: dict[int, dict[str, tuple[int, ...]]] = {layer: {} for layer in range(model.layers)}
    for tensor in model.tensors:
        if tensor.layer is not None:
            shapes_by_layer[tensor.layer][tensor.name.split(".", 3)[3]] = tensor.shape
    common = {name: shape for shapes in shapes_by_layer.values() for name, shape in shapes.items()} if alike else {}
    missing = [f"layer {layer}: every parameter" for layer, shapes in shapes_by_layer.items() if not shapes]
    for layer, shapes in shapes_by_layer.items():
        expected = dict(common)
        for name, shape in shapes.items() if not common else ():  # a layer with experts needs all of them
            head, marker, rest = name.partition(".local_experts.")
            last = rest.partition(".")[2]
            expected |= {f"{head}{marker}{n}.{last}": shape for n in range(model.experts if marker else 0)}
        missing += [
            f"layer {layer}: {name} {list(s)}" for name, s in expected.items() if shapes and shapes.get(name) != s
        ]
    if missing:
        raise MissingStateError(
            f"expected every parameter of all layers; {len(missing)} are missing:\n{format_list(missing)}\n"
            "take a checkpoint with all of them, and drop --include and --exclude; if the layers of the model differ, "
            "say how, e.g. --set moe_layer_freq=[0,1]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRun:
    """A checkpoint of Megatron to write, and the run that is to load it."""

    index: Index
    """The source."""
    model: TargetModel
    """The tensors to write."""
    topology: Topology
    """Topology of the run."""
    arguments: Mapping[str, object]
    """Arguments of the run."""
    chain: tuple[tuple[OptimizerGroup, ...], ...]
    """Groups of each optimizer; empty for weights alone."""
    common: Mapping[str, object]
    """Entries that are equal on all ranks, besides arguments and optimizers: scheduler, counts."""
    rng_states: Mapping[GridPlace, object]
    """RNG states of ranks; empty if the topology changes."""
    dtypes: Mapping[str, str]
    """State to the requested type."""

    @property
    def is_distributed(self) -> bool:
        """Whether the run uses the distributed optimizer: the default."""
        return bool(self.arguments.get("use_distributed_optimizer", True))

    @property
    def is_legacy(self) -> bool:
        """Whether each rank has a folder (`--layout torch`), for one topology."""
        return self.arguments["ckpt_format"] == "torch"

    @property
    def grad_scaler(self) -> Mapping[str, object]:
        """Optimizer entry with the loss scale, if the source has one."""
        scaler = find_grad_scaler(self.index)
        return {} if scaler is None else {"grad_scaler": scaler}

    def is_optimized(self, tensor: TargetTensor) -> bool:
        """Whether an optimizer has states of the tensor."""
        return bool(self.chain) and tensor.kind is Kind.PARAMETER


def make_axes_of(run: TargetRun) -> Callable[[str], tuple[AxisLayout, ...]]:
    """Function from the name of a tensor to its layout over stages, experts and data-parallel ranks.

    States are gathered over data-parallel ranks. Stages are left out for `pipeline_model_parallel_layout`.
    """
    mesh, tensors = run.topology, {tensor.name: tensor for tensor in run.model.tensors}
    is_tied = EMBEDDING in tensors and OUTPUT not in tensors
    try:
        layers_by_chunk = split_layers(run.model.layers, pp=mesh.pp, vpp=mesh.vpp, arguments=run.arguments)
    except UnsupportedError:
        layers_by_chunk = {}
    chunk_of = {layer: chunk for chunk, layers in layers_by_chunk.items() for layer in layers}
    first, last = (0, 0), (mesh.pp - 1, mesh.vpp - 1)

    def axes_of(name: str) -> tuple[AxisLayout, ...]:
        layer, expert = tensors[name].layer, tensors[name].expert
        home = first if name.startswith("embedding.") else last if layer is None else chunk_of.get(layer, last)
        chunks = {first, last} if is_tied and name == EMBEDDING else {home}
        owner = None if expert is None else expert * mesh.ep // run.model.experts
        return (
            *(pipeline_axes(mesh.pp, mesh.vpp, chunks, "order of the layers") if layers_by_chunk else ()),
            *(() if owner is None else holder_axes("ep", mesh.ep, "order of the experts", (owner,))),
            *holder_axes(
                "dp", count_replicas(mesh, expert=owner is not None), "states gathered over data-parallel ranks"
            ),
        )

    return axes_of


def has_expert_optimizer(model: TargetModel, topology: Topology) -> bool:
    """Whether experts have a separate optimizer in a run.

    They do with expert parallelism, and since megatron-core 0.19 also if their tensor-parallel degree differs from that
    of the model (core/tensor_parallel/layers.py: use_expert_pgs).
    """
    return bool(model.experts) and (topology.ep > 1 or topology.expert_tp != topology.tp)


def check_topology(topology: Topology) -> None:
    """Raise TopologyError for a ZeRO stage, which only DeepSpeed has."""
    if topology.zero is not None:
        raise TopologyError(
            f"only DeepSpeed has ZeRO stages: drop zero={topology.zero}. Megatron's optimizer is sharded over dp anyway"
        )


def find_grid_problem(topology: Topology) -> str | None:
    """Why expert ranks do not divide the dense ranks; None if they do."""
    tp, cp, dp, etp, ep = topology.tp, topology.cp, topology.dp, topology.expert_tp, topology.ep
    if (tp * cp * dp) % (etp * ep) == 0:
        return None
    return (
        f"ranks: etp x ep = {etp} x {ep} does not divide tp x cp x dp = {tp} x {cp} x {dp}; "
        f"raise dp to a multiple of {etp * ep // gcd(etp * ep, tp * cp)}, or lower ep"
    )


def select_rng_states(index: Index, topology: Topology, places: Collection[GridPlace]) -> dict[GridPlace, object]:
    """RNG states of the ranks at `places`; none if the topology changes, or if the source lacks one of them."""
    if index.topology != topology:
        return {}
    states = {}
    for extra in index.extras:
        name, _, place = extra.name.partition("/")
        numbers = {part[:2]: part[2:] for part in place.split(".")} if name == "rng_state" and place else {}
        if numbers and set(numbers) <= {"pp", "tp", "ep"} and all(number.isdecimal() for number in numbers.values()):
            tp, pp, ep = (int(numbers.get(axis, 0)) for axis in ("tp", "pp", "ep"))
            states[GridPlace(tp=tp, pp=pp, ep=ep)] = extra.value
    return {place: states[place] for place in places} if states.keys() >= set(places) else {}
