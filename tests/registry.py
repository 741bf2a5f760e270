"""How much of the kept checkpoints declared patterns place: `make registry`, and a test.

A pair is a parameter and an axis of degree above 1 that lays it out. It is

- "placed" where files are of ranks along the axis, and each has exactly the elements that `place` gives its rank;
- "checked" where no file says its rank along the axis: `.metadata` records boxes without ranks, and some files are
  written once for all ranks. What is recorded is then what `place` gives all those ranks together, box for box where
  boxes are recorded;
- "recorded" where the pattern holds recorded boxes, and does not compute them;
- "not placed" otherwise, or where the layout has no such axis.

Which rank a file is of is told by its name, by the tables of this module alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ucp_patterns.cut import Cut
from ucp_patterns.pieces import Indexes, Pieces

from ucp.contract import registry
from ucp.contract.protocols import SourceOptions
from ucp.core.index import AtomIndex, Fragment, Index, Kind, StateIndex
from ucp.core.layout import Layout, place
from ucp.core.region import Box

FIXTURES = Path(__file__).parents[1] / "fixtures"
REFUSED = {"z1-dp2-elastic"}
"""Kept to show that they are refused."""
UNEVEN = {"z2-autoep2-dp4-bf16-placed"}
"""Ranks with unequal numbers of experts divide buffers of other lengths; an atom has the layout of the first."""
RECORDED = (Cut, Pieces)
"""Patterns whose parameters are the recorded boxes, or widths."""
SHAPES_FROM = {"fsdp1-local-orig-dp2": FIXTURES / "torch" / "fsdp2-dp4" / "checkpoint"}
"""Checkpoints of the same model that know the shapes of frozen parameters."""
COUNTS = {"step", "calls"}
"""States that are numbers, also where a parameter has their shape."""
_EXPERT = re.compile(r"(?:^|\.)(?:deepspeed_experts|experts|local_experts)\.")
_NUMBER = re.compile(r"experts\.(\d+)\.")

Shape = tuple[int, ...]
Coords = tuple[tuple[str, int], ...]
"""Place of a rank along the axes that its file's name tells."""
Rank = tuple[str, Coords]
"""Role of a file, and the rank that it is of."""


def checkpoints() -> Iterator[Path]:
    """Every kept checkpoint that ranks of a framework wrote; universal folders know nothing of ranks."""
    for kind in ("deepspeed", "megatron", "torch", "columns"):
        for case in sorted((FIXTURES / kind).iterdir()):
            if (case / "checkpoint").is_dir() and case.name not in REFUSED | UNEVEN:
                yield case / "checkpoint"


def read(path: Path) -> Index:
    """Index of a kept checkpoint."""
    rules = path.parents[1] / "rules.toml"
    options = SourceOptions(shapes_from=SHAPES_FROM.get(path.parent.name), patterns=rules if rules.exists() else None)
    format_, evidence = registry.recognise(path, options=options)
    return format_.read(evidence.root)


