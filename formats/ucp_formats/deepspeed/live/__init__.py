"""Live DeepSpeed engines: which elements of which parameters a rank holds, and the other values of an engine."""
