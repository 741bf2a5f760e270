"""Looking without writing: verify, explain, propose."""
