"""Models on the meta device: their tensors are allocated once everything is known to fit.

Parameters stay the same objects, so that ties and optimizers stay valid. Tensors that the checkpoint does not have
(buffers that are not saved, or what `strict=False` allows) are computed by their module (`reset_parameters`), or by the
model (`init_weights`); if neither fills them, nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from ucp.errors import LoadError, format_list
from ucp.live.model.dtensor import is_dtensor, local_of

if TYPE_CHECKING:
    import torch
    from torch import nn

_Owned: TypeAlias = "tuple[nn.Module, str, torch.Tensor]"
"""A module, the name of a parameter or buffer in it, and that tensor."""


def has_meta_tensors(modules: Sequence[nn.Module]) -> bool:
    """Whether a parameter or buffer, saved or not, is on the meta device."""
    return any(local_of(tensor).is_meta for _, _, tensor in _list_tensors(modules))


def choose_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to allocate a tensor on the meta device in: `dtype` for a floating-point parameter, else its own."""
    from torch import nn

    return dtype if dtype and isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor.dtype


def find_device(modules: Sequence[nn.Module]) -> torch.device:
    """The device to allocate tensors on: that of other tensors of the model, else that of this process."""
    import torch
    from torch.nn import Module

    # methods of the class: in Megatron's DistributedDataParallel `buffers` is a list
    tensors = [tensor for module in modules for tensor in (*Module.parameters(module), *Module.buffers(module))]
    for local in map(local_of, tensors):
        if not local.is_meta:
            return local.device
    kinds = {tensor.device_mesh.device_type for tensor in tensors if is_dtensor(tensor)}
    is_cuda = "cuda" in kinds or (not kinds and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device(*kinds or {"cpu"})


def allocate(
    modules: Sequence[nn.Module], loaded: Collection[int], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Allocate tensors on the meta device on `device`, floating-point parameters in `dtype`; compute unloaded ones.

    Other tensors that are not loaded keep their values, even if their module computes them again.
    `loaded`: `id` of the tensors that a checkpoint fills. Raises LoadError for tensors that nothing computes.
    """
    owned = list(_list_tensors(modules))
    blank = [entry for entry in owned if local_of(entry[2]).is_meta]
    computed = [entry for entry in blank if id(entry[2]) not in loaded]
    fillers = list(dict.fromkeys(_find_fillers(modules, computed)))
    unchanged = [entry for entry in owned if fillers and not local_of(entry[2]).is_meta and id(entry[2]) not in loaded]
    values = [tensor.detach().clone() for _, _, tensor in unchanged]
    for tensor in {id(tensor): tensor for _, _, tensor in blank}.values():
        _allocate_tensor(tensor, device, dtype)
    for _, _, tensor in computed:
        local_of(tensor.detach()).fill_(_choose_sentinel(tensor))
    for fill in fillers:
        fill()
    for (module, name, tensor), value in zip(unchanged, values, strict=True):
        if getattr(module, name) is not tensor:
            setattr(module, name, tensor)
        tensor.detach().copy_(value)
    unfilled = []
    for module, name, _ in computed:
        local = local_of(getattr(module, name))
        is_nan = local.is_floating_point() or local.is_complex()
        if local.numel() and bool((local.isnan() if is_nan else local == _choose_sentinel(local)).all()):
            unfilled.append((module, name))
    _check_none(modules, unfilled, "and reset_parameters or init_weights of their modules do not fill them")


def _list_tensors(modules: Sequence[nn.Module]) -> Iterator[_Owned]:
    for module in (module for model in modules for module in model.modules()):
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield module, name, tensor


def _find_fillers(modules: Sequence[nn.Module], computed: Sequence[_Owned]) -> Iterator[Callable[[], object]]:
    """Functions that compute the values of `computed`: of their modules, or one of the whole model."""
    every = (module for model in modules for module in model.modules())
    inner = next((module for module in every if callable(getattr(module, "init_weights", None))), None)
    without = []
    for module, name, _ in computed:
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            yield reset
        elif inner is not None:
            yield cast("Callable[[], object]", inner.init_weights)  # callable, as checked above
        else:
            without.append((module, name))
    _check_none(modules, without, "and no module has reset_parameters or init_weights to compute them")


def _allocate_tensor(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> None:
    """Give one tensor memory; it stays the same object."""
    import torch
    from torch import nn

    allocated = torch.empty_like(tensor, device=device, dtype=choose_dtype(tensor, dtype), requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        allocated = nn.Parameter(allocated, requires_grad=tensor.requires_grad)
    for name, value in vars(tensor).items():
        vars(allocated).setdefault(name, value)
    torch.utils.swap_tensors(tensor, allocated)  # type: ignore[no-untyped-call]  # torch's own


def _choose_sentinel(tensor: torch.Tensor) -> float | bool:
    """A value that shows that a tensor was not filled: no model consists of it."""
    import torch

    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max


def _check_none(modules: Sequence[nn.Module], missing: Sequence[tuple[nn.Module, str]], why: str) -> None:
    """Raise LoadError if any values are missing."""
    if missing:
        paths = {id(module): path for model in modules for path, module in model.named_modules()}
        names = [f"{path}.{name}" if (path := paths[id(module)]) else name for module, name in missing]
        raise LoadError(
            "expected values for all tensors of a model on the meta device; the checkpoint does not have\n"
            f"{format_list(names)}\n{why}. Call model.to_empty(device=...) and fill them before load_into, or make the "
            "model on a device"
        )
