"""Describe the model of a rank: names and dtypes of its tensors, and which part of a global tensor each is."""
