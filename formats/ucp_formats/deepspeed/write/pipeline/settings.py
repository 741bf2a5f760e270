"""What the user says of the stages of a pipeline with `--set`, as files do not record how a run deals its layers out.

=================== ==================================================================================================
stages=0,3,5,9      layer that each stage starts with, and the number of layers
partition=uniform   `partition_method` of the run's PipelineModule: parameters, uniform or type
partition=type:2-25 layers whose class the expression of `type:...` fits; without numbers, those that are alike
layers=9            entries in the list of layers, where there are functions after the last layer with a file
tied=embed:8        a layer without a file (`forward_fn`) that uses a tied layer again
norm=unchecked      write stages over which the run, as far as the source tells, cannot take the norm of its gradients
=================== ==================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from itertools import pairwise

from ucp.errors import UsageError, listed

__all__ = ["Method", "StageSettings", "stage_settings"]

_MOST_LAYERS = 100_000
"""More than any pipeline has: a slip of the finger is not to fill the memory."""
_NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_BOUNDS = re.compile(r"\d+(,\d+)+")
_TIED = re.compile(r"[^:,]+:\d+(,[^:,]+:\d+)*")


class Method(StrEnum):
    """`partition_method` of a PipelineModule."""

    PARAMETERS = "parameters"
    UNIFORM = "uniform"
    TYPE = "type"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """The settings; each None or empty where the user says nothing."""

    bounds: tuple[int, ...] | None = None
    """First layer of each stage, and the number of layers."""
    method: Method | None = None
    """How layers are dealt out."""
    matched: frozenset[int] = frozenset()
    """Layers that the expression of `Method.TYPE` fits."""
    layers: int | None = None
    """Number of layers."""
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Key of a tied layer to layers without a file that use it."""
    any_norm: bool = False
    """Whether stages need not be such that DeepSpeed can take the norm of the gradients over them."""

    @property
    def is_empty(self) -> bool:
        """Whether the user says nothing."""
        return self == StageSettings()

    @property
    def deals(self) -> bool:
        """Whether the user says how layers are dealt out."""
        return not replace(self, any_norm=False).is_empty


def stage_settings(texts: Mapping[str, str]) -> StageSettings:
    """What the settings say. Raises UsageError with all that are not known or not understood.

    >>> stage_settings({"partition": "uniform", "tied": "embed:8"}).tied
    {'embed': (8,)}
    """
    wrong: list[str] = []
    found = StageSettings()
    for name, text in texts.items():
        if name not in _READERS:
            near = get_close_matches(name, _READERS, 1)
            wrong.append(f"{name}={text}: " + (f"did you mean {near[0]}?" if near else "no such setting"))
            continue
        expected, read = _READERS[name]
        try:
            found = read(found, text)
        except ValueError:
            wrong.append(f"{name}={text}: expected {expected}")
    if found.bounds is not None and found.method:
        wrong.append("partition: stages says it; drop one of them")
    if found.bounds is not None and found.layers not in (None, found.bounds[-1]):
        wrong.append(f"layers={found.layers}: stages ends with {found.bounds[-1]}, the number of layers")
    if wrong:
        raise UsageError(
            f"the target deepspeed takes --set {', '.join(_READERS)}, for the stages of a pipeline; got\n"
            f"{listed(wrong)}"
        )
    return found


def _with_bounds(own: StageSettings, text: str) -> StageSettings:
    bounds = tuple(map(int, text.split(","))) if _BOUNDS.fullmatch(text) else ()
    ordered = all(start < stop for start, stop in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] or not ordered or bounds[-1] > _MOST_LAYERS:
        raise ValueError(text)
    return replace(own, bounds=bounds)


def _with_method(own: StageSettings, text: str) -> StageSettings:
    name, _, numbers = text.lower().partition(":")
    if not numbers:
        return replace(own, method=Method(text.lower()))
    if name != Method.TYPE or not _NUMBERS.fullmatch(numbers):
        raise ValueError(text)
    matched: set[int] = set()
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        stop = int(last or first) + 1
        if not int(first) < stop <= _MOST_LAYERS:
            raise ValueError(text)
        matched.update(range(int(first), stop))
    return replace(own, method=Method.TYPE, matched=frozenset(matched))


def _with_layers(own: StageSettings, text: str) -> StageSettings:
    if not text.isdecimal() or not 0 < int(text) <= _MOST_LAYERS:
        raise ValueError(text)
    return replace(own, layers=int(text))


def _with_tied(own: StageSettings, text: str) -> StageSettings:
    if not _TIED.fullmatch(text):
        raise ValueError(text)
    tied: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        key, _, layer = part.rpartition(":")
        tied[key] = (*tied.get(key, ()), int(layer))
    return replace(own, tied=tied)


def _with_any_norm(own: StageSettings, text: str) -> StageSettings:
    if text != "unchecked":
        raise ValueError(text)
    return replace(own, any_norm=True)


_TYPES = (
    "parameters, uniform or type, as the run's partition_method; the classes that type:... speaks of are not in the "
    "files: write type for the layers that are alike, or their numbers, like type:2-25,27"
)
_STAGES = "the layer that each stage starts with and the number of layers, increasing from 0, like 0,3,5,9"
_READERS: Mapping[str, tuple[str, Callable[[StageSettings, str], StageSettings]]] = {
    "stages": (_STAGES, _with_bounds),
    "partition": (_TYPES, _with_method),
    "layers": ("the number of entries in the list of layers", _with_layers),
    "tied": ("key and number of the layer that uses it again, like embed:8", _with_tied),
    "norm": ("unchecked, to write stages whose norm of the gradients the run cannot take", _with_any_norm),
}
"""Setting to what it is, for messages, and what reads it."""
