"""What happens to the source's index before a target plans: selection, names, replicas, checks, a new optimizer."""
