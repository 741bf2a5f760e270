"""Reads universal checkpoints."""
