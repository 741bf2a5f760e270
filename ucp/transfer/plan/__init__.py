"""Plans what a conversion does, block by block, before a byte moves; opens no files."""
