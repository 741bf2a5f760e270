"""Checks that only read: verify, diff, explain."""
