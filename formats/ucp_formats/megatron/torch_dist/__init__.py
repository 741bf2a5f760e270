"""torch_dist checkpoints, read as an index."""
