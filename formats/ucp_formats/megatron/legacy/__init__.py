"""Legacy checkpoints (`mp_rank_*`), read as an index."""
