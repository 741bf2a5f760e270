"""Which GPU holds which experts: places them by load and by what survives lost nodes, and moves what must move.

1. `loads` reads how many tokens each expert gets;
2. `arrange` gives every expert replicas and puts them on nodes, in several ways;
3. `survival` computes how likely each way survives lost nodes, and improves it by exchanges;
4. `place` chooses for every layer, and `balance` deals the slots of a node to its GPUs;
5. `placement` is the outcome, which `forms` reads and writes in the files of serving engines and DeepSpeed.

`tasks` shares out GPUs among the tasks of a multi-task run.
"""
