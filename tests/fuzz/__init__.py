"""Fuzz: checkpoints are damaged and edited in every way we know, and every verb has to refuse, tell, or be right.

    python -m tests.fuzz --seconds 300 --seed 0

`bases`: what is damaged, kept fixtures and stores that we write. `mutations`: how, by files; `contents`: inside them.
`oracle`: what the verbs made of it. A seed and a number give the same mutation on every machine.
"""
