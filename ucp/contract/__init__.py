"""What formats, targets, patterns and engines are held to, and what they share."""
