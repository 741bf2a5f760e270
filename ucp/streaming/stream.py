"""Run a model that is larger than memory, straight from a checkpoint of any format.

import ucp

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
ucp.stream(model, "ckpt", slots=2, cache_nbytes=4 << 30)
model.generate(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, Unpack
from weakref import WeakSet

from ucp.conversion.arguments import LoadArguments, takes_options
from ucp.conversion.option import DtypeLike, MemoryLike, TopologyLike, parse_memory, type_path
from ucp.conversion.prepare import count_cores
from ucp.core.slices import Locator
from ucp.core.text.page import Page, Report, facts
from ucp.core.text.units import nbytes_text
from ucp.errors import UnsupportedError, UsageError, format_count
from ucp.live.adapters import LiveRequest
from ucp.live.exchange.carry import carry
from ucp.live.exchange.stages import Exchange
from ucp.live.load import decide_load, find_model_device
from ucp.live.match.decide import Decision
from ucp.live.parts import LoadItem
from ucp.live.report import Clock
from ucp.live.resume.beside import ResumeOptions
from ucp.live.run.ranks import ProcessGroupRanks, Ranks, SingleRank, find_ranks, run_together
from ucp.live.run.request import LoadRequest
from ucp.moe.layers import find_layers
from ucp.streaming.experts import ExpertKey, ExpertStore, stream_module, stream_stacked
from ucp.streaming.reader import Reader, StreamedParam
from ucp.streaming.ring import Ring, clear_parameter, set_parameter

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


_STREAMED: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, slots=True)
class Stream(Report):
    """A streamed model."""

    layers: int
    """Layers that take turns."""
    nbytes: int
    """Bytes of all their parameters."""
    resident_nbytes: int
    """Bytes of what stays in memory: other parameters, slots and cache at most."""
    _reader: Reader
    _ring: Ring
    _experts: ExpertStore | None
    _group: ProcessGroup | None
    """Made for this stream alone."""

    @property
    def nbytes_read(self) -> int:
        """Bytes that were read since the beginning."""
        return self._reader.nbytes_read

    @property
    def cache_hits(self) -> int:
        """Experts that were in the cache when they were needed."""
        return 0 if self._experts is None else self._experts.cache.hits

    @property
    def cache_misses(self) -> int:
        """Experts that had to be read."""
        return 0 if self._experts is None else self._experts.cache.misses

    def close(self) -> None:
        """Stop reading. The model cannot compute any more."""
        self._ring.close()
        self._reader.close()
        _destroy_group(self._group)

    def page(self) -> Page:
        """What is streamed, and what was read."""
        yield facts(
            [
                ("streamed", f"{format_count(self.layers, 'layer')}, {nbytes_text(self.nbytes)}"),
                ("in memory", f"{nbytes_text(self.resident_nbytes)} at most"),
                ("read", nbytes_text(self.nbytes_read)),
                ("experts", f"{self.cache_hits:,} from the cache, {self.cache_misses:,} read" if self._experts else ""),
            ]
        )


@takes_options(LoadArguments)
def stream(
    model: nn.Module,
    topology: TopologyLike | DeviceMesh | type_path | None = None,
    checkpoint: type_path | None = None,
    *,
    slots: int = 2,
    cache_nbytes: MemoryLike = 1 << 30,
    layers: str | None = None,
    threads: int | None = None,
    dtype: DtypeLike | None = None,
    rename: Callable[[str], str] | type_path | None = None,
    process_group: ProcessGroup | Ranks | None = None,
    exchange: Literal["auto", "always", "never"] = "auto",
    **options: Unpack[LoadArguments],
) -> Stream:
    """Make `model` read its layers from a checkpoint while it computes; only some of them are in memory.

    For inference with models that are larger than memory. What is not in the layers (embeddings, the head) is loaded.
    With torch.distributed initialised every rank of `process_group` must call this; each reads its own parts.

    Parameters
    ----------
    model
        Module, best on the meta device: its layers are never allocated as a whole. It stays streamed.
    topology, checkpoint, dtype, rename, process_group
        As for `load_into`.
    slots
        Layers in memory, two or more: one computes while the next are read. Experts do not count.
    cache_nbytes
        Memory for experts, of two at least: those that are used most stay. Bytes, or text such as "4GiB".
    layers
        Path of the list of layers, e.g. "model.layers"; by default the ModuleList with the most parameters.
    exchange
        "always": ranks that hold the same elements of a layer each read a part of them, and gather the others over a
        gloo group. They must run the same layers in the same order, equally often, and `process_group`, if it is given,
        must have no other use. Otherwise ranks read their layers for themselves. Experts are read directly.
    threads
        Threads that read; by default as many as cores, four at most.
    OPTIONS

    Raises
    ------
    LoadError, SourceError, CoverError
        As `load_into`. An error of a later read is raised by the layer that needs it.
    UsageError
        There is no list of layers, or fewer than two slots; or the model is streamed already.

    Ring and cache are those of MoESys. The parameters of the model do not require gradients any more; if inputs do,
    the weights of all layers stay in memory until the backward pass.
    """
    import torch

    if not hasattr(model, "named_modules"):
        raise UsageError(f"expected a torch module; got a {type(model).__name__}")
    modules = _find_layers(model, layers)
    if model in _STREAMED:
        raise UsageError("expected a model that is not streamed yet; this one is: build it again")
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 2:
        raise UsageError(f"expected slots of 2 or more, as one layer computes while another is read; got {slots!r}")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise UsageError(f"expected threads of 1 or more; got {threads!r}")
    cache = parse_memory(cache_nbytes)
    ranks = find_ranks(process_group, find_model_device(model))
    request = run_together(
        ranks,
        lambda: LoadRequest.parse(
            topology,
            checkpoint,
            rank=ranks.rank,
            ranks=ranks.count,
            dtype=dtype,
            rename=rename,
            exchange=exchange,
            **options,
        ),
    )
    has_peers = request.carry.exchange is Exchange.ALWAYS
    makes_group = has_peers and process_group is None and ranks.count > 1
    if has_peers and not makes_group and ranks.device.type != "cpu":
        raise UnsupportedError("expected process_group with backend gloo for exchange='always'; or leave it out")
    live = LiveRequest(model=model, optimizer=False, mesh=request.mesh, ranks=ranks, dtype=request.dtype)
    decision, _ = decide_load(live, request, ResumeOptions(policy=request.rank_extras), {}, Clock(), saved=None)
    device = decision.run.model.device or find_model_device(model)
    by_layer, resident = _divide(model, modules, decision)
    _STREAMED.add(model)
    model.requires_grad_(requires_grad=False)  # or a graph of all layers would keep their weights
    for param in chain.from_iterable(by_layer):
        set_parameter(param, torch.empty(0))  # on the meta device, it would be loaded, too
    decision = _load_resident(decision, resident, request, ranks)
    for param in chain.from_iterable(by_layer):
        clear_parameter(param)
    reader = Reader(decision.index.files, threads or min(count_cores(), 4))
    dense, stacked, single = _find_experts(model, by_layer)
    experts = None
    if stacked or single:
        store = {
            key: [(param, row) for param in params]
            for path, (params, count) in stacked.items()
            for row in range(count)
            for key in [(path, row)]
        } | {key: [(param, None) for param in params] for key, params in single.items()}
        experts = ExpertStore(store, reader, nbytes=cache, device=device)
        for path, (params, _) in stacked.items():
            stream_stacked(path, params[0].module, params, experts)
        for key, params in single.items():
            stream_module(key, model.get_submodule(f"{key[0]}.{key[1]}"), params, experts)
        if callable(choose := getattr(model, "set_experts_implementation", None)):
            choose("eager")
    group = _make_group() if makes_group else None  # last, as it stays if anything fails
    try:
        peers = ProcessGroupRanks(group, torch.device("cpu")) if group else ranks if has_peers else SingleRank()
        ring = Ring(dense, reader, peers, slots=slots, device=device)
    except BaseException:
        _destroy_group(group)
        raise
    for number, layer in enumerate(modules.values()):
        layer.register_forward_pre_hook(lambda *_, number=number: ring.enter(number))
        layer.register_forward_hook(lambda *_, number=number: ring.leave(number), always_call=True)
    kept = sum((item.slice.stop - item.slice.start) * item.slice.dtype.itemsize for item in resident)
    return Stream(
        len(modules),
        sum(param.nbytes for params in by_layer for param in params),
        kept + ring.nbytes + (0 if experts is None else experts.nbytes),
        reader,
        ring,
        experts,
        group,
    )


def _make_group() -> ProcessGroup:
    """A group of all ranks for exchanges in the background, which the model does not use. Collective."""
    from torch import distributed

    group: ProcessGroup = distributed.new_group(backend="gloo")
    return group


def _destroy_group(group: ProcessGroup | None) -> None:
    from torch import distributed

    if group is not None:
        with suppress(ValueError):  # it was destroyed before, as all groups at the end of a program
            distributed.destroy_process_group(group)


def _find_layers(model: nn.Module, path: str | None) -> dict[str, nn.Module]:
    """Path of each layer to its module. Raises UsageError."""
    from torch import nn

    lists = {
        name: (sum(param.numel() for param in module.parameters()), module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    }
    if path is None:
        path = max(lists, key=lambda name: lists[name][0], default=None)
    if path is None or path not in lists:
        known = ", ".join(lists) or "none"
        raise UsageError(f"expected the path of a list of layers (nn.ModuleList) in the model; got {path!r} of {known}")
    return {f"{path}.{number}": module for number, module in enumerate(lists[path][1].children())}


def _divide(
    model: nn.Module, layers: Mapping[str, nn.Module], decision: Decision
) -> tuple[list[list[StreamedParam]], list[LoadItem]]:
    """The parameters of each layer, and what is loaded once: all else, buffers, and what several layers share."""
    numbers = {path: number for number, path in enumerate(layers)}
    prefix = next(iter(layers)).rpartition(".")[0]
    names = {tensor.name: tensor.names for tensor in decision.run.model.tensors}
    by_layer: list[list[StreamedParam]] = [[] for _ in layers]
    resident = []
    for item in decision.items:
        rest = item.name.removeprefix(f"{prefix}.")
        number = numbers.get(f"{prefix}.{rest.partition('.')[0]}")
        path, _, name = item.name.rpartition(".")
        module = model.get_submodule(path)
        param = module._parameters.get(name)  # noqa: SLF001  # parameters only, not buffers
        if number is None or param is None or len(names[item.name]) > 1 or item.slice.stop == item.slice.start:
            resident.append(item)
            continue
        by_layer[number].append(StreamedParam(module=module, name=name, item=item, locator=Locator(item.source)))
    if not all(by_layer):
        raise UsageError(f"expected layers with parameters of their own in {prefix}; some have none, or share them all")
    return by_layer, resident


def _load_resident(decision: Decision, resident: Sequence[LoadItem], request: LoadRequest, ranks: Ranks) -> Decision:
    """Load what stays in memory."""
    names = {item.name for item in resident} | decision.run.model.derived
    handles = {name: handle for name, handle in decision.run.model.handles.items() if name in names}
    model = replace(decision.run.model, handles=handles)
    model = run_together(ranks, lambda: decision.run.prepare(model, names))
    memories = [model.handles[item.name] for item in resident]
    carry(tuple(resident), memories, ranks, replace(request.carry, records=decision.index.records))
    return replace(decision, run=replace(decision.run, model=model))


def _find_experts(
    model: nn.Module, by_layer: Iterable[Sequence[StreamedParam]]
) -> tuple[
    list[list[StreamedParam]],
    dict[str, tuple[list[StreamedParam], int]],
    dict[ExpertKey, list[StreamedParam]],
]:
    """Parameters of each layer without experts; stacked experts by the path of their module; single experts."""
    dense: list[list[StreamedParam]] = []
    stacked: dict[str, tuple[list[StreamedParam], int]] = {}
    single: dict[ExpertKey, list[StreamedParam]] = {}
    for params in by_layer:
        by_name = {param.item.name: param for param in params}
        taken: set[str] = set()
        for layer in find_layers({name: param.shape for name, param in by_name.items()}):
            for number, tensors in layer.experts.items():
                for name, tensor in tensors.items():
                    param = by_name[tensor.param]
                    if tensor.row is None:
                        path = tensor.param.removesuffix(f".{name}")
                        if path == tensor.param:  # linear_fc1.weight7: a module that computes with all experts at once
                            continue
                        single.setdefault((path.rpartition(".")[0], number), []).append(param)
                    taken.add(tensor.param)
                    if tensor.row == 0:
                        path = tensor.param.rpartition(".")[0]
                        stacked.setdefault(path, ([], param.shape[0]))[0].append(param)
        dense.append([param for param in params if param.item.name not in taken])
    return dense, stacked, single
