"""The ranks of this run: how they exchange values, their coordinates in the mesh, and what the user asked of them."""
