"""Names of the plain module: what wrappers put in front (DistributedDataParallel, torch.compile, ...) is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from math import prod
from typing import TYPE_CHECKING, Any

from ucp.contract.layouts import FlatBuffer, Span
from ucp.core.layout import Layout
from ucp.errors import LoadError, UnsupportedError, listed
from ucp.live.parts import FlatRange, LivePart

if TYPE_CHECKING:
    import torch
    from torch import nn

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""Class of a wrapper to the attribute that holds what it wraps."""

_SHARDING = {
    "DeepSpeedEngine": "pass the module inside of it (engine.module) and no optimizer, or use its own load_checkpoint",
    "PipelineModule": "its layers are cut over pipeline ranks",
}
"""Class of a module that cannot be loaded to the reason."""


def find_wrapper_paths(model: nn.Module) -> frozenset[str]:
    """Paths of modules whose last component is a wrapper's own. Raises UnsupportedError for modules that are cut."""
    found = set()
    refused = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name in {base.__name__ for base in type(module).__mro__}:
            if name in _SHARDING:
                refused.append(f"{path or 'the model'} is a {name}: {_SHARDING[name]}")
            if name in _WRAPPERS:
                found.add(f"{path}.{_WRAPPERS[name]}" if path else _WRAPPERS[name])
    if refused:
        raise UnsupportedError(f"expected a module that torch alone lays out; got\n{listed(refused)}")
    return frozenset(found)


def plain_name(name: str, hidden: frozenset[str]) -> str:
    """`name` without the components that are wrappers' own."""
    parts = name.split(".")
    return ".".join(part for at, part in enumerate(parts) if ".".join(parts[: at + 1]) not in hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatUnit:
    """A flat parameter, on this rank."""

    key: str
    """What it is called where it has to be told from others: no name of a model."""
    flat: torch.Tensor
    """The flat parameter, as an optimizer holds it without `use_orig_params`."""
    share: torch.Tensor
    """Memory of this rank's share."""
    names: tuple[tuple[str, ...], ...]
    """Names that each parameter in it goes by, its own first."""
    ranges: tuple[FlatRange, ...]
    """What the share has of each parameter."""
    originals: tuple[torch.Tensor, ...]
    """The same, as an optimizer holds them with `use_orig_params`; empty without."""
    members: frozenset[int]
    """`id` of all parameters of the module that lie in it, itself among them."""


def find_flat_units(model: nn.Module) -> list[FlatUnit]:
    """The flat parameters of all modules that FSDP1 wraps. Raises UnsupportedError where their order is not known."""
    hidden = find_wrapper_paths(model)
    paths: dict[int, list[str]] = {}
    wrapped = []
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(plain_name(path, hidden) if path else "")
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
            wrapped.append(module)
    handles = {id(handle): handle for module in wrapped if (handle := _field(module, "_handle")) is not None}
    return [_unit(handle, paths, number) for number, handle in enumerate(handles.values())]


def _field(of: object, name: str) -> Any:
    """What FSDP1 says of itself in attributes that are its own."""
    return getattr(of, name)


def _unit(handle: Any, paths: Mapping[int, Sequence[str]], number: int) -> FlatUnit:
    flat = handle.flat_param
    _check(flat)
    if handle.uses_sharded_strategy and hasattr(flat, "_full_param_padded") and not handle.needs_unshard():
        # free what is gathered of all shares: the next forward pass would use it as it is
        handle.reshard(free_unsharded_flat_param=True)
        handle.post_reshard()
    share = getattr(flat, "_local_shard", flat.data)
    if share.is_meta:
        raise LoadError("expected flat parameters of FSDP1 that have memory; got some on the meta device")
    rank, ranks = (handle.rank, handle.world_size) if handle.uses_sharded_strategy else (0, 1)
    kept = [not is_padding for is_padding in _field(flat, "_is_padding_mask")]
    starts = compress(accumulate(_field(flat, "_numels_with_padding"), initial=0), kept)
    shapes = [tuple(shape) for shape in _field(flat, "_shapes")]
    buffer = FlatBuffer.pack(
        {str(at): prod(shape) for at, shape in enumerate(shapes)},
        ranks=ranks,
        share=share.numel(),
        starts=[*starts],
        axis="dp_shard",
        known_from="flat parameters of FSDP1",
    )
    axes, of_rank = buffer.axes(), buffer.spans(rank)
    spans = [of_rank.get(str(at), Span(0, 0)) for at in range(len(shapes))]
    layouts = [Layout(flat=(axes[str(at)],) if str(at) in axes else ()) for at in range(len(shapes))]
    parts = (
        LivePart(local_shape=shape, layout=layout, coords={"dp_shard": rank}, global_shape=shape)
        for shape, layout in zip(shapes, layouts, strict=True)
    )
    originals = tuple(_field(flat, "_params") or ())
    return FlatUnit(
        key=f"flat parameter {number}",
        flat=flat,
        share=share,
        names=tuple(_names(flat, paths)),
        ranges=tuple(
            FlatRange(start=span.start, numel=span.numel, part=part) for span, part in zip(spans, parts, strict=True)
        ),
        originals=originals,
        members=frozenset(map(id, (flat, *originals, *(_field(flat, "_shared_params") or ())))),
    )


def _check(flat: Any) -> None:
    infos = [info.param_name for info in _field(flat, "_param_infos")]
    rows = list(zip(infos, _field(flat, "_contiguities"), _field(flat, "_param_extensions"), strict=True))
    lines = [f"{name}: flattened in the order of its memory" for name, is_straight, _ in rows if not is_straight]
    lines += [f"{name}: cut by tensor parallelism before" for name, _, extension in rows if extension is not None]
    if lines:
        raise UnsupportedError(
            f"expected parameters that FSDP1 flattens whole, in row-major order; got\n{listed(lines)}\n"
            "Make them contiguous before they are wrapped, or use FSDP2 (fully_shard)"
        )


def _names(flat: Any, paths: Mapping[int, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Names of every parameter in a flat one: by all paths of its module, then by those of what is tied to it."""
    tied: dict[tuple[int, str], list[str]] = {}
    for info in _field(flat, "_shared_param_infos"):
        own = tied.setdefault((id(info.prim_module), info.prim_param_name), [])
        own += _joined(paths[id(info.module)], info.param_name)
    for info in _field(flat, "_param_infos"):
        key = id(info.module), info.param_name
        yield tuple(dict.fromkeys([*_joined(paths[key[0]], key[1]), *tied.get(key, ())]))


def _joined(paths: Sequence[str], name: str) -> list[str]:
    return [f"{path}.{name}" if path else name for path in paths]
