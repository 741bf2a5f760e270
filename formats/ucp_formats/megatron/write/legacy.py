"""Legacy files: one folder per rank, for exactly the layout asked for.

    iter_0001000/mp_rank_01_003/model_optim_rng.pt     model, optimizer, arguments, scheduler of one rank
    iter_0001000/mp_rank_01_003/distrib_optim.pt       masters and moments of its data-parallel group, in flat buffers

As megatron-core 0.16 saves them (checkpointing.py, distrib_optimizer.py: get_parameter_state_dp_zero): parameters
reversed and aligned to 64 elements, padding at the ends of buckets left out. A rank saves when it is the first of its
dense or of its expert data-parallel group, so where both share ranks the grid is sparse.

Keys, and the order in which a chunk registers its parameters, are those of the run's modules. megatron-core's own
(`transformer_impl` "local") keep norms apart; Transformer Engine's fuse a norm into the linear layer that follows, so
its parameters come right before that layer's weight. Its grouped experts register all first projections before the
second ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ucp.core.index import WEIGHT
from ucp.core.layout import Layout, Overlap, compute_local_shape, place
from ucp.core.region import RegionPair
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import TopologyError
from ucp.families.family import Family
from ucp.io.pickle.values import GlobalName
from ucp.io.torch_file.draft import Drafted, FileDraft, Part
from ucp.io.torch_file.storage import NewTensor
from ucp_formats.megatron.buffers.layout import simulate
from ucp_formats.megatron.legacy.files import Grid as LegacyGrid
from ucp_formats.megatron.mesh import Chunk, split_layers, with_source
from ucp_formats.megatron.names import DISTRIBUTED_OPTIMIZER, EMBEDDING, MODEL, OUTPUT, GridPlace, rank_folder_name
from ucp_formats.megatron.write.arguments import namespace
from ucp_formats.megatron.write.groups import OptimizerGroup
from ucp_formats.megatron.write.model import Model, ModelTensor, TargetRun

_NORM = re.compile(r"\.layer_norm_(weight|bias)$")
_GROUPED = re.compile(r"^(?P<module>.+\.experts\.linear_fc[12])\.(?P<kind>weight|bias)(?P<expert>\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """How a run names what it registers."""

    family: Family
    """Rules of the model."""
    fused: bool
    """Whether modules are those of Transformer Engine."""
    grouped: bool
    """Whether the experts of a layer are one module."""
    expert_layers: frozenset[int]
    """Layers with routed experts, global numbers."""

    def key(self, own: ModelTensor, *, layer: int, expert: int) -> str:
        """Key of a parameter in the state_dict of a chunk. `layer`, `expert`: local numbers, of those that it has."""
        numbers = {"layer": None if own.layer is None else layer, "expert": expert}
        fields = {key: number for key, number in numbers.items() if key in own.match.fields and number is not None}
        name = own.match.renamed(**fields)
        before_experts = ".pre_mlp_layernorm." in own.name and own.layer in self.expert_layers
        if not self.fused or before_experts or (own.expert is not None and not self.grouped):
            return name
        return self.family.to_style(name, "te")

    def registered(self, keys: Mapping[str, ModelTensor]) -> list[str]:
        """Keys in the order of registration; `keys` come in that of megatron-core's own modules."""
        names = list(keys)
        for norm in [key for key in names if _NORM.search(key)]:
            weight = _NORM.sub(".weight", norm)
            names.remove(norm)
            names.insert(names.index(weight), norm)
        places: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            if found := _GROUPED.match(name):
                places.setdefault(found["module"].rpartition(".")[0], []).append(at)
        for own in places.values():  # grouped experts go by projection, then by expert
            for at, name in zip(own, sorted((names[at] for at in own), key=_grouped_key), strict=True):
                names[at] = name
        return names

    def extra_states(self, keys: Mapping[str, ModelTensor]) -> Iterator[str]:
        """Keys of modules that keep state of their own: linear layers, and attention with Transformer Engine."""
        seen: dict[str, None] = {}
        for key, own in keys.items():
            is_linear = own.name.endswith(".weight") and len(own.shape) == 2 and own.name != EMBEDDING
            if is_linear:  # and cut over tensor-parallel ranks
                layout = own.match.layout(axes={"tp": 1, "etp": 1}, global_shape=own.shape)
                is_linear = any(axis.pattern.overlap is Overlap.EXCLUSIVE for axis in layout.axes)
            if key == OUTPUT or is_linear:
                found = _GROUPED.match(key)
                seen[f"{found['module'] if found else key.rpartition('.')[0]}._extra_state"] = None
            if self.fused and ".self_attention.linear_proj." in key:
                seen[f"{key.partition('.linear_proj.')[0]}.core_attention._extra_state"] = None
        yield from seen


