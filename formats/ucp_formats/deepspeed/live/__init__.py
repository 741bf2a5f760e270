"""Live DeepSpeed engines: which elements of which tensors a rank holds, and the other values of an engine."""
