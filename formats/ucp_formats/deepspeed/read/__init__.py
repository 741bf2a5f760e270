"""A native checkpoint as an index."""
