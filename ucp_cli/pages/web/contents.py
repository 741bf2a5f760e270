"""What the page of a report contains: sections of text, bars, tables of norms, and data for the pictures."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from ucp.contract.model import sort_by_number
from ucp.core.index import AtomIndex, Index, SourceFile
from ucp.core.layout import Layout
from ucp.core.text.overview import count_states, overview, remarks
from ucp.core.text.page import Page, Section
from ucp.core.text.units import count_text, nbytes_text, printable, shape_text
from ucp.transfer.differences import Change
from ucp_cli.pages.inspect import detail_sections, join_alike, survey_sections
from ucp_cli.pages.web.holders import Shape, make_side

if TYPE_CHECKING:
    from ucp.checks.verify import DiffReport
    from ucp.conversion.plan_report import PlanReport
    from ucp.moe.report import ExpertsReport, LayerReport
    from ucp.source.read import Survey

_ALERTS = ("Problems", "Missing", "In doubt", "Warnings")
"""Titles of sections that say what is wrong; the page shows them all as problems."""

_LAYER = re.compile(r".*?(?:^|\.)\d+(?=\.|$)")
"""The part of a name up to its first number. Example: "model.layers.3" of model.layers.3.mlp.weight."""

_MOST_BARS = 12
_MOST_LAYERS = 400

Bar = tuple[str, str, float]
"""Label, amount as text, share of the largest."""


@dataclass(slots=True, kw_only=True)
class Contents:
    """Everything on a page."""

    verb: str
    """Command that made it."""
    subject: str
    """Path of the checkpoint, or of both."""
    parts: Page
    """Sections and lines of text, in order."""
    bars: dict[str, list[Bar]] = field(default_factory=dict)
    """Bytes by some property: title to bars."""
    norms: Section | None = None
    """Norms of differences: a row per layer, a column per state."""
    data: dict[str, Any] = field(default_factory=dict)
    """What the pictures are drawn from."""

    @property
    def alerts(self) -> list[Section]:
        """Sections that say what is wrong."""
        wrong = [part for part in self._sections if part.title in _ALERTS]
        return [replace(part, title="") if part.title == _ALERTS[0] else part for part in wrong]

    @property
    def head(self) -> list[Section | str]:
        """Lines and facts at the top."""
        parts = [part for part in self.parts if isinstance(part, str) or _is_facts(part)]
        return [part for part in parts if isinstance(part, str) or part.rows]

    @property
    def rest(self) -> list[Section]:
        """Other sections."""
        return [part for part in self._sections if part.title not in _ALERTS and not _is_facts(part)]

    @property
    def _sections(self) -> list[Section]:
        return [part for part in self.parts if isinstance(part, Section) and part.rows]


def _is_facts(section: Section) -> bool:
    return not section.columns and not section.is_list


def inspect_contents(index: Index, experts: ExpertsReport | None = None) -> Contents:
    """The page of a checkpoint. `experts`: what was read of its experts, if it was."""
    parts = [*overview(index), *detail_sections(index), *remarks(index)]
    data = _describe_params(index) | {"sides": [_source_side(index, "The run that saved it")]}
    if experts is not None:
        parts += [part for part in experts.page() if isinstance(part, Section) and part.title in ("Problems", "Notes")]
        data["experts"] = _describe_experts(experts)
    return Contents(verb="inspect", subject=index.path, parts=parts, bars=_index_bars(index), data=data)


def survey_contents(survey: Survey, problem: str) -> Contents:
    """The page of a checkpoint that cannot be read. `problem`: why it cannot."""
    bars = {"By file": _file_bars(survey.path, survey.files)}
    return Contents(verb="inspect", subject=survey.path, parts=survey_sections(survey, problem), bars=bars)


def plan_contents(report: PlanReport) -> Contents:
    """The page of a plan."""
    index = report.source
    target = make_side(
        "The target",
        (
            (
                state,
                [
                    (report.layouts[name, state], atom.states[state].global_shape)
                    if state in atom.states and (name, state) in report.layouts
                    else None
                    for name, atom in index.atoms.items()
                ],
            )
            for state in dict.fromkeys(state for _, state in report.layouts)
        ),
        without="Every file that holds this state has the full tensor.",
    )
    data = _describe_params(index) | {"sides": [_source_side(index, "The source"), target]}
    bars = _index_bars(index) | {"By file written": _alike_bars(report.files)}
    return Contents(verb="plan", subject=index.path, parts=[*report.page()], bars=bars, data=data)


def diff_contents(report: DiffReport) -> Contents:
    """The page of a comparison."""
    by_param: dict[str, list[Change]] = defaultdict(list)
    for change in report.changes:
        by_param[change.param or "(the checkpoint)"].append(change)
    looks = [
        {
            "label": " ".join(dict.fromkeys(change.what for change in changes)),
            "facts": [],
            "rows": [
                (
                    change.state, change.what, change.a, change.b,
                    *((_number(change.largest), _number(change.norm)) if change.what == "values" else ("", "")),
                )
                for change in changes
            ],
            "sizes": {},
            "shape": [],
        }
        for changes in by_param.values()
    ]  # fmt: skip
    columns = ["state", "differs in", "a", "b", ">largest", ">norm"]
    return Contents(
        verb="diff",
        subject=f"{report.a} and {report.b}",
        parts=[*report.page()],
        norms=_tabulate_norms(report.changes),
        data={**_list_names(by_param), "look": [*range(len(looks))], "looks": looks, "columns": columns, "sides": []},
    )


def _describe_params(index: Index) -> dict[str, Any]:
    """Names of parameters, and what is said of each; parameters that look alike share a look."""
    groups = {name: number for number, group in enumerate(index.groups) for name in group.params}
    numbers: dict[object, int] = {}
    looks: list[dict[str, Any]] = []
    column = []
    for name, atom in index.atoms.items():
        states = tuple((s, state.dtype, state.global_shape) for s, state in atom.states.items())
        key = (atom.global_shape, atom.kind, atom.model_dtype, atom.iteration, groups.get(name), states)
        made_of = tuple((made, layout.lines) for made, layout in atom.made_of.items())
        number = numbers.setdefault((key, made_of), len(looks))
        if number == len(looks):
            looks.append(_look(atom, groups.get(name)))
        column.append(number)
    return {
        **_list_names(index.atoms),
        "look": column,
        "looks": looks,
        "columns": ["state", "dtype", "shape", ">bytes"],
    }


def _look(atom: AtomIndex, group: int | None) -> dict[str, Any]:
    weight = next(iter(atom.states.values()), None)
    properties = [
        ("shape", shape_text(atom.global_shape)),
        ("kind", atom.kind.value),
        ("computes in", atom.model_dtype.value if atom.model_dtype else ""),
        ("iteration", "" if atom.iteration is None else count_text(atom.iteration)),
        ("group", "" if group is None else str(group)),
        ("made of", "; ".join(f"{name} ({', '.join(layout.lines)})" for name, layout in atom.made_of.items())),
        ("bytes", nbytes_text(atom.nbytes)),
    ]
    return {
        "label": f"{shape_text(atom.global_shape)} {weight.dtype if weight else ''}",
        "facts": [(label, printable(text)) for label, text in properties if text],
        "rows": [
            (printable(name), state.dtype.value, shape_text(state.global_shape), nbytes_text(state.nbytes))
            for name, state in atom.states.items()
        ],
        "sizes": {name: state.numel for name, state in atom.states.items()},
        "shape": list(atom.global_shape),
    }


def _list_names(names: Iterable[str]) -> dict[str, Any]:
    """Names as pairs of the number of a module and the last part."""
    modules: dict[str, int] = {}
    pairs: list[int | str] = []
    for name in names:
        module, _, last = printable(name).rpartition(".")
        pairs += [modules.setdefault(module, len(modules)), last]
    return {"modules": [*modules], "names": pairs}


def _source_side(index: Index, title: str) -> dict[str, Any]:
    def placed(state: str) -> Iterator[tuple[Layout, Shape] | None]:
        for atom in index.atoms.values():
            stored = atom.states.get(state)
            if stored is None or atom.made_of or atom.is_count(state) or stored.global_shape != atom.global_shape:
                yield None
            else:
                yield stored.layout or atom.layout, atom.global_shape

    names = dict.fromkeys(state for _, state, _ in index.states())
    sides = ((state, list(placed(state))) for state in names)
    without = "Its layout over ranks is not recorded, or it is made of other tensors (see there)."
    return make_side(title, ((state, column) for state, column in sides if any(column)), without=without)


def _index_bars(index: Index) -> dict[str, list[Bar]]:
    tallies = count_states(index)
    dtypes, states = Counter[str](), Counter[str]()
    for tally in tallies:
        dtypes[tally.dtype.value] += tally.nbytes
        states[tally.state] += tally.nbytes
    return {
        "By dtype": _bars(dtypes),
        "By state": _bars(states),
        "By file read": _file_bars(index.path, index.files),
    }


def _file_bars(root: str, files: Iterable[SourceFile]) -> list[Bar]:
    return _alike_bars({file.path.removeprefix(f"{root.rstrip('/')}/"): file.nbytes for file in files})


def _alike_bars(files: Mapping[str, int]) -> list[Bar]:
    """Bars of files; where there are many, those whose names differ in numbers only are one."""
    if len(files) <= _MOST_BARS:
        return _bars(files)
    return _bars({f"{label} {numbers}": sum(sizes) for label, numbers, sizes in join_alike(files)})


def _bars(amounts: Mapping[str, int]) -> list[Bar]:
    """The largest bars first; the smallest are one, if there are many."""
    ordered = sorted(amounts.items(), key=lambda item: -item[1])
    rest = ordered[_MOST_BARS:]
    ordered = ordered[:_MOST_BARS] + ([(f"{len(rest):,} more", sum(n for _, n in rest))] if rest else [])
    largest = max((nbytes for _, nbytes in ordered), default=0) or 1
    return [(printable(label), nbytes_text(nbytes), nbytes / largest) for label, nbytes in ordered]


def _number(value: float) -> str:
    return f"{value:.3g}"


def _tabulate_norms(changes: Sequence[Change]) -> Section | None:
    """Norm of the difference by layer and state, and of all layers together; None if no values differ."""
    norms: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for change in changes:
        if change.what == "values":
            layer = _LAYER.match(change.param)
            for row in (layer[0] if layer else change.param.rpartition(".")[0] or change.param, "all"):
                norms[row][change.state].append(change.norm)
    if not norms:
        return None
    total = norms.pop("all")
    rows = [("all", total), *((layer, norms[layer]) for layer in sort_by_number(norms))]
    return Section(
        title="Norm of the difference, by layer and state",
        columns=("layer", *(f">{state}" for state in total)),
        rows=tuple(
            (label, *(_number(math.hypot(*by_state[state])) if state in by_state else "" for state in total))
            for label, by_state in rows[: _MOST_LAYERS + 1]
        ),
        more=f"and {len(rows) - 1 - _MOST_LAYERS:,} more layers: --json" if len(rows) > _MOST_LAYERS + 1 else "",
    )


def _describe_experts(report: ExpertsReport) -> dict[str, Any]:
    """The map of experts: a row per layer, for each expert log2 of its signal over the layer's median."""
    return {
        "signal": "mean squared gradient (exp_avg_sq)" if report.has_moments else "norm of the weights",
        "layers": [_describe_layer(layer) for layer in report.layers],
    }


def _describe_layer(layer: LayerReport) -> dict[str, Any]:
    middle = median(layer.finite_signal)
    remarks = {
        number: word
        for word, numbers in (("dead", layer.dead), ("starved", layer.starved), ("hot", layer.hot))
        for number in numbers
    }
    cells = {
        str(expert.number): [
            round(math.log2(signal / middle), 2) if math.isfinite(signal) and signal > 0 < middle else None,
            _number(signal),
            remarks.get(expert.number) or ("not finite" if not math.isfinite(signal) else "" if signal else "zero"),
            *([count_text(round(expert.tokens))] if expert.tokens is not None and math.isfinite(expert.tokens) else []),
        ]
        for expert, signal in zip(layer.experts, layer.signal, strict=True)
    }
    return {"label": printable(layer.module), "count": layer.num_experts, "cells": cells}
