"""Fixtures of the unit suite, whose loops run on here."""
