"""What ranks keep in host memory, and give to one another after a failure.

`Snapshots.take` copies all that a rank holds: the ranks that still run then have everything of the last iteration, as
long as one of them holds each expert. `ucp.save(snapshots=)` keeps its share of a background save (two-level saving,
MoC-System): newer experts than the chain has, and more of them.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import xxhash

from ucp.conversion.option import TopologyLike, parse_step, path_parser, type_path
from ucp.core.index import AtomIndex, Extra, Fragment, Index, ParamGroup
from ucp.core.layout import PlacedBox
from ucp.core.region import Box
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.errors import StaleError, format_count
from ucp.io.folder import parse_path
from ucp.live.adapters import LiveRequest
from ucp.live.load import find_model_device
from ucp.live.model.describe import list_modules
from ucp.live.model.parallel.experts import PlacementLike
from ucp.live.optimizer.torch_optimizer import unwrap_optimizer
from ucp.live.parts import memory_path
from ucp.live.run.ranks import Ranks, find_ranks, run_together
from ucp.live.run.request import parse_mesh
from ucp.moe.layers import find_layers
from ucp.saving.commit import make_index, merge_facts
from ucp.saving.describe import describe_parts, name_extras
from ucp.saving.holdings import Holding, RankFacts, StateFacts, collect_holdings, copy_to_host, to_bytes
from ucp.saving.job import SaveJob
from ucp.saving.plan import SaveItem

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a rank had of a run at one step."""

    step: int | None
    """Training step."""
    facts: RankFacts
    """What it says of it."""
    tensors: Mapping[SaveItem, Holding]
    """Copies, in the order of the facts."""
    extras: tuple[Extra, ...] = ()
    """What else is restored."""
    is_shared: bool = False
    """Whether a thread may be writing the copies: their memory is not used again."""


