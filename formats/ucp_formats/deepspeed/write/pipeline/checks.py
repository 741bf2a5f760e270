"""What the user says of the layers of a pipeline, held against the files before anything is decided by it."""

from __future__ import annotations

from collections.abc import Iterator

from ucp.errors import UsageError, counted, listed
from ucp_formats.deepspeed.write.pipeline.layers import Pipeline
from ucp_formats.deepspeed.write.pipeline.settings import StageSettings
from ucp_formats.deepspeed.write.pipeline.wording import numbers_shown

__all__ = ["MOST_EXTRA", "check_settings"]

MOST_EXTRA = 3
"""Functions after the last layer that are reckoned with, where the user does not say that there are more."""


def check_settings(pipeline: Pipeline, settings: StageSettings, count: int, where: str) -> None:
    """Raise UsageError, with all that does not fit the files of `where` or `count` stages."""
    wrong = list(_misfits(pipeline, settings, count))
    if wrong:
        files = numbers_shown(pipeline.layers) or "none"
        raise UsageError(f"--set does not fit {where}, which has files of layers {files}:\n{listed(wrong)}")


def _misfits(pipeline: Pipeline, own: StageSettings, count: int) -> Iterator[str]:
    said = own.bounds[-1] if own.bounds else own.layers
    tied = [layer for layers in own.tied.values() for layer in layers]
    least = max([pipeline.free, *(layer + 1 for layer in tied)])
    if said is not None and said < least:
        yield f"{said} layers: there are layers up to number {least - 1}"
    if own.layers is None:
        yield from _too_far(pipeline, own)
    if own.bounds is not None and len(own.bounds) != count + 1:
        yield f"stages: {len(own.bounds) - 1} of them for pp={count}"
    for key, layers in own.tied.items():
        if key not in pipeline.tied_stages:
            known = ", ".join(pipeline.tied_stages) or "none"
            yield f"tied={key}: trained tied layers of the source are {known}"
        yield from (f"tied={key}:{layer}: this layer has a file" for layer in layers if layer in pipeline.layers)
    if own.matched and said is not None and max(own.matched) >= said:
        yield f"type: layer {max(own.matched)} of {said}"


def _too_far(pipeline: Pipeline, own: StageSettings) -> Iterator[str]:
    """Layers that no file speaks for: one beyond those is a function, or one that uses a tied layer again."""
    most = pipeline.free + len(pipeline.tied_stages) + MOST_EXTRA
    named = {f"tied={key}": max(layers) + 1 for key, layers in own.tied.items()}
    if own.bounds:
        named["stages"] = own.bounds[-1]
    elif own.matched:
        named["partition=type"] = max(own.matched) + 1
    for name, layers in named.items():
        if layers > most:
            yield (
                f"{name}: {counted(layers, 'layer')}, {layers - pipeline.free} of them after the last with a file. If "
                f"the run's list does end with so many functions, say so too: --set layers={layers}"
            )
