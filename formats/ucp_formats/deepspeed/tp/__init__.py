"""Tensor parallelism: how each parameter is split, from the checkpoint's record or a model family."""
