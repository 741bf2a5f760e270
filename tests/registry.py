"""How much of the kept checkpoints declared patterns place: `make registry`, and a test.

A pair is a parameter and an axis of degree above 1 that lays it out. It is placed where the layout has a pattern for
the axis and what `place` gives for all ranks is what was read: every box of the one is made up of boxes of the other.
Patterns that hold recorded boxes, and do not compute them, are counted apart.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ucp_patterns.cut import Cut
from ucp_patterns.pieces import Pieces

from ucp.contract import registry
from ucp.core.index import AtomIndex, Index, StateIndex
from ucp.core.layout import Layout, place
from ucp.core.region import Box, intersect, uncovered

FIXTURES = Path(__file__).parents[1] / "fixtures"
REFUSED = {"z1-dp2-elastic"}
"""Kept to show that they are refused."""
_EXPERT = re.compile(r"(?:^|\.)(?:deepspeed_experts|experts|local_experts)\.")
RECORDED = (Cut, Pieces)
"""Patterns whose parameters are the recorded boxes, or widths."""


def checkpoints() -> Iterator[Path]:
    """Every kept checkpoint that ranks of a framework wrote; universal folders know nothing of ranks."""
    for kind in ("deepspeed", "megatron", "torch"):
        for case in sorted((FIXTURES / kind).iterdir()):
            if (case / "checkpoint").is_dir() and case.name not in REFUSED:
                yield case / "checkpoint"


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


def is_placed(atom: AtomIndex) -> bool:
    """Whether the pieces of every state of the atom's shape lie where its layout places them."""
    states = [own for own in atom.states.values() if own.global_shape == atom.global_shape]
    layouts = (atom.layout, replace(atom.layout, flat=()))
    wanted = [_boxes(layout, atom.global_shape) for layout in layouts]
    return all(any(_agree(own, boxes) for boxes in wanted) for own in states)


def _boxes(layout: Layout, shape: tuple[int, ...]) -> set[Box]:
    return {own.box for rank in layout.ranks() for own in place(layout, shape, coords=rank) if own.box.numel}


def _agree(state: StateIndex, boxes: set[Box]) -> bool:
    pieces = {piece.box for piece in state.fragments if piece.box.numel and not piece.derived}
    return all(_makes_up(box, pieces) for box in boxes) and all(
        any(intersect(piece, box) == piece for box in boxes) for piece in pieces
    )


def _makes_up(box: Box, pieces: set[Box]) -> bool:
    inside = (shared for piece in pieces if (shared := intersect(piece, box)) is not None)
    moved = [Box(tuple(a - b for a, b in zip(own.offsets, box.offsets, strict=True)), own.sizes) for own in inside]
    return not uncovered(box.sizes, moved)


def count(index: Index) -> Mapping[str, Counter[str]]:
    """Axis to what becomes of its pairs: "placed", "recorded" or "not placed"."""
    found: dict[str, Counter[str]] = {}
    for name, atom in index.atoms.items():
        placed = is_placed(atom)
        laid = {axis.axis: axis for axis in atom.layout.every}
        parts = {axis: own.parts for axis, own in laid.items()}
        if "dp" not in laid:  # the split of HSDP, of which either may be 1
            laid["dp"] = laid.get("dp_shard") or laid.get("dp_replicate")
            parts["dp"] = parts.get("dp_shard", 1) * parts.get("dp_replicate", 1)
        for axis, degree in degrees(index, name).items():
            own = laid.get(axis)
            fits = placed and own is not None and parts[axis] == degree
            kind = "not placed" if not fits else "recorded" if isinstance(own.pattern, RECORDED) else "placed"
            found.setdefault(axis, Counter())[kind] += 1
    return found


def main() -> int:
    """Print the count of all kept checkpoints; 1 where a pair is not placed."""
    total: dict[str, Counter[str]] = {}
    for path in checkpoints():
        format_, evidence = registry.recognise(path)
        own = count(format_.read(evidence.root))
        lacking = sum(pairs["not placed"] for pairs in own.values())
        if lacking and "-v" in sys.argv:
            print(f"{path.parent.name}/{path.name}: {lacking} pairs not placed, {dict(own)}")
        for axis, pairs in own.items():
            total.setdefault(axis, Counter()).update(pairs)
    for axis, pairs in sorted(total.items()):
        print(f"{axis:4} {pairs.total():6,} pairs, {pairs['placed'] + pairs['recorded']:6,} placed")
    every = sum((pairs for pairs in total.values()), Counter())
    print(f"{every['recorded']:,} pairs repeat recorded boxes or widths")
    print(f"{every['placed'] + every['recorded']:,} of {every.total():,} pairs placed by a declared pattern")
    return int(bool(every["not placed"]))


if __name__ == "__main__":
    sys.exit(main())
