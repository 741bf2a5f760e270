"""Carry what every rank holds of a checkpoint into its memory: each byte is read once where several ranks want it.

1. `read_shares` shares the bytes of slices out over the ranks that hold them;
2. `transfer` reads, gathers and scatters them, bucket by bucket;
3. `checksums` proves what was read.
"""
