"""Live runs of megatron-core: its models and its optimizers, filled in place.

1. `model` asks the modules for the place of every tensor (`sharded_state_dict`), and names it as the readers do;
2. `optimizer` finds what the optimizers of the rank keep of each parameter, masters and shards of them among it;
3. `adapter` puts both together, and lets Megatron make its 16-bit weights from the masters.
"""
