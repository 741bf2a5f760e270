"""Optimizer states of a torch_dist checkpoint, in its six layouts."""
