"""Helpers for the training step of a replay, in which only some operators are trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ucp.errors import MissingStateError, UsageError, format_list
from ucp.live.model.describe import list_modules
from ucp.live.model.wrappers import find_wrapper_paths, plain_name

if TYPE_CHECKING:
    import torch
    from torch import nn

_EPSILON = 1e-6
"""What torch adds to a norm before it divides by it."""


@contextmanager
def frozen(model: nn.Module | Sequence[nn.Module], active: Collection[str]) -> Iterator[None]:
    """Compute no gradients of the parameters that are not `active`; the modules' own code computes all else.

    Gradients of inputs flow through all modules, as in training: outputs require gradients, so that collectives in
    backward (expert parallelism) run on all ranks. DistributedDataParallel waits for the gradients of all parameters:
    there, train them all. The replay is as exact, because what is not active gets its weights from the next link.

    `active`: names of parameters, as `densify` passes them. Raises UsageError for a name that the model does not have.
    """
    from torch import nn

    modules = list_modules(model)
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    wrappers = find_wrapper_paths(root)
    params = {plain_name(name, wrappers): param for name, param in root.named_parameters()}
    if unknown := sorted(set(active) - params.keys()):
        raise UsageError(f"expected names of parameters of this model; got\n{format_list(unknown)}")
    stopped = [param for name, param in params.items() if name not in active and param.requires_grad]
    ids = set(map(id, stopped))
    with ExitStack() as stack:
        for module in root.modules():
            of_module = list(module.parameters(recurse=False))
            if of_module and all(id(param) in ids for param in of_module):
                stack.callback(module.register_forward_hook(_require_gradient).remove)
        for param in stopped:
            param.grad = None
            param.requires_grad = False
            stack.callback(setattr, param, "requires_grad", True)  # noqa: FBT003  # a value of the attribute
        yield


def _require_gradient(_module: nn.Module, _inputs: object, outputs: object) -> object:
    """`outputs` of a module without trained parameters, as ones that require gradients."""
    import torch

    if isinstance(outputs, tuple | list) and not hasattr(outputs, "_fields"):
        return type(outputs)(_require_gradient(_module, _inputs, output) for output in outputs)
    if not isinstance(outputs, torch.Tensor) or not torch.is_grad_enabled():
        return outputs
    if outputs.requires_grad or not outputs.is_floating_point():
        return outputs
    return outputs.requires_grad_().clone()  # no leaf, as the model may change it in place


def clip(parameters: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor | float | None) -> None:
    """Scale gradients as `torch.nn.utils.clip_grad_norm_` does, by a norm of all gradients that is given.

    `norm`: what `clip_grad_norm_` returned in the iteration, as it was saved: its dtype matters. A number is taken as
    float32. None: gradients are not clipped.
    """
    import torch

    if norm is None:
        return
    total = norm if isinstance(norm, torch.Tensor) else torch.tensor(norm, dtype=torch.float32)
    scale = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
    for param in parameters:
        if param.grad is not None:
            param.grad.mul_(scale.to(param.grad.device))


class StageLog:
    """What a pipeline stage sent to its neighbours, in host memory, so that one that fails is replayed without others.

    Each rank keeps what it sends. The stages that failed, next to one another, need only what crossed their two ends.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int, str], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(tensor.nbytes for tensor in self._sent.values())

    def keep(self, tensor: torch.Tensor, *, iteration: int, micro: int, to: str) -> torch.Tensor:
        """Keep a copy of what is sent; the tensor itself is returned. `micro`: number of the micro-batch.

        `to`: what tells apart what a rank sends in one micro-batch, e.g. "next" and "previous".
        """
        self._sent[iteration, micro, to] = tensor.detach().to("cpu", copy=True)
        return tensor

    def get(self, *, iteration: int, micro: int, to: str) -> torch.Tensor:
        """What was sent. Raises MissingStateError if it is not kept."""
        if (iteration, micro, to) not in self._sent:
            kept = sorted({key[0] for key in self._sent})
            raise MissingStateError(
                f"expected what was sent to {to!r} in iteration {iteration}, micro-batch {micro}; kept are iterations "
                f"{f'{kept[0]} to {kept[-1]}' if kept else 'none'}. Replay all stages"
            )
        return self._sent[iteration, micro, to]

    def forget(self, *, before: int) -> None:
        """Drop what was sent before an iteration: the second of the oldest window that may be replayed."""
        self._sent = {key: tensor for key, tensor in self._sent.items() if key[0] >= before}
