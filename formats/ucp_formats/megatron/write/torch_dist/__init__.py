"""torch_dist, written."""
