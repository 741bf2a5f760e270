"""Patterns: how a tensor lies over one axis of a mesh. One file each."""
