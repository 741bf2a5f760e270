"""PyTorch distributed checkpoints (torch.distributed.checkpoint): `.metadata` and its `.distcp` files."""
