"""How often to save, and how: predicts the share of time that a run makes progress, for several ways of saving.

1. `run`: the numbers of a run that decide it;
2. `models`: each way of saving in closed form (CheckFreq, Gemini, MoC-System, MoEtion);
3. `simulate`: the same by replaying failures, one by one, to check the closed forms;
4. `residency`: whether the states of an MoE model fit on GPUs, hosts and disks (MoESys eq. 1);
5. `report`: all of it for the user, as a range where inputs are ranges.
"""
