"""Legacy files: one folder per rank, for exactly the layout asked for.

    iter_0001000/mp_rank_01_003/model_optim_rng.pt     model, optimizer, arguments, scheduler of one rank
    iter_0001000/mp_rank_01_003/distrib_optim.pt       masters and moments of its data-parallel group, in flat buffers

As megatron-core 0.16 saves them (checkpointing.py, distrib_optimizer.py: get_parameter_state_dp_zero): parameters
reversed and aligned to 64 elements, padding at the ends of buckets left out. A rank saves when it is the first of its
dense or of its expert data-parallel group, so where both share ranks the grid is sparse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ucp.core.dtypes import DType
from ucp.core.layout import local_shape, place
from ucp.core.names import WEIGHT
from ucp.core.pickle_values import GlobalName
from ucp.core.region import RegionPair
from ucp.core.topology import Topology
from ucp.errors import TopologyError
from ucp.io.torch_file.draft import Drafted, FileDraft, Part
from ucp.io.torch_file.layout import NewTensor
from ucp_formats.megatron.flat_buffer.layout import BufferRule, bucket_multiple, simulate
from ucp_formats.megatron.legacy.grid import Grid as LegacyGrid
from ucp_formats.megatron.names import DISTRIBUTED_OPTIMIZER, MODEL, GridPlace, rank_folder_name
from ucp_formats.megatron.run.stages import Chunk, stage_layers
from ucp_formats.megatron.write.arguments.carried import namespace
from ucp_formats.megatron.write.groups import OptimizerGroup
from ucp_formats.megatron.write.legacy.names import Modules, modules_of
from ucp_formats.megatron.write.model import ModelTensor
from ucp_formats.megatron.write.run import TargetRun
from ucp_formats.megatron.write.stages import chunk_tensors

__all__ = ["legacy_places", "plan_legacy"]

_MASTERS = {WEIGHT: "param"}
"""Name of a state in the distributed optimizer, where it is not its own."""
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


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
    shared: bool
    """Whether it is a tied embedding of a pipeline, which has a bucket of its own."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    def parts(self, state: str, dtype: DType) -> tuple[Part, ...]:
        """Slices that fill it."""
        return self.tensor.parts(self.pairs, self.shape, state, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """A rank that saves."""

    place: GridPlace
    """Where it is in the grid."""
    etp: int
    """Its tensor-parallel rank among those of its experts."""
    first_dense: bool
    """Whether it is the first of its dense data-parallel group."""
    first_expert: bool
    """Whether it is the first of its expert data-parallel group."""


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
        self._modules: Modules = modules_of(own.model.family, own.arguments, own.model.expert_layers)
        self._stages = stage_layers(own.model.layers, pp=topology.pp, vpp=topology.vpp, arguments=own.arguments)
        self._chunks = chunk_tensors(own.model, self._stages)

    def files(self) -> Iterator[Drafted]:
        """All files, rank by rank."""
        for rank in self._ranks():
            name = rank_folder_name(rank.place, pipelined=self._grid.pp > 1, experts=self._grid.ep > 1)
            chunks = {chunk: self._locals(rank, chunk) for chunk in self._stages if chunk[0] == rank.place.pp}
            yield self._model_file(f"{self._folder}/{name}/{MODEL}", rank, chunks)
            if self._own.chain and self._own.distributed:
                yield self._buffers_file(f"{self._folder}/{name}/{DISTRIBUTED_OPTIMIZER}", rank, chunks)

    def _ranks(self) -> Iterator[_Rank]:
        for at in self._grid.places():
            number = self._number(at)
            yield _Rank(
                place=at,
                etp=self._grid.expert_part(at).etp,
                first_dense=number < self._grid.tp,
                first_expert=number < self._grid.etp * self._grid.ep,
            )

    def _number(self, at: GridPlace) -> int:
        """First rank of a stage that saves under a place."""
        grid = self._grid
        ranks = range(max(grid.tp, grid.etp * grid.ep))
        return next(r for r in ranks if (r % grid.tp, r // grid.etp % grid.ep) == (at.tp, at.ep))

    @cached_property
    def _local_experts(self) -> int:
        experts, ep = self._own.model.experts, self._grid.ep
        if experts % ep:
            raise TopologyError(f"expected a number of experts that ep={ep} divides; got {experts}. Choose another ep")
        return experts // ep

    def _locals(self, rank: _Rank, chunk: Chunk) -> list[_Local]:
        """What a rank holds of a chunk, in the order of registration."""
        found: dict[str, _Local] = {}
        first = self._stages[chunk].start
        for own in self._chunks[chunk]:
            expert = own.expert
            if expert is not None and expert // self._local_experts != rank.place.ep:
                continue
            local_expert = 0 if expert is None else expert % self._local_experts
            layer = 0 if own.layer is None else own.layer - first
            key = self._modules.key(own, layer=layer, expert=local_expert)
            found[key] = self._local(key, own, rank, shared=self._is_tied and own.name == _EMBEDDING)
        if self._is_tied and chunk == list(self._stages)[-1]:
            embedding = next(own for own in self._own.model.tensors if own.name == _EMBEDDING)
            found[_OUTPUT] = self._local(_OUTPUT, embedding, rank, shared=True)
        order = self._modules.registered({key: local.tensor for key, local in found.items()})
        return [found[key] for key in order]

    @property
    def _is_tied(self) -> bool:
        """Whether the last stage has a copy of the embedding."""
        names = {own.name for own in self._own.model.tensors}
        return self._grid.pp > 1 and _EMBEDDING in names and _OUTPUT not in names

    def _local(self, key: str, own: ModelTensor, rank: _Rank, *, shared: bool) -> _Local:
        degrees = {"tp": self._grid.tp, "etp": self._grid.etp}
        ranks = {"tp": rank.place.tp, "etp": rank.etp}
        layout = own.match.layout(axes=degrees, global_shape=own.shape)
        coords = {axis.axis: ranks[axis.axis] for axis in layout.axes}
        shape = local_shape(layout, own.shape, coords)
        pairs = tuple(RegionPair(placed.box, placed.local) for placed in place(layout, own.shape, coords=coords))
        return _Local(key=key, tensor=own, pairs=pairs, shape=shape, shared=shared)

    def _model_file(self, path: str, rank: _Rank, chunks: Mapping[Chunk, Sequence[_Local]]) -> Drafted:
        draft = FileDraft(path)
        root: dict[str, object] = {"args": namespace(self._arguments(rank)), **self._own.common}
        several = self._own.topology.vpp > 1
        for chunk, held in chunks.items():
            root[f"model{chunk[1]}" if several else "model"] = self._state_dict(draft, chunk, held)
        if self._own.chain:
            members = [self._optimizer(draft, number, chunks) for number in range(len(self._own.chain))]
            root["optimizer"] = members[0] if len(members) == 1 else members
        if rank.place in self._own.random:
            root["rng_state"] = self._own.random[rank.place]
        carried = draft.carried(root)
        return draft.finish(carried)

    def _arguments(self, rank: _Rank) -> Mapping[str, object]:
        """Arguments as the rank has them, which knows its own number."""
        own = self._own.topology
        number = rank.place.pp * own.tp * own.cp * own.dp + self._number(rank.place)
        return {**self._own.arguments, "rank": number} if "rank" in self._own.arguments else self._own.arguments

    def _state_dict(self, draft: FileDraft, chunk: Chunk, held: Sequence[_Local]) -> dict[str, object]:
        found: dict[str, object] = {}
        extras = list(self._modules.extra_states({local.key: local.tensor for local in held}))
        if chunk == list(self._stages)[-1]:
            extras.append(f"{_OUTPUT.removesuffix('weight')}_extra_state")  # also where it has no weight of its own
        for local in held:
            dtype = local.tensor.dtype
            found[local.key] = draft.filled(dtype, local.shape, local.parts(WEIGHT, dtype))
        return found | dict.fromkeys(extras)

    def _optimizer(self, draft: FileDraft, number: int, chunks: Mapping[Chunk, Sequence[_Local]]) -> dict[str, object]:
        """One optimizer: its groups alone where its tensors lie in buffers."""
        groups = self._own.chain[number]
        if self._own.distributed:
            return {"optimizer": {"param_groups": [group.entry() for group in groups]}, **self._own.scaler}
        ordered = [local for held in chunks.values() for local in held if self._in_optimizer(local, number)]
        return self._whole_optimizer(draft, groups, ordered)

    def _whole_optimizer(
        self, draft: FileDraft, groups: Sequence[OptimizerGroup], ordered: Sequence[_Local]
    ) -> dict[str, object]:
        """State of a torch optimizer with numbered parameters, and the masters by group."""
        state: dict[int, object] = {}
        entries: list[object] = []
        masters: list[list[NewTensor]] = []
        for group in groups:
            atoms = set(group.params)
            own = [local for local in ordered if local.tensor.pieces[0].atom in atoms]
            ids = range(len(state), len(state) + len(own))
            entries.append({**(group.entry() if group.counts else group.hyper), "params": list(ids)})
            for at, local in zip(ids, own, strict=True):
                state[at] = self._moments(draft, local, group)
            masters.append([self._filled(draft, local, WEIGHT) for local in own])
        inner: dict[str, object] = {"state": state, "param_groups": entries}
        if all(local.tensor.dtype is DType.FLOAT32 for local in ordered):
            return inner
        return {"optimizer": inner, "fp32_from_fp16_params": masters, **self._own.scaler}

    def _moments(self, draft: FileDraft, local: _Local, group: OptimizerGroup) -> dict[str, object]:
        """States of one parameter; its step too, where torch's Adam looks for it here."""
        step: dict[str, object] = {"step": float(group.step)} if group.each and group.step is not None else {}
        return step | {state: self._filled(draft, local, state) for state in local.tensor.states if state != WEIGHT}

    def _filled(self, draft: FileDraft, local: _Local, state: str) -> NewTensor:
        return draft.filled(DType.FLOAT32, local.shape, local.parts(state, DType.FLOAT32))

    def _in_optimizer(self, local: _Local, number: int) -> bool:
        if not self._own.is_optimized(local.tensor):
            return False
        apart = len(self._own.chain) > 1 and local.tensor.expert is not None
        return apart == (number > 0)

    def _buffers_file(self, path: str, rank: _Rank, chunks: Mapping[Chunk, Sequence[_Local]]) -> Drafted:
        draft = FileDraft(path)
        saves = (rank.first_dense, rank.first_expert)
        members = [
            self._buffers(draft, number, rank, chunks) if len(self._own.chain) == 1 or saves[number] else None
            for number in range(len(self._own.chain))
        ]
        return draft.finish(members[0] if len(members) == 1 else members)

    def _buffers(
        self, draft: FileDraft, number: int, rank: _Rank, chunks: Mapping[Chunk, Sequence[_Local]]
    ) -> dict[object, object]:
        """Buffers of one optimizer: one for every chunk and type."""
        found: dict[object, object] = {"buckets_coalesced": True}
        total = sum(local.numel for held in chunks.values() for local in held)
        for (stage, virtual), held in chunks.items():
            by_dtype: dict[DType, list[_Local]] = {}
            for local in held:
                if self._in_optimizer(local, number):
                    by_dtype.setdefault(local.tensor.dtype, []).append(local)
            for dtype, own in by_dtype.items():
                rule = self._rule(stage, virtual, own, expert=number > 0, total=total)
                found[len(found) - 1] = {self._types(dtype): self._buffer(draft, own, rule)}
        return found

    def _buffer(self, draft: FileDraft, held: Sequence[_Local], rule: BufferRule) -> dict[str, object]:
        layout = simulate([local.numel for local in held], rule)
        states = dict.fromkeys(state for local in held for state in local.tensor.states)
        found: dict[str, object] = {}
        for state in states:
            parts = [
                Part(offset=start + part.offset, slice=part.slice)
                for local, start in zip(held, layout.starts, strict=True)
                for part in local.parts(state, DType.FLOAT32)
            ]
            found[_MASTERS.get(state, state)] = draft.filled(DType.FLOAT32, (layout.numel,), parts)
        return {**found, "numel_unpadded": layout.numel}

    def _rule(self, stage: int, virtual: int, held: Sequence[_Local], *, expert: bool, total: int) -> BufferRule:
        """How the run lays out a buffer: in buckets only on the first chunk of the first stage, if at all.

        `total`: elements of all parameters of the rank.
        """
        arguments = self._own.arguments
        topology = self._own.topology
        dp = topology.dp * topology.cp
        if expert:
            dp = topology.tp * dp // (self._grid.etp * self._grid.ep)
        bucketed = bool(arguments.get("overlap_grad_reduce")) and stage == 0 and virtual == 0
        size, count = arguments.get("ddp_bucket_size"), arguments.get("ddp_num_buckets")
        default = max(40_000_000, 1_000_000 * topology.dp * topology.cp)
        if isinstance(count, int):
            default = total // count
        return BufferRule(
            bucket_numel=(size if isinstance(size, int) else default) if bucketed else None,
            bucket_multiple=bucket_multiple(dp, for_busbw=bool(arguments.get("ddp_pad_buckets_for_high_nccl_busbw"))),
            apart=frozenset(at for at, local in enumerate(held) if local.shared),
        )

    def _types(self, dtype: DType) -> tuple[GlobalName, GlobalName]:
        """Type of the parameters and of their gradients, which name a buffer."""
        wide = self._own.arguments.get("accumulate_allreduce_grads_in_fp32", dtype is DType.BFLOAT16)
        gradients = DType.FLOAT32 if wide else dtype
        return GlobalName("torch", dtype.value), GlobalName("torch", gradients.value)
