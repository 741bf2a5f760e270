"""Names without what wrappers add (DistributedDataParallel, torch.compile, ...), and the flat parameters of FSDP1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from math import prod
from typing import TYPE_CHECKING, Any

from ucp.contract.layouts import FlatBuffer, Span
from ucp.core.layout import Layout
from ucp.errors import LoadError, UnsupportedError, format_list
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
"""Class of a wrapper to the attribute that holds the wrapped module."""
_UNSUPPORTED = {
    "DeepSpeedEngine": "pass the module inside of it (engine.module) and no optimizer, or use its own load_checkpoint",
    "PipelineModule": "its layers are cut over pipeline ranks",
}
"""Class of a module that cannot be loaded to the reason."""


def find_wrapper_paths(model: nn.Module) -> frozenset[str]:
    """Paths of wrapped modules, whose last component a wrapper added. Raises UnsupportedError for DeepSpeed's."""
    paths = set()
    refused = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name in {base.__name__ for base in type(module).__mro__}:
            if name in _UNSUPPORTED:
                refused.append(f"{path or 'the model'} is a {name}: {_UNSUPPORTED[name]}")
            if name in _WRAPPERS:
                paths.add(f"{path}.{_WRAPPERS[name]}" if path else _WRAPPERS[name])
    if refused:
        raise UnsupportedError(f"expected a module that torch alone shards; got\n{format_list(refused)}")
    return frozenset(paths)


def plain_name(name: str, wrapper_paths: frozenset[str]) -> str:
    """`name` without the components that wrappers added."""
    parts = name.split(".")
    return ".".join(part for at, part in enumerate(parts) if ".".join(parts[: at + 1]) not in wrapper_paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatUnit:
    """A flat parameter of FSDP1, on this rank."""

    key: str
    """Its name among flat parameters; not a name in the model."""
    flat: torch.Tensor
    """The flat parameter, as an optimizer holds it without `use_orig_params`."""
    share: torch.Tensor
    """Memory of this rank's share."""
    names: tuple[tuple[str, ...], ...]
    """Names of each parameter in it, the principal one first."""
    ranges: tuple[FlatRange, ...]
    """The range of each parameter in the share."""
    originals: tuple[torch.Tensor, ...]
    """The parameters, as an optimizer holds them with `use_orig_params`; empty without."""
    members: frozenset[int]
    """`id` of all parameters of the module that are in it, and its own."""


def find_flat_units(model: nn.Module) -> list[FlatUnit]:
    """The flat parameters of all modules that FSDP1 wraps. Raises UnsupportedError if their order is not known."""
    wrapper_paths = find_wrapper_paths(model)
    paths: dict[int, list[str]] = {}
    handles: dict[int, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(plain_name(path, wrapper_paths) if path else "")
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
            handle = _get(module, "_handle")
            handles |= {} if handle is None else {id(handle): handle}
    return [_describe_unit(handle, paths, number) for number, handle in enumerate(handles.values())]


def _get(owner: object, name: str) -> Any:
    """A private attribute of FSDP1."""
    return getattr(owner, name)


def _describe_unit(handle: Any, paths: Mapping[int, Sequence[str]], number: int) -> FlatUnit:
    flat = handle.flat_param
    _check_flat(flat)
    if handle.uses_sharded_strategy and hasattr(flat, "_full_param_padded") and not handle.needs_unshard():
        # free the gathered parameters: otherwise the next forward pass would use their old values
        handle.reshard(free_unsharded_flat_param=True)
        handle.post_reshard()
    share = getattr(flat, "_local_shard", flat.data)
    if share.is_meta:
        raise LoadError("expected flat parameters of FSDP1 that have memory; got some on the meta device")
    rank, ranks = (handle.rank, handle.world_size) if handle.uses_sharded_strategy else (0, 1)
    is_param = [not is_padding for is_padding in _get(flat, "_is_padding_mask")]
    starts = compress(accumulate(_get(flat, "_numels_with_padding"), initial=0), is_param)
    shapes = [tuple(shape) for shape in _get(flat, "_shapes")]
    buffer = FlatBuffer.pack(
        {str(position): prod(shape) for position, shape in enumerate(shapes)},
        ranks=ranks,
        share=share.numel(),
        starts=[*starts],
        axis="dp_shard",
        known_from="flat parameters of FSDP1",
    )
    axes, spans = buffer.axes(), buffer.spans(rank)
    ranges = []
    for position, shape in enumerate(shapes):
        layout = Layout(flat=(axes[str(position)],) if str(position) in axes else ())
        part = LivePart(local_shape=shape, layout=layout, coords={"dp_shard": rank}, global_shape=shape)
        span = spans.get(str(position), Span(0, 0))
        ranges.append(FlatRange(start=span.start, numel=span.numel, part=part))
    originals = tuple(_get(flat, "_params") or ())
    return FlatUnit(
        key=f"flat parameter {number}",
        flat=flat,
        share=share,
        names=tuple(_find_names(flat, paths)),
        ranges=tuple(ranges),
        originals=originals,
        members=frozenset(map(id, (flat, *originals, *(_get(flat, "_shared_params") or ())))),
    )


def _check_flat(flat: Any) -> None:
    names = [info.param_name for info in _get(flat, "_param_infos")]
    rows = list(zip(names, _get(flat, "_contiguities"), _get(flat, "_param_extensions"), strict=True))
    lines = [f"{name}: flattened in the order of its memory" for name, is_contiguous, _ in rows if not is_contiguous]
    lines += [f"{name}: sharded by tensor parallelism" for name, _, extension in rows if extension is not None]
    if lines:
        raise UnsupportedError(
            f"expected parameters that FSDP1 flattens whole, in row-major order; got\n{format_list(lines)}\n"
            "Make them contiguous before they are wrapped, or use FSDP2 (fully_shard)"
        )


def _find_names(flat: Any, paths: Mapping[int, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Names of every parameter in a flat one: by all paths of its module, then by those of tied parameters."""

    def join(module: object, name: str) -> list[str]:
        return [f"{path}.{name}" if path else name for path in paths[id(module)]]

    tied: dict[tuple[int, str], list[str]] = {}
    for info in _get(flat, "_shared_param_infos"):
        names = tied.setdefault((id(info.prim_module), info.prim_param_name), [])
        names += join(info.module, info.param_name)
    for info in _get(flat, "_param_infos"):
        more = tied.get((id(info.module), info.param_name), ())
        yield tuple(dict.fromkeys([*join(info.module, info.param_name), *more]))
