"""What a run goes on with beside its model: schedulers, scalers, random states, what each rank kept for itself."""
