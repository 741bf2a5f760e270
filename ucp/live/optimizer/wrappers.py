"""Optimizers that hand everything to another one: clients' own, which are seen through as wrappers of modules are."""

from __future__ import annotations

__all__ = ["innermost"]

_WRAPPERS = {
    "AcceleratedOptimizer": "optimizer",
    "DeepSpeedOptimizerWrapper": "optimizer",
    "LightningOptimizer": "optimizer",
}
"""Class of a wrapper to the attribute that holds what it wraps: of accelerate and Lightning."""


def innermost(optimizer: object) -> object:
    """The optimizer that steps."""
    while type(optimizer).__name__ in _WRAPPERS:
        optimizer = getattr(optimizer, _WRAPPERS[type(optimizer).__name__])
    return optimizer
