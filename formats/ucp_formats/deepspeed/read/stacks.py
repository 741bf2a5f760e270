"""Experts that AutoEP stacked: each rank trains `PREFIX.w1`, `.w2` and `.w3`, with its experts along dim 0.

`ds_autoep_layers` of the model-states files lists the layers with experts (`_save_moe_checkpoint`, runtime/engine.py,
0.19.8). Optimizer files and `param_shapes` have the stack of each expert-parallel rank. Rank 0 has the first experts,
and so on, unless `expert_placement` says otherwise. Up to ZeRO-2, the model's weights are in a file per expert, as
`PREFIX.w1.EXPERT`.

>>> layer = {"expert_key_prefix": "mlp.experts", "num_experts": 4, "ep_size": 2}
>>> stacks = ExpertStacks.of({"ds_autoep_layers": [layer]}, "the file")
>>> stacks.ep, stacks.global_shape("mlp.experts.w2", (2, 8, 5))
(2, (4, 8, 5))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ucp.contract.plugins import pattern
from ucp.contract.ranks import Problems
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box
from ucp.core.tensor import TensorRef
from ucp.core.topology import ExpertsByRank
from ucp.core.union import ShardedTensor, ShardSet, StoredShard
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.fields import Shape, require_integer, require_mapping, require_sequence, text
from ucp_formats.deepspeed.placement import divide_evenly, read_experts_by_rank

LAYERS = "ds_autoep_layers"
"""Key of the list of layers."""
INFO = "universal_checkpoint_info"
"""Key of a record that has the list too; only this one is in universal checkpoints that ucp wrote."""
EXPERT_PATTERNS = "expert_parameter_patterns"
"""Key of the regular expressions of the stacks' names, in that record too."""
PARTS = ("w1", "w2", "w3")
"""Projections of an expert: gate, down and up."""
_ROUTER = ".router.gate.weight"


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """The stacked experts of a run."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """Parameter to the number of experts in the stacks of all ranks."""
    ep: int = 1
    """Expert-parallel ranks."""
    layers: tuple[str, ...] = ()
    """Names of the modules that AutoEP put in place of the model's."""
    by_rank: Mapping[str, ExpertsByRank] = field(default_factory=dict)
    """Parameter to the experts of each rank, where they are not equal runs in order."""
    known_from: str = LAYERS
    """Where that is known from."""

    @classmethod
    def of(cls, root: Mapping[object, object], where: str) -> ExpertStacks:
        """The stacks that a model-states file records; none for a run without AutoEP. `where`: for messages."""
        info = root.get(INFO)
        recorded = (root.get(LAYERS), root.get("autoep_layers"), info.get(LAYERS) if isinstance(info, dict) else None)
        saved = next((layers for layers in recorded if layers is not None), None)
        counts: dict[str, int] = {}
        by_rank: dict[str, ExpertsByRank] = {}
        degrees: set[int] = set()
        names: list[str] = []
        for item in () if saved is None else require_sequence(saved, LAYERS):
            layer = require_mapping(item, f"a layer in {LAYERS}")
            prefix = text(layer.get("expert_key_prefix"), f"expert_key_prefix in {LAYERS}")
            count, ep = (require_integer(layer.get(key), f"{key} of {prefix}") for key in ("num_experts", "ep_size"))
            if ep < 1 or count < 1:
                raise MalformedError(f"expected ep_size and num_experts of {prefix} in {where} >= 1; got {ep}, {count}")
            stacked = [f"{prefix}.{part}" for part in PARTS]
            placed = read_experts_by_rank(layer, stacked, count, ep, f"{prefix} in {where}")
            if placed != divide_evenly(count, ep):
                by_rank |= dict.fromkeys(stacked, placed)
            degrees.add(ep)
            names.append(prefix.removesuffix(".experts"))
            counts |= dict.fromkeys(stacked, count)
        if len(degrees) > 1:
            raise UnsupportedError(f"expected one ep_size in {LAYERS} of {where}; got {sorted(degrees)}")
        return cls(counts, max(degrees, default=1), tuple(names), by_rank)

    @classmethod
    def of_names(cls, shapes: Mapping[str, Shape]) -> ExpertStacks:
        """The stacks that parameters have the names of, in layers with a router; `shapes`: of all parameters.

        >>> shapes = {f"mlp.experts.{part}": (4, 8, 5) for part in PARTS} | {"mlp.router.gate.weight": (4, 5)}
        >>> ExpertStacks.of_names(shapes).layers
        ('mlp',)
        """
        routers = [name.removesuffix(_ROUTER) for name in shapes if name.endswith(_ROUTER)]
        layers = {}
        for layer in routers:
            stacked = [shapes.get(f"{layer}.experts.{part}", ()) for part in PARTS]
            if {(len(shape), *shape[:1]) for shape in stacked} == {(3, shapes[f"{layer}{_ROUTER}"][0])}:
                layers[layer] = stacked[0][0]
        counts = {f"{layer}.experts.{part}": count for layer, count in layers.items() for part in PARTS}
        return cls(counts, layers=tuple(layers), known_from="names of the parameters")

    def router_copies(self, names: Collection[str]) -> dict[str, str]:
        """Second name of a router's tensor to the first, for those among the module's `names`.

        AutoEP keeps the router as `router` and again under the name that the model gave it, such as `gate`. Files have
        a copy of it, and `shared_params` does not record it.
        """
        copies = {}
        for layer in self.layers:
            for name in names:
                child, _, rest = name.removeprefix(f"{layer}.").partition(".")
                router = f"{layer}.router.{rest}"
                is_inside = name.startswith(f"{layer}.") and child not in ("router", "experts", "shared_experts")
                if is_inside and router in names:
                    copies[name] = router
        return copies

    def global_shape(self, name: str, shape: Shape) -> Shape:
        """Shape of the global tensor of a parameter; `shape`: on rank 0."""
        if name not in self.counts:
            return shape
        expected = self.local_shape(name, shape, 0)
        if not shape or shape != expected:
            raise MalformedError(
                f"expected {expected[0]} experts along dim 0 of {name} on the first of {self.ep} "
                f"expert-parallel ranks, as in {LAYERS}; got the shape {list(shape)}"
            )
        return (self.counts[name], *shape[1:])

    def local_shape(self, name: str, shape: Shape, rank: int) -> Shape:
        """Shape of a parameter on a rank; `shape`: on another one, or of the global tensor."""
        return (len(self.experts_by_rank(name)[rank]), *shape[1:]) if name in self.counts else shape

    def experts_by_rank(self, name: str) -> ExpertsByRank:
        """Experts of a stack that each rank holds, in its order."""
        return self.by_rank[name] if name in self.by_rank else divide_evenly(self.counts[name], self.ep)

    def axis(self, name: str) -> AxisLayout:
        """How the expert-parallel ranks hold a stack."""
        cut = pattern("indexes", by_part=self.by_rank[name]) if name in self.by_rank else pattern("shard", dim=0)
        return AxisLayout("ep", self.ep, cut, self.known_from)

    def take(self, tensors: dict[str, TensorRef], problems: Problems) -> dict[str, ShardedTensor]:
        """The stacks that tensors of expert files make; these are removed from `tensors`."""
        stacks = {}
        for name, count in self.counts.items():
            refs = {number: tensors.pop(f"{name}.{number}", None) for number in range(count)}
            present = [ref for ref in refs.values() if ref is not None]
            if len(present) < count:
                numbers = ", ".join(str(number) for number, ref in refs.items() if ref is None)
                problems.missing.append(f"experts {numbers} of {name} (files layer_*_expert_*_model_states.pt)")
            elif len({(ref.shape, ref.dtype) for ref in present}) > 1:
                problems.wrong.append(f"{name}: its experts differ in shape or dtype")
            else:
                stacks[name] = _stack(present)
        return stacks


def _stack(refs: Sequence[TensorRef]) -> ShardedTensor:
    """Tensors of one shape, stacked along a new first dim."""
    first, sizes = refs[0], (1, *refs[0].shape)
    boxes = tuple(
        (Box((number, *(0 for _ in first.shape)), sizes), ref.strided(0, sizes, (ref.numel, *ref.strides)))
        for number, ref in enumerate(refs)
    )
    shards = ShardSet(Layout(), (StoredShard({}, first, boxes=boxes),))
    return ShardedTensor(dtype=first.dtype, shape=(len(refs), *first.shape), shard_sets=(shards,))
