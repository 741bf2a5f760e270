"""PyTorch's own checkpoints: torch.distributed.checkpoint, as FSDP, tensor parallelism and DDP save them."""
