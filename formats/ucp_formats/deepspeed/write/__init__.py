"""Writes the files that a DeepSpeed run would have saved."""
