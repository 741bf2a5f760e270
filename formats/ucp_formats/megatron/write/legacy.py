"""Write legacy files: a folder per rank, for exactly one topology.

    iter_0001000/mp_rank_01_003/model_optim_rng.pt     model, optimizer, arguments, scheduler of one rank
    iter_0001000/mp_rank_01_003/distrib_optim.pt       masters and moments of its data-parallel group, in flat buffers

The files are those of megatron-core 0.16 (checkpointing.py, distrib_optimizer.py: get_parameter_state_dp_zero): buffers
hold parameters in reversed order, aligned to 64 elements, without padding at the ends of buckets. `legacy.files` says
which ranks save.

The modules of the run determine the keys and the order in which a chunk registers parameters. Megatron-core's own
(`transformer_impl` "local") keep norms separate. Transformer Engine's modules fuse a norm into the next linear layer,
and register the norm right before that layer's weight; grouped experts register all first projections before all second
ones.
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
from ucp.io.torch_file.draft import FileDraft, FinishedFile, Part
from ucp.io.torch_file.storage import NewTensor
from ucp_formats.megatron.buffers.layout import simulate
from ucp_formats.megatron.legacy.files import Grid
from ucp_formats.megatron.mesh import Chunk, split_layers, with_source
from ucp_formats.megatron.names import DISTRIBUTED_OPTIMIZER, EMBEDDING, MODEL, OUTPUT, GridPlace, rank_folder_name
from ucp_formats.megatron.write.arguments import namespace
from ucp_formats.megatron.write.groups import OptimizerGroup
from ucp_formats.megatron.write.model import TargetModel, TargetRun, TargetTensor

_NORM = re.compile(r"\.layer_norm_(weight|bias)$")
_GROUPED = re.compile(r"^(?P<module>.+\.experts\.linear_fc[12])\.(?P<kind>weight|bias)(?P<expert>\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNaming:
    """Names and order of the parameters that the modules of a run register."""

    family: Family
    """Rules of the model."""
    is_fused: bool
    """Whether modules are those of Transformer Engine."""
    is_grouped: bool
    """Whether the experts of a layer are one module."""
    expert_layers: frozenset[int]
    """Layers with routed experts, global numbers."""

    def key(self, tensor: TargetTensor, *, layer: int, expert: int) -> str:
        """Key of a parameter in the state_dict of a chunk. `layer`, `expert`: local numbers, if it has them."""
        numbers = {"layer": None if tensor.layer is None else layer, "expert": expert}
        fields = {key: number for key, number in numbers.items() if key in tensor.match.fields and number is not None}
        name = tensor.match.renamed(**fields)
        before_experts = ".pre_mlp_layernorm." in tensor.name and tensor.layer in self.expert_layers
        if not self.is_fused or before_experts or (tensor.expert is not None and not self.is_grouped):
            return name
        return self.family.to_style(name, "te")

    def order_keys(self, keys: Mapping[str, TargetTensor]) -> list[str]:
        """Keys in the order of registration. `keys`: in the order of megatron-core's own modules."""
        names = list(keys)
        for norm in [key for key in names if _NORM.search(key)]:
            weight = _NORM.sub(".weight", norm)
            names.remove(norm)
            names.insert(names.index(weight), norm)
        grouped: dict[str, list[tuple[str, int, bool, str]]] = {}
        positions: dict[str, list[int]] = {}
        for position, name in enumerate(names):
            if match := _GROUPED.match(name):
                layer = match["module"].rpartition(".")[0]
                grouped.setdefault(layer, []).append(
                    (match["module"], int(match["expert"]), match["kind"] == "bias", name)
                )
                positions.setdefault(layer, []).append(position)
        for layer, entries in grouped.items():  # by projection, then by expert
            for position, entry in zip(positions[layer], sorted(entries), strict=True):
                names[position] = entry[3]
        return names

    def extra_states(self, keys: Mapping[str, TargetTensor]) -> Iterator[str]:
        """Keys of modules with an extra state: linear layers, and attention with Transformer Engine."""
        extra_keys: dict[str, None] = {}
        for key, tensor in keys.items():
            is_linear = tensor.name.endswith(".weight") and len(tensor.shape) == 2 and tensor.name != EMBEDDING
            if is_linear:  # only if sharded over tensor-parallel ranks
                layout = tensor.match.layout(axes={"tp": 1, "etp": 1}, global_shape=tensor.shape)
                is_linear = any(axis.pattern.overlap is Overlap.EXCLUSIVE for axis in layout.axes)
            if key == OUTPUT or is_linear:
                grouped = _GROUPED.match(key)
                extra_keys[f"{grouped['module'] if grouped else key.rpartition('.')[0]}._extra_state"] = None
            if self.is_fused and ".self_attention.linear_proj." in key:
                extra_keys[f"{key.partition('.linear_proj.')[0]}.core_attention._extra_state"] = None
        yield from extra_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalTensor:
    """The part of a tensor that a rank holds."""

    key: str
    """Key in the state_dict of its chunk."""
    tensor: TargetTensor
    """The global tensor."""
    pairs: tuple[RegionPair, ...]
    """Boxes of it that the rank holds."""
    shape: tuple[int, ...]
    """Elements per dim of the local tensor."""
    layout: Layout
    """Layout over tensor-parallel ranks."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    def to_part(self, state: str, dtype: DType) -> Part:
        """The slice that fills it."""
        return self.tensor.to_part(self.pairs, self.shape, state, dtype, self.layout)

    def draft(self, draft: FileDraft, state: str, dtype: DType = DType.FLOAT32) -> NewTensor:
        """A new tensor in the file, filled with a state."""
        return draft.add_tensor(dtype, self.shape, (self.to_part(state, dtype),))


def legacy_places(topology: Topology) -> tuple[GridPlace, ...]:
    """Places of the ranks that save."""
    return _grid(topology).places()


def _grid(topology: Topology) -> Grid:
    return Grid(tp=topology.tp, pp=topology.pp, ep=topology.ep, etp=topology.expert_tp)


def plan_legacy(run: TargetRun, folder: str) -> tuple[FinishedFile, ...]:
    """The files in `folder`. Raises TopologyError for a topology that these files cannot store."""
    return tuple(_LegacyPlan(run, folder).files())


class _LegacyPlan:
    """Drafts the files of one checkpoint."""

    def __init__(self, run: TargetRun, folder: str) -> None:
        self._run = run
        self._folder = folder
        topology = run.topology
        self._grid = _grid(topology if run.model.experts else replace(topology, etp=None))
        if self._grid.collides:
            raise TopologyError(
                f"with {self._grid} several ranks with different experts would save in folders of the same name, and "
                "overwrite each other. Choose an etp that divides tp, or write torch_dist (--layout torch_dist)"
            )
        is_fused = run.arguments.get("transformer_impl") != "local"
        self._naming = ModuleNaming(
            family=run.model.family,
            is_fused=is_fused,
            is_grouped=is_fused and bool(run.arguments.get("moe_grouped_gemm")),
            expert_layers=run.model.expert_layers,
        )
        self._layers = split_layers(run.model.layers, pp=topology.pp, vpp=topology.vpp, arguments=run.arguments)
        self._last_chunk = list(self._layers)[-1]
        self._tensors = _split_tensors(run.model, self._layers)

    def files(self) -> Iterator[FinishedFile]:
        """All files, rank by rank."""
        for rank in self._grid.places():
            name = rank_folder_name(rank, pipelined=self._grid.pp > 1, experts=self._grid.ep > 1)
            chunks = {chunk: self._local_tensors(rank, chunk) for chunk in self._layers if chunk[0] == rank.pp}
            yield self._model_file(f"{self._folder}/{name}/{MODEL}", rank, chunks)
            if self._run.chain and self._run.is_distributed:
                yield self._buffers_file(f"{self._folder}/{name}/{DISTRIBUTED_OPTIMIZER}", rank, chunks)

    def _local_tensors(self, rank: GridPlace, chunk: Chunk) -> list[_LocalTensor]:
        """Local tensors of a chunk, in the order of registration."""
        by_key: dict[str, _LocalTensor] = {}
        first_layer = self._layers[chunk].start
        experts_per_rank = max(self._run.model.experts // self._grid.ep, 1)
        for tensor in self._tensors[chunk]:
            owner, expert = divmod(tensor.expert or 0, experts_per_rank)
            if tensor.expert is None or owner == rank.ep:
                key = self._naming.key(tensor, layer=(tensor.layer or 0) - first_layer, expert=expert)
                by_key[key] = self._local_tensor(key, tensor, rank)
        if self._is_tied and chunk == self._last_chunk:
            embedding = next(tensor for tensor in self._run.model.tensors if tensor.name == EMBEDDING)
            by_key[OUTPUT] = self._local_tensor(OUTPUT, embedding, rank)
        order = self._naming.order_keys({key: local.tensor for key, local in by_key.items()})
        return [by_key[key] for key in order]

    @cached_property
    def _is_tied(self) -> bool:
        """Whether the last stage has a copy of the embedding."""
        shapes = self._run.model.shapes
        return self._grid.pp > 1 and EMBEDDING in shapes and OUTPUT not in shapes

    def _local_tensor(self, key: str, tensor: TargetTensor, rank: GridPlace) -> _LocalTensor:
        degrees = {"tp": self._grid.tp, "etp": self._grid.etp}
        ranks = {"tp": rank.tp, "etp": self._grid.expert_part(rank).etp}
        layout = tensor.match.layout(axes=degrees, global_shape=tensor.shape)
        coords = {axis.axis: ranks[axis.axis] for axis in layout.axes}
        shape = compute_local_shape(layout, tensor.shape, coords)
        pairs = tuple(RegionPair(placed.box, placed.local) for placed in place(layout, tensor.shape, coords=coords))
        axes = with_source(layout, f"family {self._run.model.family.name}")
        return _LocalTensor(key=key, tensor=tensor, pairs=pairs, shape=shape, layout=Layout(axes))

    def _model_file(self, path: str, rank: GridPlace, chunks: Mapping[Chunk, Sequence[_LocalTensor]]) -> FinishedFile:
        draft, run = FileDraft(path), self._run
        mesh, arguments = run.topology, dict(run.arguments)
        if "rank" in arguments:  # every rank saves its own number
            arguments["rank"] = rank.pp * mesh.tp * mesh.cp * mesh.dp + self._grid.rank(rank)
        root: dict[str, object] = {"args": namespace(arguments), **run.common}
        for chunk, tensors in chunks.items():
            root[f"model{chunk[1]}" if mesh.vpp > 1 else "model"] = self._state_dict(draft, chunk, tensors)
        if run.chain:
            optimizers: list[dict[str, object]] = []
            for number, groups in enumerate(run.chain):
                if run.is_distributed:  # its tensors are in buffers
                    inner = {"param_groups": [group.entry() for group in groups]}
                    optimizers.append({"optimizer": inner, **run.grad_scaler})
                else:
                    stored = (local for tensors in chunks.values() for local in tensors)
                    optimized = [local for local in stored if self._is_in_optimizer(local, number)]
                    optimizers.append(self._plain_optimizer(draft, groups, optimized))
            root["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
        if rank in run.rng_states:
            root["rng_state"] = run.rng_states[rank]
        return draft.finish(draft.copy_extra(root))

    def _state_dict(self, draft: FileDraft, chunk: Chunk, tensors: Sequence[_LocalTensor]) -> dict[str, object]:
        extras = list(self._naming.extra_states({local.key: local.tensor for local in tensors}))
        if chunk == self._last_chunk:
            extras.append(f"{OUTPUT.removesuffix('weight')}_extra_state")  # even if it has no weight
        state_dict = {local.key: local.draft(draft, WEIGHT, local.tensor.dtype) for local in tensors}
        return state_dict | dict.fromkeys(extras)

    def _plain_optimizer(
        self, draft: FileDraft, groups: Sequence[OptimizerGroup], tensors: Sequence[_LocalTensor]
    ) -> dict[str, object]:
        """State of a torch optimizer with numbered parameters, and the masters by group."""
        state: dict[int, object] = {}
        entries: list[object] = []
        masters: list[list[NewTensor]] = []
        for group in groups:
            names = set(group.params)
            members = [local for local in tensors if local.tensor.name in names]
            ids = range(len(state), len(state) + len(members))
            entries.append({**(group.entry() if group.counts else group.hyper), "params": list(ids)})
            for number, local in zip(ids, members, strict=True):
                count = {"step": float(group.step)} if group.each and group.step is not None else {}  # as torch's Adam
                moments = (name for name in local.tensor.states if name != WEIGHT)
                state[number] = {**count, **{name: local.draft(draft, name) for name in moments}}
            masters.append([local.draft(draft, WEIGHT) for local in members])
        inner: dict[str, object] = {"state": state, "param_groups": entries}
        if all(local.tensor.dtype is DType.FLOAT32 for local in tensors):
            return inner
        return {"optimizer": inner, "fp32_from_fp16_params": masters, **self._run.grad_scaler}

    def _is_in_optimizer(self, local: _LocalTensor, number: int) -> bool:
        """Whether optimizer `number` of the chain steps the tensor: the second one steps experts."""
        steps_experts = len(self._run.chain) > 1 and local.tensor.expert is not None
        return self._run.is_optimized(local.tensor) and steps_experts == (number > 0)

    def _buffers_file(self, path: str, rank: GridPlace, chunks: Mapping[Chunk, Sequence[_LocalTensor]]) -> FinishedFile:
        draft = FileDraft(path)
        first = self._grid.rank(rank)
        saves = (first < self._grid.tp, first < self._grid.etp * self._grid.ep)  # first of its data-parallel group
        optimizers = [
            self._optimizer_buffers(draft, number, chunks) if len(self._run.chain) == 1 or saves[number] else None
            for number in range(len(self._run.chain))
        ]
        return draft.finish(optimizers[0] if len(optimizers) == 1 else optimizers)

    def _optimizer_buffers(
        self, draft: FileDraft, number: int, chunks: Mapping[Chunk, Sequence[_LocalTensor]]
    ) -> dict[object, object]:
        """Buffers of one optimizer: one for every chunk and type."""
        buffers: dict[object, object] = {"buckets_coalesced": True}
        total = sum(local.numel for tensors in chunks.values() for local in tensors)
        for chunk, tensors in chunks.items():
            by_dtype: dict[DType, list[_LocalTensor]] = {}
            for local in tensors:
                if self._is_in_optimizer(local, number):
                    by_dtype.setdefault(local.tensor.dtype, []).append(local)
            for dtype, members in by_dtype.items():
                bucket_numel = self._bucket_numel(total) if chunk == (0, 0) else None
                wide = self._run.arguments.get("accumulate_allreduce_grads_in_fp32", dtype is DType.BFLOAT16)
                gradients = DType.FLOAT32 if wide else dtype
                types = GlobalName("torch", dtype.value), GlobalName("torch", gradients.value)
                buffers[len(buffers) - 1] = {types: self._buffer(draft, members, bucket_numel)}
        return buffers

    def _buffer(self, draft: FileDraft, tensors: Sequence[_LocalTensor], bucket_numel: int | None) -> dict[str, object]:
        # with pipeline parallelism, a tied embedding has a separate bucket
        separate = [n for n, local in enumerate(tensors) if self._is_tied and local.tensor.name == EMBEDDING]
        layout = simulate([local.numel for local in tensors], bucket_numel=bucket_numel, separate=separate)
        buffer: dict[str, object] = {}
        for state in dict.fromkeys(state for local in tensors for state in local.tensor.states):
            parts = [
                replace(local.to_part(state, DType.FLOAT32), offset=start)
                for local, start in zip(tensors, layout.starts, strict=True)
            ]
            buffer["param" if state == WEIGHT else state] = draft.add_tensor(DType.FLOAT32, (layout.numel,), parts)
        return {**buffer, "numel_unpadded": layout.numel}

    def _bucket_numel(self, total: int) -> int | None:
        """Elements at which a run closes a bucket, on the first chunk of the first stage; None for a single bucket.

        `total`: elements of all parameters of the rank.
        """
        arguments, topology = self._run.arguments, self._run.topology
        size, count = arguments.get("ddp_bucket_size"), arguments.get("ddp_num_buckets")
        if not arguments.get("overlap_grad_reduce"):
            return None
        if isinstance(size, int):
            return size
        return total // count if isinstance(count, int) else max(40_000_000, 1_000_000 * topology.dp * topology.cp)


def _split_tensors(model: TargetModel, layers_by_chunk: Mapping[Chunk, range]) -> dict[Chunk, list[TargetTensor]]:
    """Tensors of every chunk, in the order of registration. Raises TopologyError for modules of an unknown stage."""
    first, last = next(iter(layers_by_chunk)), list(layers_by_chunk)[-1]
    tensors: dict[Chunk, list[TargetTensor]] = {chunk: [] for chunk in layers_by_chunk}
    for tensor in model.tensors:
        if tensor.layer is not None:
            home = next(chunk for chunk, layers in layers_by_chunk.items() if tensor.layer in layers)
        elif tensor.name.startswith("mtp.") and first != last:
            raise TopologyError(
                f"{tensor.name}: ucp cannot write pipeline stages of a model with multi-token prediction yet. Choose "
                "pp=1, or write torch_dist (--layout torch_dist), which fits any pp"
            )
        else:
            home = first if tensor.name.startswith("embedding.") else last
        tensors[home].append(tensor)
    return tensors
