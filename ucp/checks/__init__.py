"""Looking without writing: verify and explain."""
