"""Engines, which run the tasks of a job."""
