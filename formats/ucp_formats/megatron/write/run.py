"""What is to be written, and for which run: everything that both kinds of files are made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd

from ucp.core.index import Index, Kind
from ucp.core.topology import Topology
from ucp.errors import TopologyError
from ucp_formats.megatron.extras import scaler_of
from ucp_formats.megatron.names import GridPlace
from ucp_formats.megatron.write.groups import OptimizerGroup
from ucp_formats.megatron.write.model import Model, ModelTensor

__all__ = ["TargetRun", "check_topology", "experts_apart", "grid_problem", "random_states"]


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
