"""What happens to the index of the source before a target plans: selection, names, replicas, checks, a new optimizer."""
