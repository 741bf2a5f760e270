"""Chains: checkpoints of one run, saved one after another, read as one."""
