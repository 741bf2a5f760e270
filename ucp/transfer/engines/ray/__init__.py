"""Runs the tasks on the nodes of a Ray cluster. Ray is imported only when a run begins."""
