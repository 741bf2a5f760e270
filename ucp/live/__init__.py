"""Bring atoms into a live model: what it wants, who reads what, how the ranks exchange it, where it goes.

1. `model`, `optimizer` describe what is live;
2. `match` matches the description with an index: slices to bring, and everything that does not fit;
3. `exchange` shares the bytes of the slices out over the ranks that hold them, reads, gathers and scatters them;
4. `run` keeps the ranks together: they all succeed, or all raise the same error.
"""
