"""Scripts that run inside training processes are no test modules: they import frameworks that may not be there."""

collect_ignore_glob = ["*_worker.py", "*_run.py"]
