"""Bring atoms into a live model: what it wants, who reads what, how the ranks exchange it, where it goes.

1. `model`, `optimizer` describe what is live (the only modules here, with `transfer` and `ranks`, that know torch);
2. `fit` matches the description with an index: slices to bring, and everything that does not fit;
3. `readers` shares the bytes of the slices out over the ranks;
4. `transfer` reads, gathers and scatters them, bucket by bucket; `checksums` proves what was read;
5. `ranks` keeps the ranks together: they all succeed, or all raise the same error.
"""
