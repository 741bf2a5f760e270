"""Move bytes from a checkpoint into the tensors of all ranks; what several ranks hold is read once.

1. `reads` says what is read for an item, and reads it with threads;
2. `read_shares` divides the bytes of slices equally among the ranks that hold them;
3. `stages` finds which ranks hold the same slices, and orders the work of a rank;
4. `carry` reads, gathers and stores, and measures whether exchanging is faster than reading everything;
5. `checksums` compares what was read with recorded checksums, and memory with the files.
"""
