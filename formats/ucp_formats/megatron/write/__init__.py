"""A checkpoint that Megatron-LM resumes from."""
