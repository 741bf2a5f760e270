"""Parameter groups of Megatron's optimizers, told by the arguments of the run."""
