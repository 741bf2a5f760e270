"""The loss curves of the matrix as an SVG, drawn by hand: no library is needed to draw a few lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.integration.live.matrix.load_matrix import STEPS, Outcome, Way

_WIDTH, _HEIGHT, _LOSS, _GAP = 460, 470, (40, 260), (300, 420)
"""Of a panel; top and bottom of its two frames, pixels."""
_LEFT, _RIGHT = 50, 445
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")
_SMALLEST, _LARGEST = -8, -1
"""Powers of ten of the differences."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A resumed run."""

    label: str
    losses: Sequence[float]
    gaps: Sequence[float]


def figure(losses: Mapping[Way, Sequence[float]], outcomes: Mapping[tuple[Way, Way], Outcome]) -> str:
    """Both panels: the first source into every target, and every source into the target that most reach."""
    reached = {cell: own for cell, own in outcomes.items() if own.losses and cell[0].model == "dense"}
    one_source = next(iter(losses))
    counts = [target for _, target in reached]
    one_target = max(dict.fromkeys(counts), key=counts.count)
    left = {target.label: (one_source, own) for (source, target), own in reached.items() if source == one_source}
    right = {source.label: (source, own) for (source, target), own in reached.items() if target == one_target}
    panels = [
        _panel(f"(a) {one_source.label} into", losses[one_source], _curves(left, losses)),
        _panel(f"(b) into {one_target.label}", losses[one_source], _curves(right, losses)),
    ]
    shifted = "".join(f'<g transform="translate({at * _WIDTH})">{own}</g>' for at, own in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{shifted}</svg>\n'
    )


def _curves(cells: Mapping[str, tuple[Way, Outcome]], losses: Mapping[Way, Sequence[float]]) -> list[Curve]:
    return [
        Curve(label=label, losses=own.losses, gaps=own.gaps(losses[source])) for label, (source, own) in cells.items()
    ]


def _panel(title: str, uninterrupted: Sequence[float], curves: Sequence[Curve]) -> str:
    top, bottom = max(uninterrupted), min(uninterrupted)
    parts = [f'<text x="{_LEFT}" y="22" font-size="13">{title}</text>', _frame(_LOSS), _frame(_GAP)]
    parts += [_label(_LEFT - 6, _y(own, top, bottom, _LOSS), f"{own:.1f}") for own in (top, bottom)]
    parts += [
        _label(_LEFT - 6, _y(own, _LARGEST, _SMALLEST, _GAP), f"1e{own}") for own in (_LARGEST, -3, -5, _SMALLEST + 1)
    ]
    parts += [_label(_x(at) + 8, _GAP[1] + 16, str(at)) for at in (0, STEPS, 2 * STEPS)]
    parts.append(f'<text x="{_LEFT}" y="{_GAP[1] + 36}">step; loss above, relative difference below</text>')
    parts.append(_line(_points(uninterrupted, 0, top, bottom), "black", 4, opacity=0.25))
    parts.append(_line([(_x(STEPS), _LOSS[0]), (_x(STEPS), _GAP[1])], "gray", 1, dash="3 3"))
    for number, (curve, colour) in enumerate(zip(curves, _COLOURS, strict=False)):
        parts.append(_line(_points(curve.losses, STEPS, top, bottom), colour, 1.2))
        parts.append(_line(_differences(curve.gaps), colour, 1))
        parts.append(f'<text x="{_LEFT + 10}" y="{_LOSS[1] - 8 - 14 * number}" fill="{colour}">{curve.label}</text>')
    return "".join(parts)


def _points(losses: Sequence[float], start: int, top: float, bottom: float) -> list[Point]:
    return [(_x(start + at), _y(own, top, bottom, _LOSS)) for at, own in enumerate(losses)]


def _differences(gaps: Sequence[float]) -> list[Point]:
    powers = [max(math.log10(own), _SMALLEST) if own else _SMALLEST for own in gaps]
    return [(_x(STEPS + at), _y(own, _LARGEST, _SMALLEST, _GAP)) for at, own in enumerate(powers)]


def _x(step: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * step / (2 * STEPS)


def _y(value: float, top: float, bottom: float, frame: tuple[int, int]) -> float:
    return frame[1] - (frame[1] - frame[0]) * (value - bottom) / (top - bottom)


def _frame(frame: tuple[int, int]) -> str:
    return (
        f'<rect x="{_LEFT}" y="{frame[0]}" width="{_RIGHT - _LEFT}" height="{frame[1] - frame[0]}" '
        'fill="none" stroke="silver"/>'
    )


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'


def _line(points: Iterable[Point], colour: str, width: float, *, opacity: float = 1, dash: str = "none") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}" stroke-dasharray="{dash}"/>'
    )
