"""What every file of ours is held to, whatever it does: names, sizes, rooms, imports, linters, what docs mention."""
