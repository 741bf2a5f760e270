"""What is to be written, and for which run: the model under canonical names, and all that both kinds of files take.

Sources name parameters in styles of their own, and some keep as several tensors what Megatron keeps as one (query, key
and value). A family says how they join; from here on there is one tensor per canonical name, and `parts` says which
stretches of which atoms fill any piece of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from ucp.errors import MissingStateError, TopologyError, UnsupportedError, listed
from ucp.families.family import Family
from ucp.families.match import Match
from ucp.io.torch_file.draft import Part
from ucp_formats.megatron.mesh import count_replicas, pipeline_axes, split_layers
from ucp_formats.megatron.names import EMBEDDING, OUTPUT, GridPlace
from ucp_formats.megatron.source import find_grad_scaler
from ucp_formats.megatron.write.groups import OptimizerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A parameter or buffer of the model, as a whole."""

    name: str
    """Canonical name."""
    match: Match
    """The rule it falls under."""
    shape: tuple[int, ...]
    """Elements per dim."""
    kind: Kind
    """Trained, frozen, or a buffer."""
    dtype: DType
    """Element type that the model computes in."""
    states: Mapping[str, DType]
    """States with a value per element, the weight among them, and the type that the source has each in."""

    @property
    def layer(self) -> int | None:
        """Number of its layer among those of the decoder; None for a tensor of none of them."""
        return self.match.fields.get("layer") if self.name.startswith("decoder.layers.") else None

    @property
    def expert(self) -> int | None:
        """Number of its expert among all; None for a tensor of no routed expert."""
        return self.match.fields.get("expert")

    def parts(
        self,
        pairs: Sequence[RegionPair],
        local_shape: tuple[int, ...],
        state: str,
        dtype: DType,
        layout: Layout | None = None,
    ) -> tuple[Part, ...]:
        """The slice that fills a local tensor which holds `pairs` of this one, by its `layout`."""
        own = Slice(
            param=self.name,
            state=state,
            dtype=dtype,
            pairs=tuple(pairs),
            local_shape=local_shape,
            start=0,
            stop=Box.full(local_shape).numel,
        )
        return (Part(offset=0, slice=own, layout=layout),)


@dataclass(frozen=True, kw_only=True)  # no slots: its counts are asked for once per tensor, and kept
class Model:
    """All tensors of the model."""

    family: Family
    """Its rules, fitted to it."""
    tensors: tuple[ModelTensor, ...]
    """Its tensors, in the order in which Megatron registers them."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name to elements per dim."""
        return {own.name: own.shape for own in self.tensors}

    @property
    def dtypes(self) -> set[DType]:
        """Types that it computes in."""
        return {own.dtype for own in self.tensors if own.kind is Kind.PARAMETER}

    @cached_property
    def layers(self) -> int:
        """Layers of the decoder."""
        return 1 + max((own.layer for own in self.tensors if own.layer is not None), default=-1)

    @cached_property
    def experts(self) -> int:
        """Routed experts of a layer; 0 where there are none."""
        return 1 + max((own.expert for own in self.tensors if own.expert is not None), default=-1)

    @property
    def expert_layers(self) -> frozenset[int]:
        """Layers that have routed experts."""
        return frozenset(own.layer for own in self.tensors if own.expert is not None and own.layer is not None)

    @property
    def expert_atoms(self) -> frozenset[str]:
        """Names of the atoms of routed experts."""
        return frozenset(own.name for own in self.tensors if own.expert is not None)


def target_model(index: Index, family: Family, *, weights: DType | None = None) -> Model:
    """The model whose atoms `index` holds, by the rules of `family`. `weights`: type to compute in, if not their own.

    Raises
    ------
    FamilyError
        Names without a rule; all are named.
    UnsupportedError
        Atoms that cannot be told apart by layer, or tensors of which parts are missing.
    """
    matches = family.match(index.atoms)
    tensors = []
    for name in family.sort_canonical(matches):
        match, atom = matches[name], index.atoms[name]
        shape, states = atom.global_shape, atom.states
        is_buffer = match.buffer or atom.kind is Kind.BUFFER
        dtype = atom.model_dtype or states[WEIGHT].dtype
        tensors.append(
            ModelTensor(
                name=match.name,
                match=match,
                shape=shape,
                kind=Kind.BUFFER if is_buffer else atom.kind,
                dtype=weights if weights and not is_buffer else dtype,
                states={key: own.dtype for key, own in states.items() if own.global_shape == shape and key != STEP},
            )
        )
    return Model(family=family, tensors=tuple(tensors))


