"""What is known of a model: what its checkpoint records, what transformers does with one, where torch places it."""
