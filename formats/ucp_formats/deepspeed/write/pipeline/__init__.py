"""Writes the stages and layers of a pipeline."""
