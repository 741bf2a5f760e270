"""Two-level saving (MoC-System): the last save in host memory, and its experts after a failure.

Every save is copied to host memory, and written unless the last one still is; so memory has newer experts than the
chain, and more of them. After a failure the ranks that still run write the experts that they have into a store in the
folder of the chain, and all ranks load those beside the rest of the chain.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod
from pathlib import Path

import xxhash

from ucp.chain.document import CHAIN
from ucp.core.index import Index
from ucp.errors import StaleError, UsageError, format_count
from ucp.live.run.ranks import Ranks, run_together
from ucp.live.run.shared_index import read_once
from ucp.moe.layers import find_layers
from ucp.saving.commit import SavedRun, begin
from ucp.saving.job import SaveJob
from ucp.saving.plan import SaveItem
from ucp.source.read import index_of

_RECOVERED = "recovered"
"""Folder of the store of experts from memory, in that of the chain."""


class Snapshots:
    """This rank's share of the last save, in host memory.

    One object serves all saves of a run, and the load after a failure. A rank whose process is new passes an empty one.
    """

    def __init__(self) -> None:
        self._job: SaveJob | None = None
        self.turn = 0
        """Number of the next save."""
        self.last: dict[str, int] = {}
        """Parameter to the step of the last save that writes it."""

    @property
    def step(self) -> int | None:
        """Training step of what is in memory; None if nothing is."""
        return None if self._job is None else self._job.run.step

    def agree(self, ranks: Ranks) -> None:
        """Take the turn of rank 0, if those of the ranks differ, as after a failure. Collective."""
        state = self.turn, self.last
        if len(set(ranks.share(xxhash.xxh3_64_hexdigest(repr(state).encode())))) > 1:
            self.turn, self.last = ranks.share(state if ranks.rank == 0 else (0, {}))[0]

    def keep(self, job: SaveJob, written: Collection[str]) -> None:
        """Keep a save in place of the last one. `written`: parameters that are written, too."""
        self._job, self.turn = job, self.turn + 1
        if job.run.step is not None:
            self.last = {**self.last, **dict.fromkeys(written, job.run.step)}

    def overlay(self, index: Index, ranks: Ranks, *, exact: bool) -> Index:
        """`index`, a chain, with the newer experts that ranks have in memory. Collective.

        Raises UsageError for a checkpoint that is no chain, StaleError if `exact` and there are such experts.
        """
        if not (Path(index.path) / CHAIN).is_file():
            raise UsageError(f"expected the chain that was saved, with snapshots=; got {index.path}")
        newest = max((step for step in ranks.share(self.step) if step is not None), default=None)
        job = self._job if newest is not None and self.step == newest else None
        offers = [offer for offer in ranks.share(None if job is None else (job.run, job.share)) if offer is not None]
        chosen = find_newer(index, offers[0][0], [item for _, share in offers for item in share]) if offers else ()
        if not chosen:
            return index
        what = f"{format_count(len(chosen), 'parameter')} of experts are from memory, of iteration {newest}"
        if exact:
            raise StaleError(f"expected all states from iteration {index.step} (exact=True); {what}")
        recovered = _write(Path(index.path) / _RECOVERED, offers[0][0], chosen, job, ranks)
        newer = {name: replace(atom, iteration=newest) for name, atom in recovered.atoms.items()}
        return replace(
            index,
            atoms={**index.atoms, **newer},
            files=(*index.files, *recovered.files),
            records=(*index.records, *recovered.records),
            notes=(
                *index.notes,
                f"{what}; the rest is of iteration {index.step}, or older: the run does not continue exactly",
            ),
        )


def _write(folder: Path, run: SavedRun, chosen: Collection[str], job: SaveJob | None, ranks: Ranks) -> Index:
    """Write the parameters `chosen` of a save into a store, and read its index. Collective.

    `job`: this rank's share of the save, if it has one.
    """
    writing = SaveJob(
        folder=folder,
        run=run.narrow([name for name in run.atoms if name not in chosen]),
        rank=ranks.rank,
        ranks=ranks.count,
        share=[] if job is None else [item for item in job.share if item.param in chosen],
        tensors={} if job is None else job.tensors,
        extras=(),
        is_link=False,
        keep=None,
    )
    run_together(ranks, lambda: begin(folder, replaced=True) if ranks.rank == 0 else None)
    run_together(ranks, writing.write)
    run_together(ranks, lambda: writing.finish() if ranks.rank == 0 else None)
    return read_once(ranks, folder, lambda: index_of(folder))


def find_newer(index: Index, run: SavedRun, items: Collection[SaveItem]) -> frozenset[str]:
    """Parameters of experts that `items` hold completely, at a later iteration than the chain `index` has them."""
    held: dict[tuple[str, str], int] = {}
    for item in items:
        held[item.param, item.state] = held.get((item.param, item.state), 0) + item.nbytes
    newer = set()
    for layer in find_layers(index.shapes):
        for tensor in (tensor for tensors in layer.experts.values() for tensor in tensors.values()):
            known, atom = index.atoms[tensor.param], run.atoms.get(tensor.param)
            iteration = index.step if known.iteration is None else known.iteration
            if atom is None or run.step is None or run.step <= (iteration or 0):
                continue
            states = {name: facts for name, facts in atom.states.items() if facts.value is None}
            is_whole = all(
                held.get((tensor.param, name)) == prod(facts.shape) * facts.dtype.itemsize
                for name, facts in states.items()
            )
            if is_whole and atom.states.keys() == known.states.keys():
                newer.add(tensor.param)
    return frozenset(newer)
