"""`ucp inspect` without further options: a checkpoint on a page."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from ucp.core.index import AtomIndex, Index, Kind, ParamGroup
from ucp.core.text.overview import overview, remarks
from ucp.core.text.page import Section, lines
from ucp.core.text.units import count_text, nbytes_text, printable, ranges_text, shape_text
from ucp.io.folder import path_of
from ucp_cli.pages.render import table
from ucp_cli.pages.tree import Line, collapsed
from ucp_cli.pages.values import brief, what_is_held

__all__ = ["file_rows", "inspect_page", "shown_path", "stages"]

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
"""Number of a layer in a name: the first number. Examples: decoder.layers.3.mlp, 3.attention."""


def inspect_page(index: Index) -> list[Section | RenderableType | None]:
    """The parts of the page."""
    return [
        *overview(index),
        *_tree(index),
        table("Pipeline stages", (">stage", ">tensors", "layers", "other modules"), _stage_rows(index)),
        lines("Tied", [f"{alias} = {name}" for alias, name in index.aliases.items()]),
        table("Parameter groups", (">group", ">parameters", "hyper-parameters"), _group_rows(index.groups)),
        table("Extras", ("name", "holds"), _extra_rows(index)),
        *remarks(index),
    ]


@dataclass(frozen=True, slots=True)
class _Look:
    """What is shown of an atom; atoms of one look are one line."""

    shape: str
    dtype: str
    others: str
    kind: Kind

    def remark(self, usual: str) -> str:
        """What is to be said of its states, when `usual` goes without saying."""
        if self.kind is not Kind.PARAMETER:
            return ", ".join(filter(None, [self.kind.value, self.others]))
        return "" if self.others == usual else self.others or "no other state"


def _look(atom: AtomIndex) -> _Look:
    weight = atom.states["weight"].dtype if "weight" in atom.states else None
    others = (
        name if weight in (None, state.dtype) else f"{name}:{state.dtype}"
        for name, state in atom.states.items()
        if name != "weight"
    )
    return _Look(shape_text(atom.global_shape), weight.value if weight else "-", " ".join(others), atom.kind)


def _tree(index: Index) -> Iterator[Section | RenderableType | None]:
    """The parameters, and what the signs of the tree mean where they occur in it."""
    same: dict[_Look, _Look] = {}
    looks = {name: same.setdefault(look, look) for name, atom in index.atoms.items() for look in (_look(atom),)}
    common = Counter(look.others for look in looks.values() if look.kind is Kind.PARAMETER).most_common(1)
    usual = common[0][0] if common else ""
    title = f"Parameters (optimizer state: {usual.replace(' ', ', ')}, unless noted)" if usual else "Parameters"
    rows = list(collapsed(looks))
    yield table(title, ("name", ">", "shape", "dtype", ""), [_tree_row(line, usual) for line in rows])
    folded = next((line for line in rows if line.ranges), None)
    if folded is not None:
        first = folded.ranges.partition(" ")[0]
        yield Text(f"  #  [{first}]: the same below each of these numbers; ×N: N such tensors", style="dim")


def _tree_row(line: Line[_Look], usual: str) -> tuple[str | Text, ...]:
    label = Text("  " * line.depth + printable(line.label))
    if line.ranges:
        label.append(f"  [{line.ranges}]", style="cyan")
    if line.leaf is None:
        return label, "", "", "", ""
    times = Text(f"×{line.count}" if line.count > 1 else "", style="dim")
    return label, times, line.leaf.shape, line.leaf.dtype, line.leaf.remark(usual)


def _stage_rows(index: Index) -> list[tuple[str, ...]]:
    """A row per pipeline stage: the layers that it holds by their numbers, and the modules beside them."""
    held: dict[int, list[str]] = {}
    for atom in index.atoms.values():
        for stage in stages(atom):
            held.setdefault(stage, []).append(atom.name)
    rows: list[tuple[str, ...]] = []
    for stage, names in sorted(held.items()):
        layers = {int(found[1]) for name in names if (found := _LAYER.search(name))}
        others = dict.fromkeys(name.rpartition(".")[0] or name for name in names if not _LAYER.search(name))
        rows.append((str(stage), count_text(len(names)), ranges_text(sorted(layers)), ", ".join(others)))
    return rows


def stages(atom: AtomIndex) -> list[int]:
    """Pipeline stages that hold a parameter, where that is known; of virtual stages those of the pipeline's ranks."""
    own = next((axis for axis in atom.layout.axes if axis.axis == "pp" and axis.parts > 1), None)
    return own.holders(atom.global_shape) if own else []


def _group_rows(groups: Sequence[ParamGroup]) -> list[tuple[str, str, str]]:
    """A row per group with what sets it apart, and one with what all of them share."""
    said = [[f"{key}={brief(value)}" for key, value in group.hyper.items()] for group in groups]
    shared = [text for text in said[0] if all(text in own for own in said)] if len(groups) > 1 else []
    rows = [
        (str(number), count_text(len(group.params)), "  ".join(text for text in own if text not in shared))
        for number, (group, own) in enumerate(zip(groups, said, strict=True))
    ]
    return [*rows, ("all", count_text(sum(len(group.params) for group in groups)), "  ".join(shared))][
        : len(rows) + bool(shared)
    ]


def _extra_rows(index: Index) -> list[tuple[str, ...]]:
    ranks: dict[tuple[str, str], list[int]] = {}
    for extra in index.extras:
        own = ranks.setdefault((extra.name, what_is_held(extra)), [])
        if extra.rank is not None:
            own.append(extra.rank)
    return [
        (f"{name} (ranks {ranges_text(sorted(own))})" if own else name, what) for (name, what), own in ranks.items()
    ]


def file_rows(index: Index) -> list[tuple[str, ...]]:
    """A row per file: name, role, bytes."""
    return [(shown_path(index, file.path), file.role, nbytes_text(file.nbytes)) for file in index.files]


def shown_path(index: Index, path: str) -> str:
    """`path` seen from the checkpoint, where it lies in it."""
    root = index.path if path_of(index.path).is_dir() else os.path.dirname(index.path)
    return os.path.relpath(path, root) if path.startswith(root + os.sep) else path
