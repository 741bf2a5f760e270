"""The ranks of this run: how they talk to one another, and where each stands in the mesh."""
