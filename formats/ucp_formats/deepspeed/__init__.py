"""DeepSpeed: native checkpoints (ZeRO 0 to 3, BF16_Optimizer) and universal ones, as sources and targets."""
