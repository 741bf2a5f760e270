"""What the verbs print: pages, tables, and documents for --json."""
