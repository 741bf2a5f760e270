"""Flat buffers of the distributed optimizer: which parameter is where."""
