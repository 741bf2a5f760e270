"""Megatron-LM and megatron-core: legacy `mp_rank_*` checkpoints and torch_dist ones, as sources and targets."""
