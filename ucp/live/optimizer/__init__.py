"""Live optimizers: which states they keep for each parameter, and how loaded states are set."""
