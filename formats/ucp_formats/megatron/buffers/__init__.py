"""Flat buffers of the distributed optimizer: which parameter lies where."""
