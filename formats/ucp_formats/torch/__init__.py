"""PyTorch's checkpoints: those of torch.distributed.checkpoint (DCP), and files of plain `torch.save` (`files`)."""
