"""Experts of a mixture-of-experts model: which tensors are theirs, how trained they are, what is wrong."""
