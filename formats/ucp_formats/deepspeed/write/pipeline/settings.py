"""What `--set` says of the stages of a pipeline, as files record neither how layers are partitioned nor all of them.

stages=0,3,5,9       the layer that each stage starts with, then the number of layers
partition=uniform    `partition_method` of the run: uniform, parameters, or type: with the numbers of the layers
                     that its expression matches (class names are in no file), like type:2-25,27
layers=9             for partition: the number of layers, where functions follow the last that has a file
tied=embed:8         a layer without a file (`forward_fn`) that uses a tied layer again
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ucp.errors import UsageError, listed

__all__ = ["SETTINGS", "StageSettings", "stage_settings"]

_RANGES = r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*"
_FORMS = {
    "stages": (r"0(,\d{1,5})+", "the first layer of each stage, then the number of layers, increasing, like 0,3,5,9"),
    "partition": (
        rf"uniform|parameters|type:{_RANGES}",
        "uniform, parameters, or type: with the numbers of the layers that the expression matches, like type:2-25,27",
    ),
    "layers": (r"[1-9]\d{0,4}", "the number of layers"),
    "tied": (r"[^:,]+:\d{1,5}(,[^:,]+:\d{1,5})*", "key and number of the layer that uses it again, like embed:8"),
}
"""Setting to its form, and to that in words."""
SETTINGS = {name: words for name, (_, words) in _FORMS.items()}
"""Setting to its form in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """The settings; each empty where the user says nothing."""

    bounds: tuple[int, ...] = ()
    """First layer of each stage, then the number of layers."""
    partition: str = ""
    """`partition_method`, as said."""
    matched: frozenset[int] = frozenset()
    """Layers that the expression of `type:` matches."""
    layers: int = 0
    """Number of layers."""
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Key of a tied layer to layers that use it again."""

    @property
    def partitions(self) -> bool:
        """Whether the user says what layers each stage has."""
        return bool(self.bounds or self.partition)


def stage_settings(texts: Mapping[str, str]) -> StageSettings:
    """What the settings say. Raises UsageError with all that are malformed.

    >>> stage_settings({"partition": "uniform", "tied": "embed:8"}).tied
    {'embed': (8,)}
    """
    wrong = []
    for name, text in texts.items():
        form, words = _FORMS[name]
        spans = pairwise(re.findall(r"\d+", text) if name in ("stages", "partition") else ())
        if not (re.fullmatch(form, text) and all(int(one) < int(other) for one, other in spans)):
            wrong.append(f"{name}={text}: expected {words}")
    if texts and ("stages" in texts) == ("partition" in texts):
        wrong.append("say either stages or partition")
    if wrong:
        raise UsageError(
            f"the target deepspeed takes --set {', '.join(_FORMS)}, for the stages of a pipeline; got\n{listed(wrong)}"
        )
    tied: dict[str, tuple[int, ...]] = {}
    for part in filter(None, texts.get("tied", "").split(",")):
        key, _, layer = part.partition(":")
        tied[key] = (*tied.get(key, ()), int(layer))
    partition = texts.get("partition", "")
    return StageSettings(
        bounds=tuple(map(int, filter(None, texts.get("stages", "").split(",")))),
        partition=partition,
        matched=frozenset(_numbers(partition.partition(":")[2])),
        layers=int(texts.get("layers", 0)),
        tied=tied,
    )


def _numbers(text: str) -> list[int]:
    """Numbers and ranges.

    >>> _numbers("2-4,7")
    [2, 3, 4, 7]
    """
    spans = [part.partition("-") for part in text.split(",") if part]
    return [number for first, _, last in spans for number in range(int(first), int(last or first) + 1)]
