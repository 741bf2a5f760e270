"""Files of `torch.save`, read as references to their tensors and written around bytes copied later."""
