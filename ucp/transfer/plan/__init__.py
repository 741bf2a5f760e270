"""What a conversion will do, block by block, decided before a byte moves: values alone, no files."""
