"""What is restored beside the model: schedulers, loss scalers, RNG states, and what each rank saved for itself."""
