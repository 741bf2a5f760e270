"""The atom store: manifest, packs, references."""
