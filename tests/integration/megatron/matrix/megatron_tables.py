"""The tables of the Megatron matrix in Markdown, made from what the runs found. Rows and columns have one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tests.integration.megatron.matrix.megatron_matrix import KINDS, REFERENCES, SOURCES, TARGETS, Cell, Reading, Source
from tests.integration.megatron.megatron_jobs import Loaded

TITLES = {"gpt": "GPT", "llama": "Llama-GQA", "mixtral": "Mixtral"}
EXPERT_LAYOUTS = tuple(source.label for source in SOURCES if "ep" in source.job)
SHIFTED, ELSEWHERE = " [1]", " [2]"
"""Marks of what the page explains: states that Megatron writes shifted; a layout that a release does not run."""


def loads_table(cells: Sequence[Cell], loaded: Mapping[str, Loaded]) -> str:
    """Oracle 2: what real Megatron held after loading, by source and target."""
    by_place = {
        (source, target): [cell for cell in cells if cell.source == source and cell.target == target]
        for source in SOURCES
        for target in TARGETS
    }

    def row(source: Source) -> list[str]:
        return [_loads(by_place[source, target], loaded) for target in TARGETS]

    return _table([target.label for target in TARGETS], row)


def readings_table(readings: Sequence[Reading]) -> str:
    """Oracles 1 and 3: what `ucp` read, by source."""
    by_source = {source: [own for own in readings if own.source == source] for source in SOURCES}
    columns = ["its three kinds", *[target.label for target in REFERENCES], "the ranks", "masters round to weights"]

    def row(source: Source) -> list[str]:
        own = by_source[source]
        return [_kinds(own), *[_layout(own, target.label) for target in REFERENCES], _ranks(own), _rounding(own)]

    return _table(columns, row)


def refused_table(messages: Mapping[tuple[str, str], str]) -> str:
    """What is refused: source and topology -> the reason in the message."""
    lines = ["| source | target | what `ucp` says |", "|---|---|---|"]
    lines += [f"| {source} | `{topology}` | {said} |" for (source, topology), said in messages.items()]
    return "\n".join(lines)


def _table(columns: Sequence[str], row: Callable[[Source], list[str]]) -> str:
    lines = [f"| model | source | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for base, title in TITLES.items():
        own = [source for source in SOURCES if source.base == base]
        for source in own:
            layers = ", 8 layers" if source.model != base else ""
            lines.append(f"| {title}{layers} | {source.label} | {' | '.join(row(source))} |")
        for label in EXPERT_LAYOUTS:
            if label not in [source.label for source in own]:
                lines.append(f"| {title} | {label} | {' | '.join(['no experts'] * len(columns))} |")
    return "\n".join(lines)


def _loads(cells: Sequence[Cell], loaded: Mapping[str, Loaded]) -> str:
    wrong = [f"**{cell.route.release}: {_wrong(loaded[cell.name])}**" for cell in cells if not loaded[cell.name].exact]
    if wrong:
        return "; ".join(wrong)
    counts = {loaded[cell.name].tensors for cell in cells}
    marks = SHIFTED * any(cell.source.is_written_wrongly("full") for cell in cells)
    marks += ELSEWHERE * any(cell.is_elsewhere for cell in cells)
    return f"exact, {len(cells)} x {'/'.join(str(count) for count in sorted(counts))}{marks}"


def _wrong(own: Loaded) -> str:
    return own.error.partition("\n")[0] or f"{len(own.differences)} of {own.tensors} differ"


def _kinds(readings: Sequence[Reading]) -> str:
    pairs = [(own, kind) for own in readings for kind in KINDS if kind in own.others]
    return _counted(readings, [(own, not own.others[kind]) for own, kind in pairs])


def _layout(readings: Sequence[Reading], label: str) -> str:
    return _counted(readings, [(own, not own.others[label]) for own in readings])


def _ranks(readings: Sequence[Reading]) -> str:
    return _counted(readings, [(own, not own.not_held) for own in readings])


def _counted(readings: Sequence[Reading], outcomes: Sequence[tuple[Reading, bool]]) -> str:
    """How many comparisons of how many states found none that differs."""
    states = max(own.states for own in readings)
    fine = sum(holds for _, holds in outcomes)
    if any(not holds and not own.source.is_written_wrongly("full") for own, holds in outcomes):
        return f"**{len(outcomes) - fine} of {len(outcomes)} differ**"
    return f"{fine} x {states}" + SHIFTED * (fine < len(outcomes))


def _rounding(readings: Sequence[Reading]) -> str:
    sound = [own for own in readings if not own.source.is_written_wrongly(own.kind)]
    wrong = [own.kind for own in sound if own.not_rounded or own.drifted]
    if wrong:
        return f"**not in {', '.join(wrong)}**"
    return f"{len(sound)} x {sound[0].rounded}" + SHIFTED * (len(sound) < len(readings))
