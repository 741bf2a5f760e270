"""What is live: the tensors of a rank's model, as names, types and the parts of wholes that they are."""
