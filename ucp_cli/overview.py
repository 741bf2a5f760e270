"""`ucp inspect` without further options: a checkpoint on a page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from ucp.atom import AtomIndex, Index, Kind, ParamGroup
from ucp_cli.render import facts, lines, table
from ucp_cli.tally import count_kinds, count_states
from ucp_cli.tree import collapsed
from ucp_cli.units import count_text, nbytes_text, plural, ranges_text, shape_text
from ucp_cli.values import brief

__all__ = ["file_rows", "overview", "shown_path", "source_facts"]


def overview(index: Index, missing: Sequence[str]) -> list[RenderableType | None]:
    """The parts of the page. `missing`: what keeps the pieces from being whole."""
    return [
        facts([*source_facts(index), *_size_facts(index)]),
        lines("Missing", missing, style="bold red"),
        table("States", ("state", "dtype", ">tensors", ">elements", ">bytes"), _state_rows(index)),
        table("Parameters", ("name", ">", "shape", "dtype", "other states"), _tree_rows(index)),
        lines("Tied", [f"{alias} = {name}" for alias, name in index.aliases.items()]),
        table("Parameter groups", (">group", ">parameters", "hyper-parameters"), _group_rows(index.groups)),
        table("Extras", ("name", "holds"), _extra_rows(index)),
        lines("Notes", index.notes),
        lines("Not in the atoms", index.dropped, style="yellow"),
    ]


def source_facts(index: Index) -> Iterator[tuple[str, str]]:
    """What it is, where it comes from."""
    yield "checkpoint", index.path
    yield "format", f"{index.format} ({', '.join(index.evidence)})" if index.evidence else index.format
    yield "producer", index.producer
    yield "topology", str(index.topology)
    yield "step", "not recorded" if index.step is None else count_text(index.step)


def _size_facts(index: Index) -> Iterator[tuple[str, str]]:
    words = {Kind.PARAMETER: "trained", Kind.FROZEN: "frozen", Kind.BUFFER: "buffers"}
    kinds = [tally for tally in count_kinds(index) if tally.tensors]
    yield "parameters", ", ".join(f"{count_text(t.tensors)} {words[t.kind]} ({count_text(t.numel)})" for t in kinds)
    low = Counter(atom.model_dtype for atom in index.atoms.values() if atom.model_dtype is not None)
    yield "computes in", ", ".join(f"{dtype} ({count_text(count)} tensors)" for dtype, count in low.items())
    stored = sum(file.nbytes for file in index.files)
    yield "bytes", f"{nbytes_text(index.nbytes)} of states; {plural(len(index.files), 'file')} of {nbytes_text(stored)}"


def _state_rows(index: Index) -> list[tuple[str, ...]]:
    rows = [
        (t.state, t.dtype.value, count_text(t.tensors), count_text(t.numel), nbytes_text(t.nbytes))
        for t in count_states(index)
    ]
    return rows


@dataclass(frozen=True, slots=True)
class _Look:
    """What is shown of an atom; atoms of one look are one line."""

    shape: str
    dtype: str
    others: str
    kind: Kind


def _look(atom: AtomIndex) -> _Look:
    weight = atom.states["weight"].dtype.value if "weight" in atom.states else ""
    others = (
        name if state.dtype.value == weight or not weight else f"{name}:{state.dtype}"
        for name, state in atom.states.items()
        if name != "weight"
    )
    return _Look(shape_text(atom.global_shape), weight, " ".join(others), atom.kind)


def _tree_rows(index: Index) -> Iterator[tuple[str | Text, ...]]:
    for line in collapsed({name: _look(atom) for name, atom in index.atoms.items()}):
        label = Text("  " * line.depth + line.label)
        if line.ranges:
            label.append(f"  [{line.ranges}]", style="cyan")
        look = line.leaf
        if look is None:
            yield label, "", "", "", ""
            continue
        times = f"×{line.count}" if line.count > 1 else ""
        others = look.others if look.kind is Kind.PARAMETER else f"{look.others} ({look.kind})".strip()
        yield label, Text(times, style="dim"), look.shape, look.dtype, others


def _group_rows(groups: Sequence[ParamGroup]) -> list[tuple[str, ...]]:
    return [
        (str(number), count_text(len(group.params)), "  ".join(f"{k}={brief(v)}" for k, v in group.hyper.items()))
        for number, group in enumerate(groups)
    ]


def _extra_rows(index: Index) -> list[tuple[str, ...]]:
    ranks: dict[tuple[str, str], list[int]] = {}
    for extra in index.extras:
        own = ranks.setdefault((extra.name, brief(extra.value)), [])
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
    root = index.path if os.path.isdir(index.path) else os.path.dirname(index.path)
    return os.path.relpath(path, root) if path.startswith(root + os.sep) else path
