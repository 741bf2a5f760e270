"""Pickles, read and written as values: nothing in them is ever executed."""
