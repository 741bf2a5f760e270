"""Reads how many tokens each expert gets, from the files of serving engines, or a checkpoint.

| file | content |
|---|---|
| `expert_distribution_recorder_*.pt` | SGLang: `logical_count` [steps, layers, experts], or a record for each pass |
| `*.jsonl` | vLLM's EPLB log: `eplb_load_meta`, then `eplb_load_stats` |
| `*.json` | [layers][experts], {layer: [experts]}, or `logical_count` |
| folder | a checkpoint: tokens per expert, or else squared gradients, which grow with the tokens |

Layers in which no expert got a token are left out: SGLang lists dense layers, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UsageError
from ucp.io.elements import viewed
from ucp.io.json_text import NotJson, parsed, unique_names
from ucp.io.torch_file.archive import read_archive
from ucp.moe.report import ExpertsReport
from ucp.store.manifest import read_text
from ucp.transfer.probe import Prober

Loads = dict[int, tuple[float, ...]]
"""Number of a layer to the tokens of each of its experts."""

_EXPECTED = (
    "expected the loads of experts: numbers by layer and expert, a file of SGLang's recorder (.pt), an EPLB log "
    "(.jsonl), or a checkpoint"
)

_MOST_DIGITS = 6
"""Of the number of a layer: forms that list all layers list those before it, too."""


def read_loads(path: Path) -> Loads:
    """The loads in a file. Raises MissingFileError, MalformedError, UsageError if they are of no known form."""
    if path.suffix in (".pt", ".pth"):
        array = _read_recorder(path)
    else:
        text = read_text(str(path))
        array = _read_log(text, path) if path.suffix == ".jsonl" else _parse(text, path)
    return parse_loads(array, str(path))


def parse_loads(value: object, label: str = "loads") -> Loads:
    """The loads in [layers][experts], {layer: [experts]} or [experts] of one layer. Raises UsageError."""
    if isinstance(value, Mapping) and "logical_count" in value:
        value = _sum_steps(value["logical_count"], label)
    if isinstance(value, Mapping):
        try:
            by_layer = {_parse_layer(layer): _to_array(row, label) for layer, row in value.items()}
        except (TypeError, ValueError) as error:
            raise UsageError(f"{_EXPECTED}; {label} has {error}") from error
        if len(by_layer) < len(value):
            raise UsageError(f"{_EXPECTED}; {label} has a layer twice, such as 1 and 01")
    else:
        array = _to_array(value, label)
        by_layer = dict(enumerate(array[None] if array.ndim < 2 else array))
    if any(row.ndim != 1 or not row.size for row in by_layer.values()):
        raise UsageError(f"{_EXPECTED}; the numbers of {label} have other dims")
    loads = {layer: tuple(map(float, row)) for layer, row in sorted(by_layer.items()) if row.any()}
    if not loads:
        raise UsageError(f"{_EXPECTED}; no expert of {label} got a token")
    return loads


def describe_loads(value: object) -> tuple[Loads, tuple[str, ...]]:
    """The loads in numbers, or in the report of a checkpoint, and notes on what they are. Raises UsageError."""
    if not isinstance(value, ExpertsReport):
        return parse_loads(value), ()
    loads, what = _loads_of_report(value)
    return loads, (f"the loads are {what} of {value.path}",)


def _loads_of_report(report: ExpertsReport) -> tuple[Loads, str]:
    """The loads of a checkpoint, and what they are: tokens that it counts, or squared gradients.

    Raises UsageError if it has neither for all experts.
    """
    for what, field in (("tokens per expert", "tokens"), ("squared gradients (exp_avg_sq)", "squared_gradient")):
        rows = {
            number if layer.number is None else layer.number: [getattr(expert, field) for expert in layer.experts]
            for number, layer in enumerate(report.layers)
        }
        if all(value is not None for row in rows.values() for value in row):
            return parse_loads(rows, report.path), what
    raise UsageError(f"{_EXPECTED}; {report.path} has neither tokens per expert nor squared gradients for all experts")


def _parse_layer(layer: object) -> int:
    """The number of a layer. Raises ValueError."""
    text = str(layer)
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise ValueError(f"{layer!r} instead of the number of a layer")
    return int(text)


def _to_array(value: object, label: str) -> NDArray[np.float64]:
    try:
        array = np.asarray(value, dtype=np.float64)  # what is no number raises
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{_EXPECTED}; {label} has {error}") from error
    if not float(array.max(initial=0)) * max(array.size, 1) < inf or not (array >= 0).all():
        raise UsageError(f"{_EXPECTED}; {label} has numbers below 0, or not finite")
    return array


def _sum_steps(counts: object, label: str) -> NDArray[np.float64]:
    """Sum of [..., layers, experts] over all but the last two dims."""
    array = _to_array(counts, label)
    if array.ndim < 2 or not array.size:
        raise UsageError(f"{_EXPECTED}; logical_count of {label} has shape {array.shape}, not [..., layers, experts]")
    total: NDArray[np.float64] = array.reshape(-1, *array.shape[-2:]).sum(axis=0)
    return total


def _parse(text: bytes, path: Path) -> object:
    try:
        return parsed(text, pairs=unique_names)
    except NotJson as error:
        raise MalformedError(f"{_EXPECTED}; {path} is not JSON: {error}") from error


def _read_recorder(path: Path) -> object:
    """Loads in a file of SGLang's expert distribution recorder (eplb/expert_distribution.py)."""
    root = read_archive(str(path)).root
    if not isinstance(root, dict):
        raise UsageError(f"{_EXPECTED}; {path} holds a {type(root).__name__}")
    with Prober() as prober:
        if "logical_count" in root:
            return {"logical_count": _read_tensor(root["logical_count"], prober, path)}
        records = root.get("records")
        if not isinstance(records, list) or not records:
            raise UsageError(f"{_EXPECTED}; {path} has neither logical_count nor records")
        mapping = _read_tensor(root.get("last_physical_to_logical_map"), prober, path)
        counts: NDArray[np.float64] = np.zeros(mapping.shape)
        for record in records:
            of_record = record.get("global_physical_count") if isinstance(record, dict) else record
            tokens = _read_tensor(of_record, prober, path)
            if tokens.shape != counts.shape:
                raise UsageError(f"{_EXPECTED}; {path} has counts {tokens.shape} for slots {counts.shape}")
            counts += tokens
    return _sum_slots(counts, mapping, path)


