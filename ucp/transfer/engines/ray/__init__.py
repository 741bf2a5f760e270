"""The same tasks on the nodes of a Ray cluster. Nothing of Ray is imported before a run begins."""