def check_layers(model: Model, *, alike: bool) -> None:
    """Prove that no layer and no expert lacks a parameter: Megatron would ask for it, and not find it.

    `alike`: whether all layers have the same parameters, by the arguments of the run. Raises MissingStateError.
    """
    held: dict[int, dict[str, tuple[int, ...]]] = {layer: {} for layer in range(model.layers)}
    for own in model.tensors:
        if own.layer is not None:
            held[own.layer][own.name.split(".", 3)[3]] = own.shape
    wanted = {name: shape for layer in held.values() for name, shape in layer.items()} if alike else {}
    lacking = [f"layer {layer}: every parameter" for layer, own in held.items() if not own]
    for layer, names in held.items():
        expected = dict(wanted)
        for name, shape in names.items() if not wanted else ():  # a layer with one expert has all
            head, marker, rest = name.partition(".local_experts.")
            last = rest.partition(".")[2]
            expected |= {f"{head}{marker}{n}.{last}": shape for n in range(model.experts if marker else 0)}
        lacking += [
            f"layer {layer}: {name} {list(s)}" for name, s in expected.items() if names and names.get(name) != s
        ]
    if lacking:
        raise MissingStateError(
            f"expected every parameter of all layers; {len(lacking)} are not there:\n{listed(lacking)}\n"
            "take a checkpoint with all of them, and drop --include and --exclude; where layers differ, say how, as in "
            "--set moe_layer_freq=[0,1]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRun:
    """A checkpoint of Megatron to be written, and the run that is to load it."""

    index: Index
    """The source."""
    model: Model
    """Its tensors."""
    topology: Topology
    """Layout of the run."""
    arguments: Mapping[str, object]
    """Arguments of the run."""
    chain: tuple[tuple[OptimizerGroup, ...], ...]
    """Groups of each optimizer; empty for weights alone."""
    common: Mapping[str, object]
    """What all ranks have in common beside arguments and optimizers: scheduler, counts."""
    random: Mapping[GridPlace, object]
    """Random states of ranks; empty where the layout changes."""
    dtypes: Mapping[str, str]
    """State to the type asked for."""

    @property
    def distributed(self) -> bool:
        """Whether the run uses the distributed optimizer; it does unless its arguments say otherwise."""
        return bool(self.arguments.get("use_distributed_optimizer", True))

    @property
    def is_legacy(self) -> bool:
        """Whether it is saved by ranks, for one layout."""
        return self.arguments["ckpt_format"] == "torch"

    @property
    def scaler(self) -> Mapping[str, object]:
        """Entry of an optimizer with the scale of the loss, where the source has one."""
        found = find_grad_scaler(self.index)
        return {} if found is None else {"grad_scaler": found}

    def is_optimized(self, tensor: ModelTensor) -> bool:
        """Whether an optimizer has states of the tensor."""
        return bool(self.chain) and tensor.kind is Kind.PARAMETER


def axes_of(run: TargetRun) -> Callable[[str], tuple[AxisLayout, ...]]:
    """Name of a tensor to the axes of the run over which it lies, but for those that its family cuts it along.

    The files have states gathered over data-parallel ranks. Stages are left out where the arguments do not deal the
    layers out evenly (`pipeline_model_parallel_layout`).
    """
    mesh, tensors = run.topology, {own.name: own for own in run.model.tensors}
    is_tied = EMBEDDING in tensors and OUTPUT not in tensors
    try:
        chunks = split_layers(run.model.layers, pp=mesh.pp, vpp=mesh.vpp, arguments=run.arguments)
    except UnsupportedError:
        chunks = {}
    homes = {layer: chunk for chunk, layers in chunks.items() for layer in layers}
    first, last = (0, 0), (mesh.pp - 1, mesh.vpp - 1)

    def axes(name: str) -> tuple[AxisLayout, ...]:
        own = tensors[name]
        home = first if name.startswith("embedding.") else last if own.layer is None else homes.get(own.layer, last)
        there = {first, last} if is_tied and name == EMBEDDING else {home}
        owner = None if own.expert is None else own.expert * mesh.ep // run.model.experts
        return (
            *(pipeline_axes(mesh.pp, mesh.vpp, there, "order of the layers") if chunks else ()),
            *(() if owner is None else holder_axes("ep", mesh.ep, "order of the experts", (owner,))),
            *holder_axes(
                "dp", count_replicas(mesh, expert=owner is not None), "states gathered over data-parallel ranks"
            ),
        )

    return axes


def experts_apart(model: Model, topology: Topology) -> bool:
    """Whether experts have an optimizer of their own in a run.

    Where experts are parallel, and since megatron-core 0.19 where they are cut over other ranks than the rest as well
    (core/tensor_parallel/layers.py: use_expert_pgs).
    """
    return bool(model.experts) and (topology.ep > 1 or topology.expert_tp != topology.tp)


def check_topology(topology: Topology) -> None:
    """Raise TopologyError for words of another framework."""
    if topology.zero is not None:
        raise TopologyError(
            f"ZeRO stages are DeepSpeed's: drop zero={topology.zero}. Megatron's optimizer is cut over dp anyway"
        )


def grid_problem(own: Topology) -> str | None:
    """Why ranks of experts do not share those of the rest; None when they do."""
    ranks, expert = own.tp * own.cp * own.dp, own.expert_tp * own.ep
    if ranks % expert == 0:
        return None
    return (
        f"ranks: etp x ep = {own.expert_tp} x {own.ep} does not divide tp x cp x dp = {own.tp} x {own.cp} x {own.dp}; "
        f"raise dp to a multiple of {expert // gcd(expert, own.tp * own.cp)}, or lower ep"
    )


def random_states(index: Index, topology: Topology, wanted: Iterable[GridPlace]) -> dict[GridPlace, object]:
    """Random states of all ranks `wanted`, where the run has the layout that they were saved at; else nothing."""
    if index.topology != topology:
        return {}
    found = {}
    for extra in index.extras:
        name, _, place = extra.name.partition("/")
        numbers = {part[:2]: part[2:] for part in place.split(".")} if name == "rng_state" and place else {}
        if numbers and set(numbers) <= {"pp", "tp", "ep"} and all(number.isdecimal() for number in numbers.values()):
            tp, pp, ep = (int(numbers.get(axis, 0)) for axis in ("tp", "pp", "ep"))
            found[GridPlace(tp=tp, pp=pp, ep=ep)] = extra.value
    places = list(wanted)
    return {place: found[place] for place in places} if found.keys() >= set(places) else {}