def _read_tensor(value: object, prober: Prober, path: Path) -> NDArray[np.float64]:
    if not isinstance(value, TensorRef):
        raise UsageError(f"{_EXPECTED}; {path} has a {type(value).__name__} where SGLang saves a tensor")
    data = prober.window(value, 0, value.numel)
    return np.array(viewed(memoryview(data), value.dtype), dtype=np.float64).reshape(value.shape)


def _sum_slots(counts: ArrayLike, mapping: ArrayLike, path: Path) -> NDArray[np.float64]:
    """[layers, experts]: tokens of the experts, from those of their slots. Both arguments: [layers, slots]."""
    slots, numbers = _to_array(counts, str(path)), _to_array(mapping, str(path))
    if (
        not slots.size
        or slots.shape != numbers.shape
        or slots.ndim != 2
        or (numbers >= slots.shape[1]).any()
        or (numbers % 1).any()
    ):
        raise UsageError(f"{_EXPECTED}; tokens of slots in {path}, {slots.shape}, do not fit the map {numbers.shape}")
    experts = numbers.astype(np.intp)
    loads = np.zeros((len(slots), int(experts.max()) + 1))
    for layer in range(len(slots)):
        np.add.at(loads[layer], experts[layer], slots[layer])
    return loads


def _read_log(text: bytes, path: Path) -> NDArray[np.float64]:
    """Loads in an EPLB log (vLLM#41141, version 1), summed over its steps."""
    total: NDArray[np.float64] | None = None
    for number, line in enumerate(filter(None, text.splitlines()), 1):
        try:
            record = parsed(line)
        except NotJson as error:
            raise MalformedError(f"{_EXPECTED}; line {number} of {path} is not JSON: {error}") from error
        if isinstance(record, dict) and record.get("record_type") == "eplb_load_stats":
            loads = _sum_slots(record.get("expert_load", []), record.get("p2l_map", []), path)
            if total is not None and total.shape != loads.shape:
                raise UsageError(f"{_EXPECTED}; line {number} of {path} has other layers or experts than those before")
            total = loads if total is None else total + loads
    if total is None:
        raise UsageError(f"{_EXPECTED}; {path} has no record eplb_load_stats")
    return total
