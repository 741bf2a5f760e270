"""Placements in the files of serving engines and DeepSpeed, written and read.

| form | file |
|---|---|
| `sglang` | JSON {physical_to_logical_map: [layers][slots]}, of all layers, for --init-expert-location |
| `vllm` | JSON [layers with experts][slots] (vLLM#49572) |
| `eplb` | JSONL: a record eplb_initial_mapping (vLLM#41141, version 1) |
| `trtllm` | YAML {num_slots, initial_global_assignments: {layer: [slots]}, layer_updates_per_iter} |
| `ascend` | JSON {moe_layer_count, layer_list: [{layer_id, device_count, device_list}]} (MindIE, vllm-ascend) |
| `deepspeed` | JSON {layer: expert_placement of ds_autoep_layers} (DeepSpeed#8544, version 1) |

None lists loads or nodes, and only `ascend` and `deepspeed` list GPUs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, to_builtins

from ucp.errors import MalformedError, UsageError, format_count, nearest
from ucp.io.json_text import Natural, NotJson, decode
from ucp.io.writing import replace_file
from ucp.placement.descriptor import ExpertPlacement, Version1
from ucp.placement.placement import Cluster, Placement
from ucp.store.manifest import read_text

Layers = dict[int, tuple[int, ...]]
"""Number of a layer to the expert in each slot."""


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
    path: Path, form: str, *, nodes: int, gpus: int = 1, moe_layers: Collection[int] | None = None
) -> Placement:
    """The placement in the file `path`, whose form is `form`, on `nodes` nodes with `gpus` GPUs each.

    `moe_layers`: numbers of the layers with experts, for forms that do not tell: `sglang` and `vllm`.

    Raises MissingFileError, MalformedError, UsageError.
    """
    text = read_text(str(path))
    try:
        layers, listed = _find_form(form).from_text(text)
        if moe_layers is not None:
            layers = _find_form(form).number(layers, sorted(moe_layers))
    except NotJson as error:
        raise MalformedError(f"expected a placement of the form {form} in {path}; {error}") from error
    slots = len(next(iter(layers.values()), ()))
    if listed not in (None, nodes * gpus) or not slots or slots % (nodes * gpus):
        listing = "" if listed is None else f" on {format_count(listed, 'GPU')}"
        raise UsageError(
            f"expected a placement on {format_count(nodes, 'node')}, each with {format_count(gpus, 'GPU')}; {path} has "
            f"{format_count(slots, 'slot')}{listing}"
        )
    return Placement(cluster=Cluster(nodes=nodes, gpus=gpus, slots=slots // (nodes * gpus)), layers=layers)


def to_expert_placement(placement: Placement, layer: int) -> ExpertPlacement:
    """What DeepSpeed records of a layer: its GPUs are the expert-parallel ranks."""
    return ExpertPlacement.of(placement.experts_by_gpu(layer), num_experts=placement.num_experts(layer))


def _dump(document: object) -> str:
    return json.dumps(document) + "\n"


def _to_sglang(placement: Placement) -> str:
    most = max(placement.layers)
    slots = placement.cluster.num_slots
    dense = [slot % (max(map(max, placement.layers.values())) + 1) for slot in range(slots)]
    return _dump({"physical_to_logical_map": [list(placement.layers.get(n, dense)) for n in range(most + 1)]})


def _from_sglang(text: bytes) -> tuple[Layers, int | None]:
    return dict(enumerate(decode(text, _Sglang).physical_to_logical_map)), None


def _drop_dense(rows: Layers, moe_layers: Sequence[int]) -> Layers:
    """Without the rows of layers that have no experts."""
    return {layer: slots for layer, slots in rows.items() if layer in moe_layers}


def _to_vllm(placement: Placement) -> str:
    return _dump([list(slots) for slots in placement.layers.values()])


def _from_vllm(text: bytes) -> tuple[Layers, int | None]:
    return dict(enumerate(decode(text, tuple[tuple[Natural, ...], ...]))), None


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
        initial_global_assignments=dict(placement.layers),
    )
    return _dump(to_builtins(record, str_keys=True))


def _from_eplb(text: bytes) -> tuple[Layers, int | None]:
    for line in text.splitlines():
        if b'"eplb_initial_mapping"' in line:
            return dict(sorted(decode(line, _Eplb).initial_global_assignments.items())), None
    raise NotJson("it has no record eplb_initial_mapping")


def _to_trtllm(placement: Placement) -> str:
    rows = "".join(f"  {layer}: {list(slots)}\n" for layer, slots in placement.layers.items())
    head = f"num_slots: {placement.cluster.num_slots}\ninitial_global_assignments:\n"
    return f"{head}{rows}layer_updates_per_iter: 0\n"


_ROW = re.compile(r"\s+(?P<layer>\d{1,9}):\s*(?P<slots>\[[\d,\s]*\])")
"""A layer of TensorRT-LLM's assignments, with its list in one line. Example: `  3: [0, 1, 1, 2]`."""


