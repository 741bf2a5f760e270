"""Deltas: versions of a model as patches of the version before, as stacks for reinforcement learning exchange them."""
