"""Save the model and optimizer of a running program as an atom store, together on all of its ranks.

1. `holdings` describes what this rank holds of every state, as `ucp.live` describes it for a load;
2. `plan` deals what the ranks hold to them: every box of a state is written by one rank;
3. `part` writes the share of a rank: a pack, its extras, and a part manifest of them;
4. `commit` makes `ucp.json` of the part manifests, the last file: a folder without it is no store;
5. `job` does 3 and 4, on the thread of the program or in the background.
"""
