"""One conversion in parts, each by a process of its own, on as many machines as there are."""
