"""What is to be written, and for which run: everything that both kinds of files are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import gcd

from ucp.contract.axes import along
from ucp.core.index import Index, Kind
from ucp.core.layout import AxisLayout
from ucp.core.topology import Topology
from ucp.errors import TopologyError, UnsupportedError
from ucp_formats.megatron.extras import scaler_of
from ucp_formats.megatron.names import GridPlace
from ucp_formats.megatron.run.mesh import data_parallel, stages
from ucp_formats.megatron.run.stages import stage_layers
from ucp_formats.megatron.write.groups import OptimizerGroup
from ucp_formats.megatron.write.model import Model, ModelTensor

__all__ = [
    "EMBEDDING",
    "OUTPUT",
    "TargetRun",
    "axes_of",
    "check_topology",
    "experts_apart",
    "grid_problem",
    "random_states",
]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


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
        found = scaler_of(self.index)
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
        chunks = stage_layers(run.model.layers, pp=mesh.pp, vpp=mesh.vpp, arguments=run.arguments)
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
            *(stages(mesh.pp, mesh.vpp, there, "order of the layers") if chunks else ()),
            *(() if owner is None else along("ep", mesh.ep, "order of the experts", (owner,))),
            *along("dp", data_parallel(mesh, expert=owner is not None), "states gathered over data-parallel ranks"),
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
