"""Placements in the files of serving engines and DeepSpeed, written and read.

| form | file |
|---|---|
| `sglang` | JSON {physical_to_logical_map: [layers][slots]}, of all layers, for --init-expert-location |
| `vllm` | JSON [layers with experts][slots] (vLLM#49572) |
| `eplb` | JSONL: a record eplb_initial_mapping (vLLM#41141, version 1) |
| `trtllm` | YAML {num_slots, initial_global_assignments: {layer: [slots]}, layer_updates_per_iter} |
| `ascend` | JSON {moe_layer_count, layer_list: [{layer_id, device_count, device_list}]} (MindIE, vllm-ascend) |
| `deepspeed` | JSON {layer: expert_placement of ds_autoep_layers} (DeepSpeed#8544, version 1) |

None lists loads or nodes. Only `ascend` and `deepspeed` list GPUs, which may have different numbers of experts there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, to_builtins

from ucp.core.topology import ExpertsByRank
from ucp.errors import MalformedError, UsageError, format_count, format_list, nearest
from ucp.io.json_text import Natural, NotJson, decode, parsed, unique_names
from ucp.io.writing import replace_file
from ucp.placement.descriptor import ExpertPlacement, Version1
from ucp.placement.placement import EMPTY, Placement
from ucp.store.manifest import read_text

T = TypeVar("T")
Layers = dict[int, ExpertsByRank]
"""Number of a layer to the experts of each GPU; of all together if the form does not list GPUs."""


class _Device(Struct, frozen=True):
    device_id: Natural
    device_expert: tuple[Natural, ...]


class _AscendLayer(Struct, frozen=True):
    layer_id: Natural
    device_count: Natural
    device_list: tuple[_Device, ...]


class _Ascend(Struct, frozen=True):
    moe_layer_count: Natural
    layer_list: tuple[_AscendLayer, ...]


class _Sglang(Struct, frozen=True):
    physical_to_logical_map: tuple[tuple[Natural, ...], ...]


class _Eplb(Struct, frozen=True):
    record_type: str
    version: Version1
    num_redundant_experts: Natural
    num_slots: Natural
    initial_global_assignments: dict[int, tuple[Natural, ...]]


def write_placement(placement: Placement, path: Path, form: str) -> None:
    """Write a placement to the file `path`, replacing it. Raises UsageError for an unknown form, OSError."""
    replace_file(path, _find_form(form).to_text(placement).encode())


def read_placement(
    path: Path, form: str | None = None, *, nodes: int, gpus: int = 1, moe_layers: Collection[int] | None = None
) -> Placement:
    """The placement in the file `path` on `nodes` nodes with `gpus` GPUs each.

    `form`: of the file, by default the one that it has. `moe_layers`: numbers of the layers with experts, for forms
    that do not tell: `sglang` and `vllm`. Raises MissingFileError, MalformedError, UsageError.
    """
    text = read_text(str(path))
    try:
        chosen = _find_form(form) if form else _guess_form(text)
        layers = chosen.from_text(text)
        if moe_layers is not None:
            layers = chosen.number(layers, sorted(moe_layers))
    except NotJson as error:
        what = f"a placement of the form {form}" if form else f"a placement, of a form of {', '.join(FORMS)},"
        raise MalformedError(f"expected {what} in {path}; {error}") from error
    count = nodes * gpus
    for layer, ranks in layers.items():
        slots = () if chosen.lists_gpus else ranks[0]
        if (chosen.lists_gpus and len(ranks) != count) or (not chosen.lists_gpus and (not slots or len(slots) % count)):
            listed = format_count(len(ranks), "GPU") if chosen.lists_gpus else format_count(len(slots), "slot")
            raise UsageError(
                f"expected a placement on {format_count(nodes, 'node')}, each with {format_count(gpus, 'GPU')}; layer "
                f"{layer} in {path} has {listed}"
            )
        if slots:
            width = len(slots) // count
            layers[layer] = tuple(slots[start : start + width] for start in range(0, len(slots), width))
    return Placement.of_ranks(layers, nodes=nodes, gpus=gpus)


def to_expert_placement(placement: Placement, layer: int) -> ExpertPlacement:
    """What DeepSpeed records of a layer: its GPUs are the expert-parallel ranks. Raises UsageError."""
    record = ExpertPlacement.of(placement.experts_by_gpu(layer), num_experts=placement.num_experts(layer))
    if record.problem:
        raise UsageError(
            f"expected every expert once at most on each GPU, as DeepSpeed holds them; of layer {layer}, "
            f"{record.problem}. Use fewer slots, or more GPUs"
        )
    return record


def _dump(document: object) -> str:
    return json.dumps(document) + "\n"


def _slots(placement: Placement) -> dict[int, tuple[int, ...]]:
    """Number of a layer to the expert in each slot. Raises UsageError for slots without an expert."""
    empty = [str(layer) for layer, slots in placement.layers.items() if EMPTY in slots]
    if empty:
        raise UsageError(
            "expected an expert in every slot, because only the forms ascend and deepspeed list the experts of each "
            f"GPU; got empty slots in layer {', '.join(empty)}"
        )
    return dict(placement.layers)


def _to_sglang(placement: Placement) -> str:
    slots = _slots(placement)
    dense = [slot % (max(map(max, slots.values())) + 1) for slot in range(placement.cluster.num_slots)]
    return _dump({"physical_to_logical_map": [list(slots.get(n, dense)) for n in range(max(slots) + 1)]})


def _from_sglang(text: bytes) -> Layers:
    return _one_run(dict(enumerate(_decode(text, _Sglang).physical_to_logical_map)))


def _drop_dense(rows: Layers, moe_layers: Sequence[int]) -> Layers:
    """Without the rows of layers that have no experts."""
    return {layer: slots for layer, slots in rows.items() if layer in moe_layers}


def _to_vllm(placement: Placement) -> str:
    return _dump([list(slots) for slots in _slots(placement).values()])


def _from_vllm(text: bytes) -> Layers:
    return _one_run(dict(enumerate(_decode(text, tuple[tuple[Natural, ...], ...]))))


def _number_in_turn(rows: Layers, moe_layers: Sequence[int]) -> Layers:
    """By the numbers of the layers with experts, if there is a row for each."""
    return dict(zip(moe_layers, rows.values(), strict=True)) if len(rows) == len(moe_layers) else rows


def _to_eplb(placement: Placement) -> str:
    experts = max(placement.num_experts(layer) for layer in placement.layers)
    slots = placement.cluster.num_slots
    record = _Eplb(
        record_type="eplb_initial_mapping",
        version=1,
        num_redundant_experts=slots - experts,
        num_slots=slots,
        initial_global_assignments=_slots(placement),
    )
    return _dump(to_builtins(record, str_keys=True))


def _from_eplb(text: bytes) -> Layers:
    for line in text.splitlines():
        if b'"eplb_initial_mapping"' in line:
            record = _decode(line, _Eplb)
            return _one_run(_check_widths(record.initial_global_assignments, record.num_slots))
    raise NotJson("it has no record eplb_initial_mapping")


def _to_trtllm(placement: Placement) -> str:
    rows = "".join(f"  {layer}: {list(slots)}\n" for layer, slots in _slots(placement).items())
    head = f"num_slots: {placement.cluster.num_slots}\ninitial_global_assignments:\n"
    return f"{head}{rows}layer_updates_per_iter: 0\n"


_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*", re.MULTILINE)
_NUM_SLOTS = re.compile(r"^num_slots:\s*(\d{1,9})\s*$", re.MULTILINE)
_ROW = re.compile(r"(?P<layer>\d{1,9}):\s*(?:(?P<flow>\[[\d,\s]*\])|(?P<block>(?:\n\s*-\s*\d+)+))")
"""A layer of TensorRT-LLM's assignments. Examples: `3: [0, 1, 1, 2]`; the same with `- 0` and so on, each in a line."""


