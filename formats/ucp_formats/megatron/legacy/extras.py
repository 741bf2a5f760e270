"""Everything in the model files of ranks that is no tensor of the model or its optimizer, as named extras.

What all ranks agree on is kept once. Of what they do not, each rank's own is kept under its place in the grid
(`rng_state/pp1.tp0`). Arguments differ in the number of the rank: those of the first rank are kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from ucp.contract.rank_extras import Checksums
from ucp.core.index import Extra
from ucp_formats.megatron.legacy.files import LegacyRun, SavedRank

__all__ = ["ranks_extras", "run_extras"]

_OF_A_RANK = ("rank", "local_rank")
"""Arguments that are a rank's own number, and say nothing."""
_PER_RANK = ("rng_state",)
"""Kept per rank even where all are equal."""


def run_extras(run: LegacyRun, checksums: Checksums) -> tuple[list[Extra], list[str]]:
    """Extras of a run, and what is dropped, each with the reason."""
    extras: list[Extra] = []
    for key in dict.fromkeys(key for rank in run.ranks for key in rank.root):
        name = str(key)
        if name == "optimizer" or name.rstrip("0123456789") == "model":
            continue
        values = {n: rank.root[key] for n, rank in enumerate(run.ranks) if rank.root.get(key) is not None}
        if name == "args" and values:
            extras.append(Extra(name=name, value=next(iter(values.values()))))
        else:
            extras += ranks_extras(run, name, values, checksums)
    return extras, _differing_arguments(run, checksums)


def ranks_extras(run: LegacyRun, name: str, values: Mapping[int, object], checksums: Checksums) -> list[Extra]:
    """Extras for what ranks (by number) saved under one name: one, where all that have it agree."""
    first = next(iter(values.values()), None)
    if name not in _PER_RANK and all(checksums.same(first, own) for own in values.values()):
        return [Extra(name=name, value=first)] if values else []
    return [Extra(name=f"{name}/{_place(run, run.ranks[number])}", value=own) for number, own in values.items()]


def _place(run: LegacyRun, rank: SavedRank) -> str:
    place = f"pp{rank.place.pp}.tp{rank.place.tp}"
    return f"{place}.ep{rank.place.ep}" if run.grid.ep > 1 else place


def _differing_arguments(run: LegacyRun, checksums: Checksums) -> list[str]:
    raws = {rank.name: rank.arguments.raw for rank in run.ranks}
    first: Mapping[str, object] = raws[run.ranks[0].name]
    keys = {key for raw in raws.values() for key, value in raw.items() if not checksums.same(value, first.get(key))}
    differing = sorted(keys.difference(_OF_A_RANK))
    if not differing:
        return []
    shown = ", ".join(differing[:8]) + (", ..." if len(differing) > 8 else "")
    return [f"args of ranks other than {run.ranks[0].name}, which differ in {shown}: the first rank's are kept"]
