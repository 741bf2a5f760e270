"""What may lie at a destination, where it grows, and how its bytes are written."""
