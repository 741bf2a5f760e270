"""What is known of a model: what its checkpoint records, and what transformers does with one."""
