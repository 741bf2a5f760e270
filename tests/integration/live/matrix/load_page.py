"""The page of the matrix of `load_into`, and its picture: written by the run that found what they say."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from tests.integration.live.matrix.curves import figure
from tests.integration.live.matrix.load_matrix import RELEASE, SOURCES, STEPS, TARGETS, Outcome, Way

DOCS = Path(__file__).resolve().parents[4] / "docs"

Losses = Mapping[Way, Sequence[float]]
Cell = tuple[Way, Way]
Outcomes = Mapping[Cell, Outcome]

_PAGE = """# `load_into`: the matrix

`make integration` measures everything on this page, and makes the page and its picture.
Sources and targets are runs of the same two models (`tests/integration/live/reference`: a Llama of {dense} layers, a
Mixtral of {moe} layers with {experts} experts) that start from the same weights and see the same data: megatron-core
{release}, DeepSpeed, FSDP2, and parallelism written by hand. {versions}, fp32.

A source trains {steps} steps, saves as its framework does, and trains {steps} more: that is the uninterrupted run. A
target starts with other weights and another learning rate, `ucp.load_into` brings the source's checkpoint straight into
it, and it trains {steps} steps.

## State after the load

After `load_into`, the tensors of all ranks (weights, fp32 masters and both moments) and the step were compared with
what `ucp.open` reads from the source, bit for bit. A cell gives the number of tensors.

{states}

## Losses

A cell gives the largest relative difference of a loss from the uninterrupted run of the source, in the first
{first} steps and in all {steps}. Other layouts sum floats in another order, so the last bits differ from the first
step on, and the differences grow with every step. In the Mixtral they grow faster: if the scores of two experts for
a token are nearly equal, a last bit can send the token to the other expert.

{gaps}

The uninterrupted runs of the sources themselves differ by at most {dense_gap:.0e} (Llama) and {moe_gap:.0e} (Mixtral).

![losses before and after](../explanation/load-into.svg)

Above: the loss of the uninterrupted run, and of the runs that resumed from its checkpoint (a: one source, many targets;
b: many sources, one target). Below: how far each is from its uninterrupted run.
"""


def write_page(losses: Losses, outcomes: Outcomes, *, first: int, sizes: Mapping[str, int]) -> str:
    """Write both, and give the text."""
    text = _PAGE.format(
        **sizes,
        release=RELEASE,
        versions=f"torch {torch.__version__}, Python {platform.python_version()}, on CPU with gloo",
        steps=STEPS,
        first=first,
        states=_tables(outcomes, lambda cell: _state(outcomes[cell])),
        gaps=_tables(outcomes, lambda cell: _gaps(outcomes[cell], losses[cell[0]], first)),
        dense_gap=_apart(losses, "dense"),
        moe_gap=_apart(losses, "moe"),
    )
    (DOCS / "reference" / "load-matrix.md").write_text(text)
    (DOCS / "explanation" / "load-into.svg").write_text(figure(losses, outcomes))
    return text


def _tables(outcomes: Outcomes, told: Callable[[Cell], str]) -> str:
    return "\n\n".join(_table(outcomes, model, told) for model in ("dense", "moe"))


def _table(outcomes: Outcomes, model: str, told: Callable[[Cell], str]) -> str:
    sources = [own for own in SOURCES if own.model == model]
    title = {"dense": "Llama", "moe": "Mixtral"}[model]
    lines = [
        f"| {title}: into (rows), from | {' | '.join(own.label for own in sources)} |",
        "|---|" + "---|" * len(sources),
    ]
    for target in (own for own in TARGETS if own.model == model):
        row = [told((source, target)) if (source, target) in outcomes else "not run" for source in sources]
        lines.append(f"| {target.label} | {' | '.join(row)} |")
    return "\n".join(lines)


def _state(own: Outcome) -> str:
    if own.exact:
        return f"exact, {own.compared}"
    return f"**{own.error.partition(chr(10))[0] or f'{len(own.differing)} of {own.compared} differ'}**"


def _gaps(own: Outcome, uninterrupted: Sequence[float], first: int) -> str:
    gaps = own.gaps(uninterrupted)
    return ", ".join(f"{own:.0e}" if own else "0" for own in (max(gaps[:first]), max(gaps))) if gaps else "none"


def _apart(losses: Losses, model: str) -> float:
    own = [found for way, found in losses.items() if way.model == model]
    return max(max(at) / min(at) - 1 for at in zip(*own, strict=True))