@dataclass(slots=True, eq=False)
class Snapshots:
    """What this rank has in host memory: the last two snapshots, or its share of the last save.

    One object serves a run, and the loads after failures. A rank whose process is new passes an empty one.
    """

    turn: int = 0
    """Number of the next save."""
    last: dict[str, int] = field(default_factory=dict)
    """Parameter to the step of the last save that writes it."""
    _snapshots: list[Snapshot] = field(default_factory=list)
    """Oldest first."""
    _offered: dict[int, tuple[Holding, PlacedBox]] = field(default_factory=dict)
    """Offset to the box there, of the snapshot that the ranks load."""
    _offsets: list[int] = field(default_factory=list)
    """Its keys, in increasing order."""

    @property
    def step(self) -> int | None:
        """Training step of what is in memory; None if nothing is."""
        return self._snapshots[-1].step if self._snapshots else None

    def take(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Literal[False] | None,
        topology: TopologyLike | DeviceMesh | None,
        *,
        step: int,
        scheduler: object = None,
        scaler: object = None,
        masters: Mapping[str, torch.Tensor] | None = None,
        like: type_path | None = None,
        placement: PlacementLike | None = None,
        process_group: ProcessGroup | Ranks | None = None,
    ) -> None:
        """Copy all that this rank holds to host memory, beside the snapshot before. Collective.

        Arguments are those of `ucp.save`; no RNG states are copied. Two snapshots are kept, because a rank may have
        taken one more than another when a process dies: `load_into` takes the newest that all of them have.

        Raises as `ucp.save`.
        """
        ranks = find_ranks(process_group, find_model_device(model))
        step = run_together(ranks, lambda: parse_step(step))
        mesh = run_together(ranks, lambda: parse_mesh(topology, ranks.rank, ranks.count))
        path = run_together(ranks, lambda: None if like is None else path_parser("like", parse_path)(like))
        live = LiveRequest(model=model, optimizer=unwrap_optimizer(optimizer), mesh=mesh, ranks=ranks, masters=masters)
        run = describe_parts(live, path, None, placement)
        holdings = run_together(ranks, lambda: collect_holdings(run, list_modules(model)))
        named = run_together(ranks, lambda: name_extras(scheduler, scaler, run.state().extras))
        self._offered = {}
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.step is None or snapshot.step < step]
        oldest = self._snapshots.pop(0) if len(self._snapshots) > 1 else None
        earlier = None if oldest is None or oldest.is_shared else oldest.tensors
        self._snapshots.append(
            Snapshot(
                step=step,
                facts=holdings.facts(),
                tensors=copy_to_host(holdings.tensors, earlier),
                extras=tuple(Extra(name=name, value=copy.deepcopy(value)) for name, value in named.items()),
            )
        )

    def agree(self, ranks: Ranks) -> None:
        """Take the turn of rank 0, if those of the ranks differ, as after a failure. Collective."""
        state = self.turn, self.last
        if len(set(ranks.share(xxhash.xxh3_64_hexdigest(repr(state).encode())))) > 1:
            self.turn, self.last = ranks.share(state if ranks.rank == 0 else (0, {}))[0]

    def keep(self, job: SaveJob, written: Collection[str]) -> None:
        """Keep the share of a save in place of the last one. `written`: parameters that are written, too."""
        facts = RankFacts(atoms=job.run.atoms, groups=job.run.groups, items=tuple(job.tensors))
        self._offered = {}
        self._snapshots = [Snapshot(step=job.run.step, facts=facts, tensors=job.tensors, is_shared=True)]
        self.turn += 1
        if job.run.step is not None:
            self.last = {**self.last, **dict.fromkeys(written, job.run.step)}

    def read(self, offset: int, nbytes: int) -> bytes:
        """Elements of a box in row-major order: all that begin at `offset`, or some rows."""
        start = self._offsets[bisect_right(self._offsets, offset) - 1]
        holding, placed = self._offered[start]
        assert holding.tensor is not None
        elements, sizes = holding.tensor.reshape(-1), placed.box.sizes
        box = elements.as_strided(sizes, placed.strides, elements.storage_offset() + placed.offset)
        if nbytes < box.nbytes:
            width = box.nbytes // sizes[0]
            box = box[(offset - start) // width : (offset - start + nbytes) // width]
        return to_bytes(box).tobytes()

    def overlay(self, index: Index, ranks: Ranks, *, exact: bool) -> Index:
        """`index`, with what ranks have in memory: all of one step, or newer experts.

        Experts alone if some dense part is in no memory, or is newer in `index`. Collective. Raises StaleError if
        `exact` and parts are of different steps.
        """
        step = _choose_step(ranks.share([snapshot.step for snapshot in self._snapshots if snapshot.step is not None]))
        snapshots = [snapshot for snapshot in self._snapshots if step is not None and snapshot.step == step]
        snapshot = snapshots[-1] if snapshots else None
        self._offered = {} if snapshot is None else dict(_list_boxes(snapshot))
        self._offsets = list(self._offered)
        offers = ranks.share(None if snapshot is None else (snapshot.facts, snapshot.extras))
        of_ranks = {rank: offer[0] for rank, offer in enumerate(offers) if offer is not None}
        if not of_ranks:
            return index
        facts = list(of_ranks.values())
        run = merge_facts(facts, topology=index.topology, step=step, origin=index.origin)
        recovered = make_index(Path(index.path), run, _list_fragments(of_ranks))
        atoms = {name: atom for name, atom in recovered.atoms.items() if _is_whole(atom)}
        expert_names = _find_experts(recovered) | _find_experts(index)
        is_named_alike = bool(index.atoms.keys() & recovered.atoms.keys())
        older = index.atoms.keys() - atoms.keys() - recovered.aliases.keys() if is_named_alike else set[str]()
        is_stale = step is not None and index.step is not None and step < index.step
        if is_stale or (recovered.atoms.keys() - atoms.keys() | older) - expert_names:
            return _add_newer_experts(index, atoms, expert_names, step, exact=exact)
        extras = next(offer[1] for offer in offers if offer is not None)
        return _complete(index, replace(recovered, atoms=atoms, extras=extras), older, exact=exact)


def _choose_step(steps: Sequence[Sequence[int]]) -> int | None:
    """The newest step that all ranks with snapshots have; if there is none, the newest of all."""
    of_ranks = [set(steps_of_rank) for steps_of_rank in steps if steps_of_rank]
    shared = set.intersection(*of_ranks) if of_ranks else set()
    return max(shared or set().union(*of_ranks), default=None)


def _list_boxes(snapshot: Snapshot) -> Iterator[tuple[int, tuple[Holding, PlacedBox]]]:
    """The boxes of a snapshot, each with its offset."""
    offset = 0
    for holding in snapshot.tensors.values():
        for placed in holding.boxes:
            yield offset, (holding, placed)
            offset += placed.box.numel * holding.facts.dtype.itemsize


def _list_fragments(of_ranks: Mapping[int, RankFacts]) -> dict[tuple[str, str], list[Fragment]]:
    """(Parameter, state) to its boxes in the memory of ranks; equal ones are replicas."""
    copies: dict[tuple[str, str], list[tuple[Box, int, int]]] = {}
    states: dict[tuple[str, str], StateFacts] = {}
    for rank, facts in of_ranks.items():
        offset = 0
        for item in facts.items:
            key = item.param, item.state
            states[key] = facts.atoms[item.param].states[item.state]
            for box in item.boxes:
                copies.setdefault(key, []).append((box, rank, offset))
                offset += box.numel * states[key].dtype.itemsize
    fragments: dict[tuple[str, str], list[Fragment]] = {}
    for key, state in states.items():
        counts: Counter[Box] = Counter()
        for box, rank, offset in _cut_rows(copies[key], state):
            strides = contiguous_strides(box.sizes)
            ref = TensorRef(path=memory_path(rank), offset=offset, dtype=state.dtype, shape=box.sizes, strides=strides)
            fragments.setdefault(key, []).append(Fragment(box=box, ref=ref, replica=counts[box]))
            counts[box] += 1
    return fragments


def _cut_rows(copies: list[tuple[Box, int, int]], state: StateFacts) -> Iterator[tuple[Box, int, int]]:
    """Copies of boxes (box, rank, offset), of which some overlap in part, as boxes that are equal or do not overlap.

    They are cut at all first and last rows: ranks may have different experts that are adjacent rows of one tensor.
    """
    distinct = {box for box, _, _ in copies}
    if sum(box.numel for box in distinct) <= prod(state.shape):
        yield from copies
        return
    cuts = sorted({row for box in distinct for row in (box.offsets[0], box.stops[0])})
    for box, rank, offset in copies:
        rows = [row for row in cuts if box.offsets[0] <= row <= box.stops[0]]
        width = box.numel // box.sizes[0] * state.dtype.itemsize
        for low, high in pairwise(rows):
            part = Box((low, *box.offsets[1:]), (high - low, *box.sizes[1:]))
            yield part, rank, offset + (low - box.offsets[0]) * width


def _is_whole(atom: AtomIndex) -> bool:
    """Whether the boxes of every state make it up; boxes of one run are equal or have no element in common."""
    return all(
        sum(fragment.box.numel for fragment in state.fragments if not fragment.replica) == state.numel
        for state in atom.states.values()
    )


def _find_experts(index: Index) -> frozenset[str]:
    """Parameters of experts."""
    layers = find_layers(index.shapes)
    return frozenset(t.param for layer in layers for tensors in layer.experts.values() for t in tensors.values())


def _complete(index: Index, recovered: Index, names: Collection[str], *, exact: bool) -> Index:
    """`recovered`, which has all but some experts, with the parameters `names` of `index`."""
    older = {name: atom for name, atom in index.atoms.items() if name in names}
    notes = [f"from memory: {format_count(len(recovered.atoms), 'tensor')}, of iteration {recovered.step}"]
    if older:
        notes[0] += (
            f"; {format_count(len(older), 'tensor')} that no rank has in memory are of iteration {index.step}, or "
            "older: the run does not continue exactly"
        )
        _check_exact(notes[0], index, exact=exact)
        notes = [*index.notes, *notes]
    stored = {name: replace(atom, iteration=atom.iteration or index.step) for name, atom in older.items()}
    paths = {fragment.path for atom in older.values() for state in atom.states.values() for fragment in state.fragments}
    return replace(
        index,
        step=recovered.step,
        atoms={**recovered.atoms, **stored},
        groups=tuple(_add_to_groups(recovered.groups, index.groups, older)),
        aliases={**(index.aliases if older else {}), **recovered.aliases},
        extras=recovered.extras,
        files=tuple(file for file in index.files if file.path in paths),
        records=index.records if older else (),
        lost={name: lost for name, lost in index.lost.items() if name in older},
        doubts=index.doubts if older else (),
        notes=tuple(notes),
        dropped=index.dropped if older else (),
        unnamed=None,
        is_numbered=False,
        skipped=0,
    )


def _add_to_groups(
    groups: Sequence[ParamGroup], stored: Sequence[ParamGroup], older: Collection[str]
) -> Iterator[ParamGroup]:
    """The groups in memory, each with the parameters `older` of the stored group of its number."""
    for number, group in enumerate(groups):
        more = stored[number].params if number < len(stored) else ()
        yield replace(group, params=(*group.params, *(name for name in more if name in older)))


def _add_newer_experts(
    index: Index, atoms: Mapping[str, AtomIndex], expert_names: Collection[str], step: int | None, *, exact: bool
) -> Index:
    """`index`, with the experts among `atoms` that are newer, and have the same states."""
    newer = {}
    for name, atom in atoms.items():
        known = index.atoms.get(name)
        if known is None or name not in expert_names or step is None or atom.states.keys() != known.states.keys():
            continue
        if step > ((index.step if known.iteration is None else known.iteration) or 0):
            newer[name] = replace(atom, iteration=step)
    if not newer:
        return index
    what = f"{format_count(len(newer), 'parameter')} of experts are from memory, of iteration {step}"
    _check_exact(what, index, exact=exact)
    note = f"{what}; the rest is of iteration {index.step}, or older: the run does not continue exactly"
    return replace(index, atoms={**index.atoms, **newer}, notes=(*index.notes, note))


def _check_exact(what: str, index: Index, *, exact: bool) -> None:
    if exact:
        raise StaleError(
            f"expected all states from one iteration (exact=True); the checkpoint has {index.step}: {what}"
        )