def _grouped_key(name: str) -> tuple[str, int, bool]:
    found = _GROUPED.match(name)
    assert found is not None
    return found["module"], int(found["expert"]), found["kind"] == "bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """What a rank holds of a tensor."""

    key: str
    """Key in the state_dict of its chunk."""
    tensor: ModelTensor
    """The tensor."""
    pairs: tuple[RegionPair, ...]
    """Boxes of it."""
    shape: tuple[int, ...]
    """Elements per dim of the local tensor."""
    layout: Layout
    """How it lies over tensor-parallel ranks."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    def parts(self, state: str, dtype: DType) -> tuple[Part, ...]:
        """Slices that fill it."""
        return self.tensor.parts(self.pairs, self.shape, state, dtype, self.layout)


def legacy_places(topology: Topology) -> tuple[GridPlace, ...]:
    """Ranks that save."""
    return _grid(topology).places()


def _grid(topology: Topology) -> LegacyGrid:
    return LegacyGrid(tp=topology.tp, pp=topology.pp, ep=topology.ep, etp=topology.expert_tp)


def plan_legacy(own: TargetRun, folder: str) -> tuple[Drafted, ...]:
    """The files in `folder`. Raises TopologyError for a layout that these files have no place for."""
    return tuple(_Legacy(own, folder).files())


