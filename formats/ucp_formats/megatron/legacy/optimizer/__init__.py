"""The optimizer of a legacy checkpoint, whole or distributed."""
