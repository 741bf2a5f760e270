"""Optimizer files of ZeRO-1/2 and BF16_Optimizer: one buffer per parameter group, an equal share of it on each rank.

Where a parameter lies follows from `param_shapes`, `param_alignment_paddings` and the number of ranks. It is then
held against two other records, the slice mappings and the module's own tensors, which are views of the same buffer.
`group_paddings` is ignored: BF16_Optimizer and versions before 2025 get it wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

from ucp.contract.problems import Problems
from ucp.contract.rank_extras import Checksums
from ucp.contract.registry import pattern
from ucp.core.index import ParamGroup
from ucp.core.layout import AxisLayout
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError, counted, listed
from ucp.io.pickle.fields import Shape, integer, mapping, sequence, shapes, tensor, text
from ucp_formats.deepspeed.experts import ExpertGroups, ranks_joined
from ucp_formats.deepspeed.read.optimizer.flat_group import Bucket, BucketStates, Shard, bucket_states
from ucp_formats.deepspeed.read.optimizer.flat_layout import (
    SharedBuffer,
    WholeParameters,
    held_by_rank,
    shared_buffers,
)
from ucp_formats.deepspeed.read.optimizer.group_order import mapping_disagrees, optimizer_order
from ucp_formats.deepspeed.read.optimizer.part import OptimizerPart, hyper_parameters, same_groups, take_group_steps
from ucp_formats.deepspeed.read.run import SavedFile, SavedRun

__all__ = ["buffer_shapes", "read_flat"]

_WEIGHTS = "single_partition_of_fp32_groups"


def buffer_shapes(run: SavedRun) -> tuple[dict[str, Shape], ...]:
    """`param_shapes`: parameter to shape for every flat buffer, in its order. Very old files have one for all."""
    where = f"param_shapes of {run.model.path}"
    saved = run.model.root.get("param_shapes")
    return tuple(shapes(group, where) for group in ([saved] if isinstance(saved, dict) else sequence(saved, where)))


def read_flat(run: SavedRun, checksums: Checksums) -> OptimizerPart:
    """States and groups of a ZeRO-1/2 or BF16_Optimizer checkpoint."""
    return _FlatReader(run, checksums).read()


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatFile:
    """The parts of one optimizer file that say what lies where."""

    name: str
    """File name."""
    weights: Sequence[object]
    """One flat tensor per group."""
    states: Mapping[object, object]
    """Number of the flat tensor to its states."""
    groups: Sequence[object]
    """Parameter groups."""
    paddings: Sequence[object] | None
    """Per group, elements after each parameter."""
    mappings: Sequence[object]
    """Per group, name to fragment address."""

    @classmethod
    def of(cls, file: SavedFile) -> _FlatFile:
        name, saved = file.name.name, file.optimizer
        base = mapping(saved.get("base_optimizer_state"), f"base_optimizer_state of {name}")
        paddings = saved.get("param_alignment_paddings")
        mappings = saved.get("param_slice_mappings")
        return cls(
            name=name,
            weights=sequence(saved.get(_WEIGHTS), f"{_WEIGHTS} of {name}"),
            states=mapping(base.get("state"), f"base_optimizer_state.state of {name}"),
            groups=sequence(base.get("param_groups"), f"param_groups of {name}"),
            paddings=None if paddings is None else sequence(paddings, f"param_alignment_paddings of {name}"),
            mappings=mappings if isinstance(mappings, list) else [],
        )

    def weight(self, number: int) -> TensorRef:
        """The flat tensor of group `number`."""
        if number >= len(self.weights):
            raise MalformedError(f"{self.name} has {counted(len(self.weights), 'group')}; expected group {number}")
        return tensor(self.weights[number], f"{_WEIGHTS}[{number}] of {self.name}")

    def state(self, number: int) -> dict[str, object]:
        """States of group `number`; empty when it was never stepped."""
        where = f"the states of group {number} in {self.name}"
        group = self.groups[number] if number < len(self.groups) else None
        params = f"params of group {number} in {self.name}"
        ids = [integer(at, params) for at in sequence(mapping(group, where).get("params"), params)]
        if len(ids) != 1:
            raise UnsupportedError(f"expected one flat parameter in group {number} of {self.name}; got {len(ids)}")
        return {text(key, where): value for key, value in mapping(self.states.get(ids[0], {}), where).items()}

    def mapping(self, number: int) -> object:
        """`param_slice_mappings` of group `number`, where there is one."""
        return self.mappings[number] if number < len(self.mappings) else None


class _Named(NamedTuple):
    """Ranks that share a buffer."""

    label: str
    """What messages call it."""
    coords: Mapping[str, int]
    """Place of the ranks along other axes."""
    axes: tuple[AxisLayout, ...]
    """These axes."""


class _FlatReader:
    """Reads the optimizer files of one run."""

    def __init__(self, run: SavedRun, checksums: Checksums) -> None:
        self.run = run
        self.checksums = checksums
        self.problems = Problems()
        self.part = OptimizerPart()
        self.files = {rank: _FlatFile.of(file) for rank, file in run.optimizers.items()}
        self.shapes = buffer_shapes(run)
        self.placed = ExpertGroups.of(run, self.shapes)

    def read(self) -> OptimizerPart:
        """Everything in them."""
        run = self.run
        groups = same_groups({file.name: file.groups for file in self.files.values()}, self.checksums, self.problems)
        if len(groups) != len(self.shapes):
            raise MalformedError(
                f"expected as many parameter groups in the optimizer files as in param_shapes of {run.model.path}, "
                f"{len(self.shapes)}; got {len(groups)}. The files are of different runs"
            )
        for number, (group, own) in enumerate(zip(groups, self.shapes, strict=True)):
            self._read_group(number, group, own)
        self.problems.raise_any(str(run.folder.path), f"ZeRO-{run.stage} over {run.ranks} ranks")
        take_group_steps(self.part)
        return self.part

    def _read_group(self, number: int, group: object, own: dict[str, Shape]) -> None:
        """Read one group: on all ranks, or for each expert-parallel rank on those that hold its experts."""
        subsets = self.placed.subsets(number)
        names: list[list[str]] = []
        for expert_rank, subset in enumerate(subsets):
            label = f"group {number}" + (f" of expert-parallel rank {expert_rank}" if len(subsets) > 1 else "")
            files = [self.files[rank] for rank in subset]
            owner = AxisLayout("ep", len(subsets), pattern("unique", owner=expert_rank), "partition_count")
            at = _Named(label, {"ep": expert_rank}, (owner,) if len(subsets) > 1 else ())
            found, order = self._read_share(number, own, files, at)
            named = partial(self.placed.named, rank=expert_rank)
            found.states = {named(name): states for name, states in found.states.items()}
            self.part.add(found)
            names.append([*map(named, order)])
        hyper = hyper_parameters(group, f"param_groups[{number}]")
        self.part.groups.append(ParamGroup(params=ranks_joined(names), hyper=hyper))

    def _read_share(
        self, number: int, own: dict[str, Shape], files: Sequence[_FlatFile], at: _Named
    ) -> tuple[BucketStates, tuple[str, ...]]:
        """States out of one buffer, of which each of `files` has a share, and its names in the optimizer's order."""
        weights = dict(enumerate(file.weight(number) for file in files))
        buffer = self._buffer(number, own, weights)
        shards = [
            Shard(rank=rank, file=file.name, weight=weights[rank], states=file.state(number))
            for rank, file in enumerate(files)
        ]
        bucket = Bucket(
            label=at.label,
            coords=at.coords,
            axes=at.axes,
            shapes=own,
            layouts=(buffer,),
            state_layouts=(WholeParameters(buffer),),
            shards=tuple(shards),
        )
        found = bucket_states(bucket, self.checksums, self.problems)
        mappings = {rank: file.mapping(number) for rank, file in enumerate(files)}
        dealt = self.run.config.round_robin and not self.run.is_bf16_optimizer
        names, dealt = optimizer_order(tuple(own), ranks=len(files), dealt=dealt, mappings=tuple(mappings.values()))
        recorded = [rank for rank, saved in mappings.items() if isinstance(saved, dict)]
        held = held_by_rank(buffer, recorded, {name: prod(shape) for name, shape in own.items()})
        told = {name for rank, has in held.items() for name in mapping_disagrees(has, mappings[rank])}
        if told and dealt:
            self.part.notes.append(
                f"{bucket.label}: param_slice_mappings contradict param_shapes for {counted(len(told), 'parameter')}"
                f", as in "
                "DeepSpeed up to 0.19.8 under round_robin_gradients; param_shapes is right"
            )
        self._check_layout(bucket.label, set() if dealt else told, self._displaced(buffer))
        return found, names

    def _buffer(self, number: int, own: Mapping[str, Shape], weights: Mapping[int, TensorRef]) -> SharedBuffer:
        buffers = shared_buffers(
            {name: prod(shape) for name, shape in own.items()},
            ranks=len(weights),
            paddings=self._paddings(number, len(own)),
            first=weights[0].numel,
            known_from=f"param_shapes of {self.run.model.name.name}",
        )
        fitting = (b for b in buffers if all(b.accepts(rank, weight.numel) for rank, weight in weights.items()))
        return next(fitting, buffers[0])

    def _paddings(self, number: int, count: int) -> list[int] | None:
        first = self.files[0]
        if first.paddings is None:
            return None
        where = f"param_alignment_paddings[{number}] of {first.name}"
        saved = first.paddings[number] if number < len(first.paddings) else None
        found = [integer(n, where) for n in sequence(saved, where)]
        if len(found) != count or min(found, default=0) < 0:
            raise MalformedError(f"expected {count} paddings >= 0 for {where}; got {found}")
        return found

    def _displaced(self, buffer: SharedBuffer) -> set[str]:
        """Parameters whose module tensor, where it is a view of the whole buffer, starts elsewhere in it."""
        module = self.run.model.root.get("module")
        if not isinstance(module, dict):  # of a pipeline: no views, the tensors are in files of layers
            return set()
        found = set()
        for name, start in zip(buffer.names, buffer.starts, strict=True):
            ref = module.get(name)
            storage = self.checksums.storage(ref) if isinstance(ref, TensorRef) else None
            if not isinstance(ref, TensorRef) or storage is None:
                continue
            is_view = storage.nbytes == buffer.share * buffer.ranks * ref.dtype.itemsize
            if is_view and ref.offset - storage.offset != start * ref.dtype.itemsize:
                found.add(name)
        return found

    def _check_layout(self, label: str, told: set[str], displaced: set[str]) -> None:
        """Raise UnsupportedError where other records contradict the layout, and nothing explains it."""
        if not told and not displaced:
            return
        shown = [f"{name}: param_slice_mappings has it elsewhere" for name in sorted(told)]
        shown += [f"{name}: module has it elsewhere in the buffer" for name in sorted(displaced)]
        raise UnsupportedError(
            f"expected the buffer of {label} in {self.run.folder.path} in the order of param_shapes; other records "
            f"contradict it:\n{listed(shown)}\nThis layout is not known: report it, with the version of DeepSpeed"
        )
