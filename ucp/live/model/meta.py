"""Models without memory: what is on the meta device is given memory once everything is known to fit.

Parameters stay the objects that they are, so that ties and optimizers hold. What the checkpoint does not bring (buffers
that are not saved, or what `strict=False` leaves out) has no values to keep: the module that owns it computes them
(`reset_parameters`), or the model does (`init_weights`); where neither fills it, nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from ucp.errors import LoadError, listed
from ucp.live.model.dtensor import is_dtensor, local_of

if TYPE_CHECKING:
    import torch
    from torch import nn

Owned = tuple["nn.Module", str, "torch.Tensor"]
"""A module, the name of a parameter or buffer in it, and that itself."""


def has_meta_tensors(modules: Sequence[nn.Module]) -> bool:
    """Whether a parameter or buffer, saved or not, has none."""
    return any(_is_blank(own) for _, _, own in _owned(modules))


def _is_blank(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and a type, and no memory."""
    return local_of(tensor).is_meta


def choose_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type that a tensor without memory is made in: `dtype` where it is a floating parameter."""
    from torch import nn

    return dtype if dtype and isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor.dtype


def find_device(modules: Sequence[nn.Module]) -> torch.device:
    """Where tensors without memory are made: beside others of the model, or on the device of this process."""
    import torch
    from torch.nn import Module

    # of the class: `buffers` of Megatron's DistributedDataParallel is a list of its own
    tensors = [own for module in modules for own in (*Module.parameters(module), *Module.buffers(module))]
    beside = next((local_of(own).device for own in tensors if not _is_blank(own)), None)
    if beside is not None:
        return beside
    kinds = {own.device_mesh.device_type for own in tensors if is_dtensor(own)}
    is_cuda = "cuda" in kinds or (not kinds and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device(*kinds or {"cpu"})


def allocate(
    modules: Sequence[nn.Module], brought: Collection[int], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Make everything that has no memory on `device`, floating parameters in `dtype`, and compute what is not brought.

    What has values and is not brought keeps them, whatever is computed beside it.
    `brought`: `id` of the tensors that a checkpoint fills. Raises LoadError for what nobody computes.
    """
    owned = list(_owned(modules))
    blank = [own for own in owned if _is_blank(own[2])]
    left = [own for own in blank if id(own[2]) not in brought]
    fillers = list(dict.fromkeys(_fillers(modules, left)))
    stay = [own for own in owned if fillers and not _is_blank(own[2]) and id(own[2]) not in brought]
    values = [own.detach().clone() for _, _, own in stay]
    for tensor in {id(own): own for _, _, own in blank}.values():
        _fill_in(tensor, device, dtype)
    for _, _, tensor in left:
        local_of(tensor.detach()).fill_(_unset(tensor))
    for fill in fillers:
        fill()
    for (module, name, own), value in zip(stay, values, strict=True):
        if getattr(module, name) is not own:
            setattr(module, name, own)
        own.detach().copy_(value)
    _check_filled(modules, left)


def _owned(modules: Sequence[nn.Module]) -> Iterator[Owned]:
    for module in (module for model in modules for module in model.modules()):
        for name, own in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield module, name, own


def _fillers(modules: Sequence[nn.Module], left: Sequence[Owned]) -> Iterator[Callable[[], object]]:
    """What computes the values of `left`: functions of their modules, or one of the whole model."""
    every = (module for model in modules for module in model.modules())
    inner = next((module for module in every if callable(getattr(module, "init_weights", None))), None)
    lacking = []
    for module, name, _ in left:
        own = getattr(module, "reset_parameters", None)
        if callable(own):
            yield own
        elif inner is not None:
            yield cast("Callable[[], object]", inner.init_weights)  # a method, as was asked
        else:
            lacking.append(_called(modules, module, name))
    if lacking:
        raise LoadError(_not_filled(lacking, "and no module has reset_parameters or init_weights to compute them"))


def _fill_in(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> None:
    """Give one tensor memory, and leave it the object that it is."""
    import torch
    from torch import nn

    is_param = isinstance(tensor, nn.Parameter)
    made = torch.empty_like(tensor, device=device, dtype=choose_dtype(tensor, dtype), requires_grad=False)
    if is_param:
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    for name, value in vars(tensor).items():
        vars(made).setdefault(name, value)
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]  # torch's own


def _unset(tensor: torch.Tensor) -> float | bool:
    """A value that no model is made of."""
    import torch

    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max


def _check_filled(modules: Sequence[nn.Module], left: Sequence[Owned]) -> None:
    lacking = []
    for module, name, _ in left:
        local = local_of(getattr(module, name))
        is_unset = local.isnan() if local.is_floating_point() or local.is_complex() else local == _unset(local)
        if local.numel() and bool(is_unset.all()):
            lacking.append(_called(modules, module, name))
    if lacking:
        raise LoadError(
            _not_filled(lacking, "and the reset_parameters or init_weights of their modules leave them out")
        )


def _not_filled(lacking: Sequence[str], why: str) -> str:
    return (
        f"expected values for all tensors of a model on the meta device; the checkpoint does not bring\n"
        f"{listed(lacking)}\n{why}. Call model.to_empty(device=...) and fill them before load_into, or make the model "
        "on a device"
    )


def _called(modules: Sequence[nn.Module], module: nn.Module, name: str) -> str:
    path = next(path for model in modules for path, own in model.named_modules() if own is module)
    return f"{path}.{name}" if path else name
