"""Live DeepSpeed engines: which parts of which tensors a rank holds, and what an engine keeps beside tensors."""
