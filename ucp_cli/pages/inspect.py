"""`ucp inspect`: the page of a checkpoint, of one parameter, or of a checkpoint that cannot be read."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil
from statistics import fmean

from rich.console import RenderableType
from rich.text import Text

from ucp.chain.staleness import map_experts
from ucp.core.index import AtomIndex, Extra, Fragment, Index, Kind, ParamGroup, StateIndex
from ucp.core.layout import Overlap
from ucp.core.tensor import TensorRef
from ucp.core.text.overview import overview, remarks
from ucp.core.text.page import Section, facts, lines
from ucp.core.text.units import count_text, nbytes_text, printable, ranges_text, shape_text
from ucp.errors import UsageError, format_list
from ucp.io.folder import path_of
from ucp.source.read import Survey
from ucp_cli.pages.render import heading, stack, table
from ucp_cli.pages.tree import Line, collapse
from ucp_cli.pages.values import describe_extra, describe_value, list_members

_MARKS = "·▁▂▃▄▅▆▇█"
"""From no layer to all."""
_WIDEST = 64
"""Marks in a row, at most."""

_LAYER = re.compile(r"(?:^|\.)(\d{1,18})\.")
"""Number of a layer in a name: the first number. Examples: decoder.layers.3.mlp, 3.attention."""


def inspect_page(index: Index) -> list[Section | RenderableType | None]:
    """The parts of the page."""
    return [
        *overview(index),
        *_tree(index),
        *detail_sections(index),
        *remarks(index),
    ]


def detail_sections(index: Index) -> Iterator[Section]:
    """What the page says of stages, iterations, ties, groups and extras."""
    stages = (">stage", ">tensors", "layers", "other modules")
    yield Section(title="Pipeline stages", columns=stages, rows=tuple(_stage_rows(index)))
    yield _iterations(index)
    yield lines("Tied", [f"{alias} = {name}" for alias, name in index.aliases.items()])
    groups = (">group", ">parameters", "hyper-parameters")
    yield Section(title="Parameter groups", columns=groups, rows=tuple(_group_rows(index.groups)))
    yield Section(title="Extras", columns=("name", "holds"), rows=tuple(_extra_rows(index)))


@dataclass(frozen=True, slots=True)
class _Look:
    """What is shown of an atom; atoms with equal looks share a line."""

    shape: str
    dtype: str
    others: str
    kind: Kind

    def remark(self, usual: str) -> str:
        """What to say about its kind and states; nothing for a parameter with the `usual` states."""
        if self.kind is not Kind.PARAMETER:
            return ", ".join(filter(None, [self.kind.value, self.others]))
        return "" if self.others == usual else self.others or "no other state"


def _tree(index: Index) -> Iterator[Section | RenderableType | None]:
    """The parameters as a tree, and what its signs mean, if it has any."""
    same: dict[_Look, _Look] = {}
    looks = {}
    for name, atom in index.atoms.items():
        weight = atom.states["weight"].dtype if "weight" in atom.states else None
        others = (
            state if weight in (None, stored.dtype) else f"{state}:{stored.dtype}"
            for state, stored in atom.states.items()
            if state != "weight"
        )
        look = _Look(shape_text(atom.global_shape), weight.value if weight else "-", " ".join(others), atom.kind)
        looks[name] = same.setdefault(look, look)
    common = Counter(look.others for look in looks.values() if look.kind is Kind.PARAMETER).most_common(1)
    usual = common[0][0] if common else ""
    title = f"Parameters (optimizer state: {usual.replace(' ', ', ')}, unless noted)" if usual else "Parameters"
    rows = list(collapse(looks))
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
    names_by_stage: dict[int, list[str]] = {}
    for atom in index.atoms.values():
        for stage in _stages(atom):
            names_by_stage.setdefault(stage, []).append(atom.name)
    rows: list[tuple[str, ...]] = []
    for stage, names in sorted(names_by_stage.items()):
        layers = {int(match[1]) for name in names if (match := _LAYER.search(name))}
        others = dict.fromkeys(name.rpartition(".")[0] or name for name in names if not _LAYER.search(name))
        rows.append((str(stage), count_text(len(names)), ranges_text(sorted(layers)), ", ".join(others)))
    return rows


def _iterations(index: Index) -> Section:
    """The iterations of a chain's parameters, and what the marks mean, if there are any."""
    rows = tuple(_iteration_rows(index))
    marks = "marks: experts in order; the taller, the more layers in which it is of that iteration (·: none, █: all)"
    return Section(
        title="Iterations",
        columns=(">iteration", ">parameters", "experts"),
        rows=rows,
        more=marks if any(experts for *_, experts in rows) else "",
    )