def _from_trtllm(text: bytes) -> tuple[Layers, int | None]:
    _, found, rows = text.decode("utf-8", "replace").partition("initial_global_assignments:")
    matches = list(filter(None, map(_ROW.match, rows.splitlines())))
    layers = {int(m["layer"]): decode(m["slots"].encode(), tuple[Natural, ...]) for m in matches}
    if not found or not layers:
        raise NotJson("it has no initial_global_assignments with a list of slots in the line of each layer")
    return dict(sorted(layers.items())), None


def _to_ascend(placement: Placement) -> str:
    layers = []
    for layer in placement.layers:
        ranks = to_expert_placement(placement, layer).ranks
        devices = tuple(_Device(device_id=rank.rank, device_expert=rank.experts) for rank in ranks)
        layers.append(_AscendLayer(layer_id=layer, device_count=len(devices), device_list=devices))
    return _dump(to_builtins(_Ascend(moe_layer_count=len(layers), layer_list=tuple(layers))))


def _from_ascend(text: bytes) -> tuple[Layers, int | None]:
    document = decode(text, _Ascend)
    ranks = {
        layer.layer_id: [(device.device_id, device.device_expert) for device in layer.device_list]
        for layer in document.layer_list
    }
    return _join_ranks(ranks)


def _to_deepspeed(placement: Placement) -> str:
    return _dump({str(layer): to_builtins(to_expert_placement(placement, layer)) for layer in placement.layers})


def _from_deepspeed(text: bytes) -> tuple[Layers, int | None]:
    document = decode(text, dict[int, ExpertPlacement])
    return _join_ranks({n: [(rank.rank, rank.experts) for rank in entry.ranks] for n, entry in document.items()})


def _join_ranks(ranks: Mapping[int, Sequence[tuple[int, tuple[int, ...]]]]) -> tuple[Layers, int]:
    """Slots of each layer, from the experts of its ranks, and the number of ranks. Raises NotJson."""
    counts = {len(entries) for entries in ranks.values()}
    for layer, entries in ranks.items():
        numbers, widths = sorted(rank for rank, _ in entries), {len(experts) for _, experts in entries}
        if numbers != list(range(len(entries))) or len(counts) > 1:
            raise NotJson(f"layer {layer} lists ranks {numbers}, not 0 to {max(counts, default=1) - 1}, each once")
        if len(widths) > 1:
            raise NotJson(f"layer {layer} has ranks with {sorted(widths)} experts; slots of all GPUs must be equal")
    layers = {n: tuple(e for _, experts in sorted(entries) for e in experts) for n, entries in sorted(ranks.items())}
    return layers, counts.pop() if counts else 1


class _Form(Struct, frozen=True):
    to_text: Callable[[Placement], str]
    from_text: Callable[[bytes], tuple[Layers, int | None]]
    number: Callable[[Layers, Sequence[int]], Layers] = lambda rows, _: rows
    """The rows by layer, given the numbers of the layers with experts."""


FORMS = {
    "sglang": _Form(_to_sglang, _from_sglang, _drop_dense),
    "vllm": _Form(_to_vllm, _from_vllm, _number_in_turn),
    "eplb": _Form(_to_eplb, _from_eplb),
    "trtllm": _Form(_to_trtllm, _from_trtllm),
    "ascend": _Form(_to_ascend, _from_ascend),
    "deepspeed": _Form(_to_deepspeed, _from_deepspeed),
}
"""Forms by name."""


def _find_form(name: str) -> _Form:
    if name not in FORMS:
        near = nearest(name, FORMS)
        raise UsageError(f"expected a form of {', '.join(FORMS)}; got {name!r}" + (f": {near}?" if near else ""))
    return FORMS[name]
