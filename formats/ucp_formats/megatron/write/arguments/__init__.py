"""The arguments that a written checkpoint carries."""