def _from_trtllm(text: bytes) -> Layers:
    plain = _COMMENT.sub("", text.decode("utf-8", "replace"))
    _, key, rows = plain.partition("initial_global_assignments:")
    lists: dict[int, str] = {}
    for m in _ROW.finditer(rows):
        if int(m["layer"]) in lists:
            raise NotJson(f"layer {m['layer']} comes twice")
        lists[int(m["layer"])] = m["flow"] or f"[{','.join(re.findall(r'[0-9]+', m['block']))}]"
    if not key or not lists:
        raise NotJson("it has no initial_global_assignments with a list of slots for each layer")
    decoded = {layer: decode(slots.encode(), tuple[Natural, ...]) for layer, slots in lists.items()}
    stated = _NUM_SLOTS.search(plain)
    return _one_run(_check_widths(decoded, int(stated[1])) if stated else decoded)


def _one_run(rows: Mapping[int, tuple[int, ...]]) -> Layers:
    """The slots of each layer, of all GPUs together."""
    return {layer: (slots,) for layer, slots in sorted(rows.items())}


def _check_widths(rows: Mapping[int, tuple[int, ...]], num_slots: int) -> Mapping[int, tuple[int, ...]]:
    """The rows, if each has `num_slots` slots. Raises NotJson."""
    for layer, slots in rows.items():
        if len(slots) != num_slots:
            raise NotJson(f"layer {layer} has {len(slots)} slots, not the {num_slots} of num_slots")
    return rows


