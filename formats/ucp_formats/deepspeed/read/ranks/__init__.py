"""Runs of more than data parallelism: what each model-parallel rank holds, put together."""
