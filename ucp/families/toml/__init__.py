"""Reads TOML files: model families, the configurations in them, and rules of the user that rename tensors."""
