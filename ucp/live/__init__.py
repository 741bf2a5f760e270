"""Load a checkpoint of any format into the model and optimizer of a running program, together on all of its ranks.

1. `model` and `optimizer` describe the tensors that this rank holds;
2. `match` compares them with the index of the checkpoint: which slices to load, and everything that does not fit;
3. `exchange` divides the bytes among the ranks that need them: each rank reads a share, then the ranks exchange shares;
4. `resume` restores what is saved beside the model: schedulers, loss scales, RNG states;
5. `run` keeps the ranks together: they all succeed, or all raise the same error.
"""