def _iteration_rows(index: Index) -> list[tuple[str, ...]]:
    """A row per iteration of the parameters, with a mark for each expert; none if all are of one iteration."""
    counts = Counter(index.step or 0 if atom.iteration is None else atom.iteration for atom in index.atoms.values())
    if len(counts) < 2:
        return []
    shares = map_experts(index)
    return [
        (
            f"{iteration:,}",
            count_text(count),
            "".join(_MARKS[ceil(share * (len(_MARKS) - 1))] for share in _thin(shares.get(iteration, []))),
        )
        for iteration, count in sorted(counts.items())
    ]


def _thin(shares: Sequence[float]) -> list[float]:
    """At most `_WIDEST` numbers, each the mean of neighbours."""
    width = -(-len(shares) // _WIDEST) or 1
    return [fmean(shares[low : low + width]) for low in range(0, len(shares), width)]


def _stages(atom: AtomIndex) -> list[int]:
    """Pipeline stages that hold a parameter, if that is known; for virtual stages, the pipeline ranks."""
    pipeline = next((axis for axis in atom.layout.axes if axis.axis == "pp" and axis.parts > 1), None)
    return pipeline.holders(atom.global_shape) if pipeline else []


def _group_rows(groups: Sequence[ParamGroup]) -> list[tuple[str, str, str]]:
    """A row per group with what sets it apart, and one with what all of them share."""
    texts_by_group = [[f"{key}={describe_value(value)}" for key, value in group.hyper.items()] for group in groups]
    shared = (
        [text for text in texts_by_group[0] if all(text in texts for texts in texts_by_group)]
        if len(groups) > 1
        else []
    )
    rows = [
        (str(number), count_text(len(group.params)), "  ".join(text for text in texts if text not in shared))
        for number, (group, texts) in enumerate(zip(groups, texts_by_group, strict=True))
    ]
    return [*rows, ("all", count_text(sum(len(group.params) for group in groups)), "  ".join(shared))][
        : len(rows) + bool(shared)
    ]


def _extra_rows(index: Index) -> list[tuple[str, ...]]:
    ranks: dict[tuple[str, str], list[int]] = {}
    for extra in index.extras:
        extra_ranks = ranks.setdefault((extra.name, describe_extra(extra)), [])
        if extra.rank is not None:
            extra_ranks.append(extra.rank)
    return [
        (f"{name} (ranks {ranges_text(sorted(extra_ranks))})" if extra_ranks else name, what)
        for (name, what), extra_ranks in ranks.items()
    ]


def find_extras(index: Index, globs: Sequence[str]) -> list[Extra]:
    """The extras that match one of `globs`. Raises UsageError if a glob matches none."""
    unused = [glob for glob in globs if not any(fnmatchcase(extra.name, glob) for extra in index.extras)]
    if unused:
        known = format_list(dict.fromkeys(extra.name for extra in index.extras)) or "none"
        raise UsageError(f"expected names of extras; {', '.join(unused)} match none. The checkpoint has\n{known}")
    return [extra for extra in index.extras if any(fnmatchcase(extra.name, glob) for glob in globs)]


def extra_section(extra: Extra) -> Section:
    """The values in an extra, `name = value` each; the attributes of an object, such as a namespace of arguments."""
    title = extra.name if extra.rank is None else f"{extra.name} (rank {extra.rank})"
    members = list(list_members(extra.value))
    values = [f"{name} = {text}" for name, text in members] if members else [describe_extra(extra)]
    return lines(title, map(printable, values))


def file_rows(index: Index) -> list[tuple[str, ...]]:
    """A row per file: name, role, bytes."""
    return [(_shown_path(index, file.path), file.role, nbytes_text(file.nbytes)) for file in index.files]


def _shown_path(index: Index, path: str) -> str:
    """`path` relative to the checkpoint, if it is inside."""
    root = index.path if path_of(index.path).is_dir() else os.path.dirname(index.path)
    return os.path.relpath(path, root) if path.startswith(root + os.sep) else path


_COLUMNS = ("state", ">at byte", ">bytes", "of file")


def param_page(index: Index, atom: AtomIndex) -> RenderableType:
    """Facts of one parameter, and a row per piece of each of its states."""
    group = next((str(n) for n, group in enumerate(index.groups) if atom.name in group.params), "")
    tied = ", ".join(alias for alias, name in index.aliases.items() if name == atom.name)
    summary = facts(
        [
            ("shape", shape_text(atom.global_shape)),
            ("kind", atom.kind.value),
            ("computes in", atom.model_dtype.value if atom.model_dtype else ""),
            ("laid out", "; ".join(atom.layout.lines)),
            ("made of", "; ".join(f"{name} ({', '.join(summary.lines)})" for name, summary in atom.made_of.items())),
            ("stage", ", ".join(map(str, _stages(atom)))),
            ("group", group),
            ("tied", tied),
            ("bytes", nbytes_text(atom.nbytes)),
        ]
    )
    rows = [row for name, state in atom.states.items() for row in _state_rows(index, atom, name, state)]
    return stack(heading(atom.name), summary, table("", _COLUMNS, rows))


def _state_rows(index: Index, atom: AtomIndex, name: str, state: StateIndex) -> Iterator[tuple[str, ...]]:
    """A row for the state, then one per piece."""
    rule = "" if state.overlap is Overlap.EXCLUSIVE else f", {state.overlap} of terms"
    has_shape = state.global_shape == atom.global_shape
    shape = "" if has_shape else f" {shape_text(state.global_shape)}"
    stored = f", stored as {'; '.join(state.layout.lines)}" if has_shape and state.layout is not None else ""
    yield f"{name} {state.dtype}{shape}{rule}{stored}", "", "", ""
    for fragment in state.fragments:
        yield (f"  {fragment.box}" if fragment.box.sizes else "  scalar", *_place(index, state, fragment))


def _place(index: Index, state: StateIndex, fragment: Fragment) -> tuple[str, str, str]:
    ref = fragment.ref
    words = [
        f"copy {fragment.replica}" if fragment.replica else "",
        f"term {fragment.term}" if fragment.term else "",
        ref.dtype.value if ref.dtype is not state.dtype else "",
    ]
    if not isinstance(ref, TensorRef):
        return "", count_text(ref.nbytes), " ".join(("(in the index)", *filter(None, words)))
    words += ["" if ref.is_contiguous else "strided", ref.codec]
    remarks = ", ".join(filter(None, words))
    path = _shown_path(index, ref.path) + (f" ({remarks})" if remarks else "")
    return count_text(ref.offset), count_text(ref.codec_nbytes if ref.codec else ref.nbytes), path


_NUMBER = re.compile(r"\d+", re.ASCII)


def survey_sections(survey: Survey, problem: str) -> list[Section]:
    """What every page of a checkpoint that cannot be read begins with. `problem`: why it cannot."""
    evidence = f" ({', '.join(survey.evidence)})" if survey.evidence else ""
    summary = [
        ("checkpoint", survey.path),
        ("format", f"{survey.format}{evidence}"),
        ("readable", "NO: see Problems"),
        ("files", f"{count_text(len(survey.files))} of {nbytes_text(sum(file.nbytes for file in survey.files))}"),
    ]
    return [facts(summary), lines("Problems", [problem])]


def survey_page(survey: Survey, problem: str, *, each: bool) -> list[Section | RenderableType | None]:
    """The parts of the page. `problem`: why it cannot be read; `each`: a line for every file."""
    root = survey.path if path_of(survey.path).is_dir() else os.path.dirname(survey.path)
    sizes = {os.path.relpath(file.path, root): file.nbytes for file in survey.files}
    each_file = [(name, nbytes_text(nbytes)) for name, nbytes in sizes.items()]
    return [
        *survey_sections(survey, problem),
        table("Files", ("file", ">bytes"), each_file)
        if each
        else table("Files, by name", ("name", "numbers", ">files", ">bytes each", ">bytes"), list(_name_rows(sizes))),
    ]


def join_alike(sizes: Mapping[str, int]) -> Iterator[tuple[str, str, list[int]]]:
    """For names that differ only in numbers: one with "#", the numbers, sizes of all. `sizes`: name to bytes."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in sizes:
        alike.setdefault(tuple(_NUMBER.split(name)), []).append(name)
    for names in alike.values():
        yield (*_join_names(names), sorted(sizes[name] for name in names))


def _name_rows(sizes: Mapping[str, int]) -> Iterator[tuple[str | Text, ...]]:
    for label, numbers, file_sizes in join_alike(sizes):
        spread = nbytes_text(file_sizes[0]) + (
            f" to {nbytes_text(file_sizes[-1])}" if file_sizes[-1] != file_sizes[0] else ""
        )
        shown = Text(numbers, style="cyan")
        yield printable(label), shown, count_text(len(file_sizes)), spread, nbytes_text(sum(file_sizes))


def _join_names(names: list[str]) -> tuple[str, str]:
    """One name for several, with "#" for numbers that are not the same in all; and those numbers."""
    columns = list(zip(*(_NUMBER.findall(name) for name in names), strict=True))
    varied = [len(set(column)) > 1 for column in columns]
    place = iter(zip(varied, columns, strict=True))

    def replace_number(match: re.Match[str]) -> str:
        is_varied, _ = next(place)
        return "#" if is_varied else match.group()

    ranges = [sorted(set(map(int, numbers))) for is_varied, numbers in zip(varied, columns, strict=True) if is_varied]
    return _NUMBER.sub(replace_number, names[0]), " ".join(f"[{ranges_text(numbers)}]" for numbers in ranges)
