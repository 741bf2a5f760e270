"""Checkpoints over time: saves, chains, deltas and experts."""
