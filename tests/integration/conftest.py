"""Scripts that run inside training processes are no test modules: they import frameworks that may not be there."""

collect_ignore = ["resume_worker.py", "load_worker.py", "family_worker.py"]
