"""Live optimizers: what they keep of each parameter, and putting it there."""