def _decode(text: bytes, kind: type[T]) -> T:
    """A document in which no name comes twice: readers would differ in which one counts. Raises NotJson."""
    parsed(text, pairs=unique_names)
    return decode(text, kind)


def _to_ascend(placement: Placement) -> str:
    layers = []
    for layer, ranks in placement.experts_by_rank.items():
        devices = tuple(_Device(device_id=rank, device_expert=experts) for rank, experts in enumerate(ranks))
        layers.append(_AscendLayer(layer_id=layer, device_count=len(devices), device_list=devices))
    return _dump(to_builtins(_Ascend(moe_layer_count=len(layers), layer_list=tuple(layers))))


def _from_ascend(text: bytes) -> Layers:
    layers = {}
    for layer in sorted(_decode(text, _Ascend).layer_list, key=lambda layer: layer.layer_id):
        devices = sorted(layer.device_list, key=lambda device: device.device_id)
        if len(devices) != layer.device_count or any(n != entry.device_id for n, entry in enumerate(devices)):
            raise NotJson(f"layer {layer.layer_id} does not list each of {layer.device_count} devices once")
        if layer.layer_id in layers:
            raise NotJson(f"layer {layer.layer_id} comes twice")
        layers[layer.layer_id] = tuple(device.device_expert for device in devices)
    return layers


def _to_deepspeed(placement: Placement) -> str:
    return _dump({str(layer): to_expert_placement(placement, layer).to_document() for layer in placement.layers})


def _from_deepspeed(text: bytes) -> Layers:
    records = dict(sorted(_decode(text, dict[int, ExpertPlacement]).items()))
    problems = [f"layer {layer}: {record.problem}" for layer, record in records.items() if record.problem]
    if problems:
        raise NotJson("; ".join(problems))
    return {layer: record.experts_by_rank for layer, record in records.items()}


class _Form(Struct, frozen=True):
    to_text: Callable[[Placement], str]
    from_text: Callable[[bytes], Layers]
    number: Callable[[Layers, Sequence[int]], Layers] = lambda rows, _: rows
    """The rows by layer, given the numbers of the layers with experts."""
    lists_gpus: bool = False
    """Whether it lists the experts of each GPU."""


FORMS = {
    "sglang": _Form(_to_sglang, _from_sglang, _drop_dense),
    "vllm": _Form(_to_vllm, _from_vllm, _number_in_turn),
    "eplb": _Form(_to_eplb, _from_eplb),
    "trtllm": _Form(_to_trtllm, _from_trtllm),
    "ascend": _Form(_to_ascend, _from_ascend, lists_gpus=True),
    "deepspeed": _Form(_to_deepspeed, _from_deepspeed, lists_gpus=True),
}
"""Forms by name."""


def _find_form(name: str) -> _Form:
    if name not in FORMS:
        near = nearest(name, FORMS)
        raise UsageError(f"expected a form of {', '.join(FORMS)}; got {name!r}" + (f": {near}?" if near else ""))
    return FORMS[name]


def _guess_form(text: bytes) -> _Form:
    """The form that a file has: no file has two. Raises NotJson."""
    reasons = []
    for name, form in FORMS.items():
        try:
            form.from_text(text)
        except NotJson as error:
            reasons.append(f"{name}: {error}")
        else:
            return form
    raise NotJson(f"it has none of them, or is damaged:\n{format_list(reasons)}")
