"""The atom store: a folder of atoms with a manifest, either in packs or as references to a source's files."""
