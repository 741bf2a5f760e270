"""Files that a run of DeepSpeed would have saved."""
