"""Carry what every rank holds of a checkpoint into its memory: each byte is read once where several ranks hold it.

1. `loads` says how an item is best read; `holders` who holds the same; `stages` what a rank does in which order;
2. `read_shares` shares the bytes of slices out over the ranks that hold them;
3. `carry` reads (`reading`) and gathers them (`buffers`) and puts them in place (`places`); `pace` decides whether
   exchanging pays;
4. `checksums` proves what was read, `verify` what has landed; `traffic` says what it cost.
"""
