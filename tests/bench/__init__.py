"""Benchmarks: whole processes, timed side by side in one run on one machine."""
