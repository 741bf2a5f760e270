"""Writes the optimizer files of every ZeRO stage."""
