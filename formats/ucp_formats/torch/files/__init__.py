"""Files of plain `torch.save`: one per rank, or one for a whole run."""
