"""Load into live models and optimizers of megatron-core."""
