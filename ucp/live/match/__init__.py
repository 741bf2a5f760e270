"""Match the tensors of a live run with those of a checkpoint, by names, shapes and dtypes."""
