"""Models larger than memory."""
