"""Patterns: how one axis of a mesh divides a tensor. One file each."""
