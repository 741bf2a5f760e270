"""What a training script's state dict holds: model, optimizers, and the rest."""
