"""Names of the plain module: what wrappers put in front (DistributedDataParallel, torch.compile, ...) is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucp.errors import UnsupportedError, listed

if TYPE_CHECKING:
    from torch import nn

__all__ = ["hidden_in", "plain_name"]

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


def hidden_in(model: nn.Module) -> frozenset[str]:
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
