"""Stages and layers of a pipeline, written."""
