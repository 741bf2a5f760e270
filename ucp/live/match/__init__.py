"""What a live run wants of a checkpoint, against what the checkpoint has. Names, shapes and types only."""
