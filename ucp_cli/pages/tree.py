"""Names as a tree in which equal layers are one line.

A name is cut at its dots. Children of a node that are numbers and have equal subtrees are shown as one child, `#`.

>>> names = {f"layers.{n}.mlp.{p}.weight": "4x4" for n in range(3) for p in ("up", "down")}
>>> for line in collapse({"emb.weight": "8x4", **names}):
...     print("  " * line.depth + line.label, line.ranges, line.leaf or "", line.count)
emb.weight  8x4 1
layers.#.mlp 0-2  6
  up.weight  4x4 3
  down.weight  4x4 3
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Generic, TypeAlias, TypeVar

from ucp.core.text.units import ranges_text

Leaf = TypeVar("Leaf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line(Generic[Leaf]):
    """One line of the tree."""

    depth: int
    """Nodes above it."""
    label: str
    """Parts of the name joined by dots, with "#" for numbers that share the line."""
    ranges: str
    """Numbers that the "#" stand for, one group each, e.g. "0-79"; empty without one."""
    leaf: Leaf | None
    """What the name stands for; None for a line that only has others below."""
    count: int
    """Names that this line stands for."""


@dataclass(slots=True)
class _Node(Generic[Leaf]):
    leaf: Leaf | None = None
    below: dict[str, _Node[Leaf]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _FoldedNode(Generic[Leaf]):
    """A node whose equal numbered children are joined. Equal nodes are one object."""

    leaf: Leaf | None
    below: tuple[_Step[Leaf], ...]
    """Ways down."""
    count: int
    """Names in it."""


_Step: TypeAlias = tuple[str, tuple[int, ...], _FoldedNode[Leaf]]
"""Part of the name, numbers that "#" stands for (empty without "#"), node."""


_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


def collapse(leaves: Mapping[str, Leaf]) -> Iterator[Line[Leaf]]:
    """Lines of the tree of `leaves` (name to a hashable value), in order of first appearance."""
    root: _Node[Leaf] = _Node()
    for name, leaf in leaves.items():
        node = root
        for part in name.split("."):
            below = node.below.get(part)
            if below is None:
                below = node.below[part] = _Node()
            node = below
        node.leaf = leaf
    yield from _below(_fold(root, {}), 0, 1)


def _fold(node: _Node[Leaf], known: dict[object, _FoldedNode[Leaf]]) -> _FoldedNode[Leaf]:
    """`node` folded. `known`: every different folded node so far, so that equal ones are identical."""
    if not node.below:
        leaf_contents = (node.leaf, ())
        return known.get(leaf_contents) or known.setdefault(leaf_contents, _FoldedNode(node.leaf, (), 1))
    groups: dict[tuple[str, int], tuple[list[int], _FoldedNode[Leaf]]] = {}
    for part, child in node.below.items():
        numbered = _NUMBER.fullmatch(part)
        below = _fold(child, known)
        group = groups.get(key := ("#" if numbered else part, id(below))) or groups.setdefault(key, ([], below))
        if numbered:
            group[0].append(int(part))
    joined = tuple(
        (str(numbers[0]), (), below) if len(numbers) == 1 else (part, tuple(sorted(numbers)), below)
        for (part, _), (numbers, below) in groups.items()
    )
    contents = (node.leaf, tuple((part, numbers, id(below)) for part, numbers, below in joined))
    count = (node.leaf is not None) + sum(max(1, len(numbers)) * below.count for _, numbers, below in joined)
    return known.setdefault(contents, _FoldedNode(node.leaf, joined, count))


def _below(node: _FoldedNode[Leaf], depth: int, times: int) -> Iterator[Line[Leaf]]:
    for path in (path for step in node.below for path in _paths(step)):
        last = path[-1][2]
        ranges = [numbers for _, numbers, _ in path if numbers]
        count = times * prod(map(len, ranges))
        yield Line(
            depth=depth,
            label=".".join(part for part, _, _ in path),
            ranges=" ".join(map(ranges_text, ranges)),
            leaf=last.leaf,
            count=count * last.count,
        )
        yield from _below(last, depth + 1, count)


def _paths(step: _Step[Leaf]) -> Iterator[tuple[_Step[Leaf], ...]]:
    """Steps that make one line: down to the first node with several children that are not numbers."""
    below = step[2].below
    if step[2].leaf is None and (len(below) == 1 or all(numbers or part.isdigit() for part, numbers, _ in below)):
        for inner in below:
            for path in _paths(inner):
                yield (step, *path)
    else:
        yield (step,)
