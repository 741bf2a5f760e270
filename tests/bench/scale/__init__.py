"""Checkpoints as large as any, of which only the index is there: what `ucp` takes for them, measured.

The index is what the framework writes (torch.save's archives, torch's metadata classes); the elements are holes in
sparse files, which read as zeros and take no space.
"""