def degrees(index: Index, name: str) -> dict[str, int]:
    """Axes of degree above 1 over which a parameter of that name is laid out."""
    mesh = index.topology
    dp = mesh.dp * mesh.cp
    if _EXPERT.search(name):
        dense = mesh.tp * dp
        found = {"ep": mesh.ep, "etp": mesh.expert_tp, "dp": dense // (mesh.ep * mesh.expert_tp)}
    else:
        found = {"tp": mesh.tp, "dp": dp}
    return {axis: degree for axis, degree in {**found, "pp": mesh.pp, "vpp": mesh.vpp}.items() if degree > 1}


def _model_parallel(index: Index, mp: str) -> dict[str, int]:
    """Coordinates of a model-parallel rank of DeepSpeed."""
    return {"tp": int(mp) % index.topology.tp, "pp": int(mp) // index.topology.tp}


def _zero_rank(index: Index, atom: AtomIndex, dp: str, mp: str) -> dict[str, int]:
    rank, ep = int(dp), index.topology.ep
    if ep == 1 or not _EXPERT.search(atom.name):
        return {**_model_parallel(index, mp), "dp": rank}
    config: Any = next((extra.value for extra in index.extras if extra.name == "ds_config"), {})
    copies = index.topology.dp // ep
    is_contiguous = config.get("use_data_before_expert_parallelism") is True
    expert, share = divmod(rank, copies) if is_contiguous else (rank % ep, rank // ep)
    return {**_model_parallel(index, mp), "ep": expert, "dp": share}


def _rank_of_experts(index: Index, atom: AtomIndex, rank: str, mp: str) -> dict[str, int]:
    experts = {"ep": int(rank)} if _EXPERT.search(atom.name) else {}
    return {**_model_parallel(index, mp), **experts}


def _expert_file(index: Index, atom: AtomIndex, expert: str, mp: str) -> dict[str, int]:
    if any(isinstance(axis.pattern, Indexes) for axis in atom.layout.axes):  # the file does not say who holds it
        return _model_parallel(index, mp)
    prefix = atom.name.partition("experts.")[0]
    numbers = [_NUMBER.search(name) for name in index.atoms if name.startswith(prefix)]
    known = [int(number[1]) for number in numbers if number is not None]
    stacked = atom.global_shape[0] if not known and _EXPERT.search(atom.name) else 1
    count = 1 + max(known) if known and _EXPERT.search(atom.name) else stacked
    return {**_model_parallel(index, mp), "ep": int(expert) * index.topology.ep // count}


def _legacy_rank(index: Index, atom: AtomIndex, tp: str, first: str | None, second: str | None) -> dict[str, int]:
    """`mp_rank_TT_PPP_EEE`; stages are left out of the name where there is one, and experts likewise."""
    numbers = [int(number) for number in (first, second) if number is not None]
    pp = numbers.pop(0) if index.topology.pp > 1 else 0
    is_expert = _EXPERT.search(atom.name) is not None
    tensor = {"etp": int(tp) % index.topology.expert_tp} if is_expert else {"tp": int(tp)}
    return {**tensor, "pp": pp, **({"ep": numbers[0]} if is_expert and numbers else {})}


def _torch_rank(index: Index, _: AtomIndex, rank: str) -> dict[str, int]:
    dp, tp = divmod(int(rank), index.topology.tp)
    return {"tp": tp, "dp": dp, "dp_shard": dp, "dp_replicate": dp}


_Reader = Callable[..., dict[str, int]]
_RANKS: Mapping[str, tuple[tuple[str, re.Pattern[str], _Reader], ...]] = {
    "deepspeed": (
        ("optimizer", re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"), _zero_rank),
        ("sharded model", re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt"), _zero_rank),
        ("model", re.compile(r"mp_rank_(\d+)_model_states\.pt"), lambda index, _, mp: _model_parallel(index, mp)),
        ("layer", re.compile(r"layer_\d+(?:-model_(\d+))?-model_states\.pt"), lambda *own: {"tp": int(own[2] or 0)}),
        ("expert", re.compile(r"(?:layer_\d+_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt"), _expert_file),
        ("expert optimizer", re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"), _rank_of_experts),
    ),
    "megatron": (("legacy", re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?/model_optim_rng\.pt"), _legacy_rank),
                 ("gathered", re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?/distrib_optim\.pt"), _legacy_rank)),
    "torch": (
        ("model", re.compile(r"(?:pytorch_)?model\w*_rank_?(\d+)\.(?:pt|bin)"), _torch_rank),
        ("optimizer", re.compile(r"optim\w*_rank_?(\d+)\.(?:pt|bin)"), _torch_rank),
        ("all", re.compile(r"checkpoint_rank_(\d+)\.pt"), _torch_rank),
    ),
}  # fmt: skip
"""Format to its files of ranks: role, form of the name, and the coordinates that it tells."""


def rank_of(index: Index, atom: AtomIndex, path: str) -> Rank | None:
    """Role of a file, and the rank that it is of as far as its name tells; None for one of no rank."""
    name = os.path.relpath(path, index.path)
    for role, form, coords in _RANKS.get(index.format, ()):
        match = form.fullmatch(name)
        if match is not None:
            found = coords(index, atom, *match.groups())
            if role == "sharded model" and atom.kind is Kind.BUFFER:
                del found["dp"]  # that of rank 0 stands for all
            return role, tuple(sorted(found.items()))
    return None


def ranks_told(index: Index, atom: AtomIndex) -> frozenset[str] | None:
    """Axes along which files of the atom say their rank; None where one has other elements than its layout places.

    States that say a layout of their own are compared with that.
    """
    files = {file.path: rank_of(index, atom, file.path) for file in index.files}
    told: set[str] = set()
    for key, state in atom.states.items():
        layout, shape = atom.layout if state.layout is None else state.layout, state.global_shape
        if key in COUNTS or shape != atom.global_shape:
            continue
        for role, pieces in _by_role(state, files).items():
            ranks = {path: rank[1] for path, rank in files.items() if rank is not None and rank[0] == role[0]}
            if not (_has_ranks(layout, shape, pieces, ranks) if ranks else _has_boxes(layout, shape, pieces)):
                return None
            told |= {axis for coords in ranks.values() for axis, _ in coords}
    return frozenset(told)


def _by_role(state: StateIndex, files: Mapping[str, Rank | None]) -> dict[tuple[str, bool], list[Fragment]]:
    """Role of a file, and whether pieces are derived, to the pieces with elements; "" for files of no rank."""
    found: dict[tuple[str, bool], list[Fragment]] = {}
    for piece in state.fragments:
        if piece.box.numel and piece.path is not None:
            rank = files[piece.path]
            found.setdefault(("" if rank is None else rank[0], piece.derived), []).append(piece)
    return found


def _has_ranks(layout: Layout, shape: Shape, pieces: Iterable[Fragment], ranks: Mapping[str, Coords]) -> bool:
    """Whether the pieces in the files of each rank are the elements that it is to have."""
    boxes: dict[Coords, set[Box]] = {coords: set() for coords in ranks.values()}
    for piece in pieces:
        boxes[ranks[piece.path or ""]].add(piece.box)
    return all(np.array_equal(_marked(shape, own), _expected(layout, shape, coords)) for coords, own in boxes.items())


@lru_cache(maxsize=1 << 12)
def _expected(layout: Layout, shape: Shape, coords: Coords) -> NDArray[np.bool_]:
    """Elements of all ranks at `coords`, which may leave axes open."""
    known = dict(coords)
    axes = layout.all_axes
    ranges = ([known[axis.axis]] if axis.axis in known and axis.parts > 1 else range(axis.parts) for axis in axes)
    ranks = (dict(zip((axis.axis for axis in axes), at, strict=True)) for at in product(*ranges))
    return _marked(shape, {own.box for rank in ranks for own in place(layout, shape, coords=rank)})


def _marked(shape: Shape, boxes: Iterable[Box]) -> NDArray[np.bool_]:
    marked = np.zeros(shape, dtype=np.bool_)
    for box in boxes:
        marked[tuple(map(slice, box.offsets, box.stops))] = True
    return marked


def _has_boxes(layout: Layout, shape: Shape, pieces: Iterable[Fragment]) -> bool:
    """Whether recorded boxes, of no rank, are those of all ranks: cut by a flat axis as well, or not."""
    recorded = {piece.box for piece in pieces}
    return recorded in (_boxes(layout, shape), _boxes(replace(layout, flat=()), shape))


@lru_cache(maxsize=1 << 12)
def _boxes(layout: Layout, shape: Shape) -> set[Box]:
    return {own.box for rank in layout.ranks() for own in place(layout, shape, coords=rank) if own.box.numel}


def kinds(index: Index, atom: AtomIndex) -> dict[str, str]:
    """Axis to what becomes of its pair with the atom: "placed", "checked", "recorded" or "not placed"."""
    try:
        told = ranks_told(index, atom)
    except ValueError:  # no tensor of its shape can lie like this
        told = None
    laid = {axis.axis: axis for axis in atom.layout.all_axes}
    parts = {axis: own.parts for axis, own in laid.items()}
    if "dp" not in laid:  # the split of HSDP, of which either may be 1
        laid["dp"] = laid.get("dp_shard") or laid.get("dp_replicate")
        parts["dp"] = parts.get("dp_shard", 1) * parts.get("dp_replicate", 1)
    found = {}
    for axis, degree in degrees(index, atom.name).items():
        own = laid.get(axis)
        if told is None or own is None or parts[axis] != degree:
            found[axis] = "not placed"
        elif isinstance(own.pattern, RECORDED):
            found[axis] = "recorded"
        else:
            found[axis] = "placed" if axis in told else "checked"
    return found


def count(index: Index) -> dict[str, Counter[str]]:
    """Axis to what becomes of its pairs."""
    total: dict[str, Counter[str]] = {}
    for atom in index.atoms.values():
        for axis, kind in kinds(index, atom).items():
            total.setdefault(axis, Counter())[kind] += 1
    return total


def main() -> int:
    """Print the count of all kept checkpoints; 1 where a pair is not placed."""
    total: dict[str, Counter[str]] = {}
    for path in checkpoints():
        own = count(read(path))
        lacking = sum(pairs["not placed"] for pairs in own.values())
        if lacking and "-v" in sys.argv:
            print(f"{path.parent.name}/{path.name}: {lacking} pairs not placed, {dict(own)}")
        for axis, pairs in own.items():
            total.setdefault(axis, Counter()).update(pairs)
    for axis, pairs in sorted(total.items()):
        print(f"{axis:4} {pairs.total():6,} pairs, {pairs['placed']:6,} placed, {pairs['checked']:6,} checked")
    every = sum((pairs for pairs in total.values()), Counter())
    print(f"{every['placed']:,} of {every.total():,} pairs placed by a declared pattern, rank by rank")
    print(f"{every['checked']:,} pairs checked: no file says its rank along the axis, and all ranks together fit")
    print(f"{every['recorded']:,} pairs repeat recorded boxes or widths, {every['not placed']:,} are not placed")
    return int(bool(every["not placed"]))


if __name__ == "__main__":
    sys.exit(main())
