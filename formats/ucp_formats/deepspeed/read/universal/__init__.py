"""A universal checkpoint as an index."""
