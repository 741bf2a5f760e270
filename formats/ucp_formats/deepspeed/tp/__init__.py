"""Tensor parallelism: how each parameter is split, as the checkpoint records or a model family states."""