class _Legacy:
    """One checkpoint in the making."""

    def __init__(self, own: TargetRun, folder: str) -> None:
        self._own = own
        self._folder = folder
        topology = own.topology
        self._grid = _grid(topology if own.model.experts else replace(topology, etp=None))
        if self._grid.collides:
            raise TopologyError(
                f"with {self._grid} several ranks with different experts would save under one name, and Megatron "
                "loses some. Choose an etp that divides tp, or write torch_dist (--layout torch_dist)"
            )
        is_fused = own.arguments.get("transformer_impl") != "local"
        self._modules = Modules(
            family=own.model.family,
            fused=is_fused,
            grouped=is_fused and bool(own.arguments.get("moe_grouped_gemm")),
            expert_layers=own.model.expert_layers,
        )
        self._stages = split_layers(own.model.layers, pp=topology.pp, vpp=topology.vpp, arguments=own.arguments)
        self._chunks = _chunk_tensors(own.model, self._stages)

    def files(self) -> Iterator[Drafted]:
        """All files, rank by rank."""
        for at in self._grid.places():
            name = rank_folder_name(at, pipelined=self._grid.pp > 1, experts=self._grid.ep > 1)
            chunks = {chunk: self._locals(at, chunk) for chunk in self._stages if chunk[0] == at.pp}
            yield self._model_file(f"{self._folder}/{name}/{MODEL}", at, chunks)
            if self._own.chain and self._own.distributed:
                yield self._buffers_file(f"{self._folder}/{name}/{DISTRIBUTED_OPTIMIZER}", at, chunks)

    def _locals(self, at: GridPlace, chunk: Chunk) -> list[_Local]:
        """What a rank holds of a chunk, in the order of registration."""
        found: dict[str, _Local] = {}
        first = self._stages[chunk].start
        experts = max(self._own.model.experts // self._grid.ep, 1)  # of a rank
        for own in self._chunks[chunk]:
            home, expert = divmod(own.expert or 0, experts)
            if own.expert is None or home == at.ep:
                key = self._modules.key(own, layer=(own.layer or 0) - first, expert=expert)
                found[key] = self._local(key, own, at)
        if self._is_tied and chunk == list(self._stages)[-1]:
            embedding = next(own for own in self._own.model.tensors if own.name == EMBEDDING)
            found[OUTPUT] = self._local(OUTPUT, embedding, at)
        order = self._modules.registered({key: local.tensor for key, local in found.items()})
        return [found[key] for key in order]

    @cached_property
    def _is_tied(self) -> bool:
        """Whether the last stage has a copy of the embedding."""
        names = {own.name for own in self._own.model.tensors}
        return self._grid.pp > 1 and EMBEDDING in names and OUTPUT not in names

    def _local(self, key: str, own: ModelTensor, at: GridPlace) -> _Local:
        degrees = {"tp": self._grid.tp, "etp": self._grid.etp}
        ranks = {"tp": at.tp, "etp": self._grid.expert_part(at).etp}
        layout = own.match.layout(axes=degrees, global_shape=own.shape)
        coords = {axis.axis: ranks[axis.axis] for axis in layout.axes}
        shape = compute_local_shape(layout, own.shape, coords)
        pairs = tuple(RegionPair(placed.box, placed.local) for placed in place(layout, own.shape, coords=coords))
        axes = with_source(layout, f"family {self._own.model.family.name}")
        return _Local(key=key, tensor=own, pairs=pairs, shape=shape, layout=Layout(axes))

    def _model_file(self, path: str, at: GridPlace, chunks: Mapping[Chunk, Sequence[_Local]]) -> Drafted:
        draft = FileDraft(path)
        mesh, arguments = self._own.topology, dict(self._own.arguments)
        if "rank" in arguments:  # every rank knows its own number
            arguments["rank"] = at.pp * mesh.tp * mesh.cp * mesh.dp + self._grid.rank(at)
        root: dict[str, object] = {"args": namespace(arguments), **self._own.common}
        several = self._own.topology.vpp > 1
        for chunk, held in chunks.items():
            root[f"model{chunk[1]}" if several else "model"] = self._state_dict(draft, chunk, held)
        if self._own.chain:
            members = []
            for number, groups in enumerate(self._own.chain):
                every = (local for held in chunks.values() for local in held)
                ordered = [local for local in every if self._in_optimizer(local, number)]
                if self._own.distributed:  # its tensors lie in buffers
                    alone = {"optimizer": {"param_groups": [group.entry() for group in groups]}, **self._own.scaler}
                members.append(alone if self._own.distributed else self._whole_optimizer(draft, groups, ordered))
            root["optimizer"] = members[0] if len(members) == 1 else members
        if at in self._own.random:
            root["rng_state"] = self._own.random[at]
        return draft.finish(draft.carried(root))

    def _state_dict(self, draft: FileDraft, chunk: Chunk, held: Sequence[_Local]) -> dict[str, object]:
        found: dict[str, object] = {}
        extras = list(self._modules.extra_states({local.key: local.tensor for local in held}))
        if chunk == list(self._stages)[-1]:
            extras.append(f"{OUTPUT.removesuffix('weight')}_extra_state")  # also where it has no weight of its own
        for local in held:
            dtype = local.tensor.dtype
            found[local.key] = draft.filled(dtype, local.shape, local.parts(WEIGHT, dtype))
        return found | dict.fromkeys(extras)

    def _whole_optimizer(
        self, draft: FileDraft, groups: Sequence[OptimizerGroup], ordered: Sequence[_Local]
    ) -> dict[str, object]:
        """State of a torch optimizer with numbered parameters, and the masters by group."""
        state: dict[int, object] = {}
        entries: list[object] = []
        masters: list[list[NewTensor]] = []
        for group in groups:
            atoms = set(group.params)
            own = [local for local in ordered if local.tensor.name in atoms]
            ids = range(len(state), len(state) + len(own))
            entries.append({**(group.entry() if group.counts else group.hyper), "params": list(ids)})
            for at, local in zip(ids, own, strict=True):
                each = {"step": float(group.step)} if group.each and group.step is not None else {}  # as torch's Adam
                moments = (name for name in local.tensor.states if name != WEIGHT)
                state[at] = {**each, **{name: self._filled(draft, local, name) for name in moments}}
            masters.append([self._filled(draft, local, WEIGHT) for local in own])
        inner: dict[str, object] = {"state": state, "param_groups": entries}
        if all(local.tensor.dtype is DType.FLOAT32 for local in ordered):
            return inner
        return {"optimizer": inner, "fp32_from_fp16_params": masters, **self._own.scaler}

    def _filled(self, draft: FileDraft, local: _Local, state: str) -> NewTensor:
        return draft.filled(DType.FLOAT32, local.shape, local.parts(state, DType.FLOAT32))

    def _in_optimizer(self, local: _Local, number: int) -> bool:
        if not self._own.is_optimized(local.tensor):
            return False
        apart = len(self._own.chain) > 1 and local.tensor.expert is not None
        return apart == (number > 0)

    def _buffers_file(self, path: str, at: GridPlace, chunks: Mapping[Chunk, Sequence[_Local]]) -> Drafted:
        draft = FileDraft(path)
        number = self._grid.rank(at)
        saves = (number < self._grid.tp, number < self._grid.etp * self._grid.ep)  # first of its data-parallel group
        members = [
            self._buffers(draft, number, chunks) if len(self._own.chain) == 1 or saves[number] else None
            for number in range(len(self._own.chain))
        ]
        return draft.finish(members[0] if len(members) == 1 else members)

    def _buffers(self, draft: FileDraft, number: int, chunks: Mapping[Chunk, Sequence[_Local]]) -> dict[object, object]:
        """Buffers of one optimizer: one for every chunk and type."""
        found: dict[object, object] = {"buckets_coalesced": True}
        total = sum(local.numel for held in chunks.values() for local in held)
        for chunk, held in chunks.items():
            by_dtype: dict[DType, list[_Local]] = {}
            for local in held:
                if self._in_optimizer(local, number):
                    by_dtype.setdefault(local.tensor.dtype, []).append(local)
            for dtype, own in by_dtype.items():
                bucket_numel = self._bucket_numel(total) if chunk == (0, 0) else None
                wide = self._own.arguments.get("accumulate_allreduce_grads_in_fp32", dtype is DType.BFLOAT16)
                gradients = DType.FLOAT32 if wide else dtype
                types = GlobalName("torch", dtype.value), GlobalName("torch", gradients.value)
                found[len(found) - 1] = {types: self._buffer(draft, own, bucket_numel)}
        return found

    def _buffer(self, draft: FileDraft, held: Sequence[_Local], bucket_numel: int | None) -> dict[str, object]:
        # a tied embedding of a pipeline has a bucket of its own
        apart = [at for at, local in enumerate(held) if self._is_tied and local.tensor.name == EMBEDDING]
        layout = simulate([local.numel for local in held], bucket_numel=bucket_numel, apart=apart)
        states = dict.fromkeys(state for local in held for state in local.tensor.states)
        found: dict[str, object] = {}
        for state in states:
            parts = [
                Part(offset=start + part.offset, slice=part.slice, layout=part.layout)
                for local, start in zip(held, layout.starts, strict=True)
                for part in local.parts(state, DType.FLOAT32)
            ]
            found["param" if state == WEIGHT else state] = draft.filled(DType.FLOAT32, (layout.numel,), parts)
        return {**found, "numel_unpadded": layout.numel}

    def _bucket_numel(self, total: int) -> int | None:
        """Elements from which a run closes a bucket, where it has buckets: on the first chunk of the first stage.

        `total`: elements of all parameters of the rank.
        """
        arguments, topology = self._own.arguments, self._own.topology
        size, count = arguments.get("ddp_bucket_size"), arguments.get("ddp_num_buckets")
        if not arguments.get("overlap_grad_reduce"):
            return None
        if isinstance(size, int):
            return size
        return total // count if isinstance(count, int) else max(40_000_000, 1_000_000 * topology.dp * topology.cp)


def _chunk_tensors(model: Model, stages: Mapping[Chunk, range]) -> dict[Chunk, tuple[ModelTensor, ...]]:
    """Tensors of every chunk, in the order in which it registers them: its layers, and at the ends those of no layer.

    Raises TopologyError for modules whose stage is not known.
    """
    first, last = next(iter(stages)), list(stages)[-1]
    found: dict[Chunk, list[ModelTensor]] = {chunk: [] for chunk in stages}
    for own in model.tensors:
        if own.layer is not None:
            home = next(chunk for chunk, layers in stages.items() if own.layer in layers)
        elif own.name.startswith("mtp.") and first != last:
            raise TopologyError(
                f"{own.name}: stages of a model with multi-token prediction are not written yet. Choose pp=1, or write "
                "torch_dist (--layout torch_dist), which fits any"
            )
        else:
            home = first if own.name.startswith("embedding.") else last
        found[home].append(own)
    return {chunk: tuple(tensors) for chunk, tensors in found.items()}
