"""Runs with tensor, pipeline or expert parallelism: what each model-parallel rank holds, merged."""
