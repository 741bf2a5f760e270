"""Tensor parallelism: how each parameter is cut, from what the checkpoint records or a family says."""
