"""The program of `test_save.py` that is killed: it recovers from its chain, saves link after link, and is killed again.

python kill_worker.py CHAIN KILLS    prints the number of links. The elements of a parameter say of which step they are.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import ucp

EXPERTS = 4
WRONG = 3
"""Exit status of a process that found something wrong."""


def make_model(step: int) -> nn.Module:
    moe = nn.ModuleDict({"router": nn.Linear(64, EXPERTS, bias=False)})
    moe["experts"] = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(EXPERTS))
    model = nn.ModuleDict({"moe": moe})
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data = torch.rand(param.shape, generator=generator) + step
    return model


def recover(chain: Path) -> int:
    """Load the chain and check what it holds; the step after its newest link."""
    if not (chain / "chain.json").exists():
        return 0
    model = make_model(-1)
    newest = ucp.load_into(model, None, chain).step
    assert newest is not None
    ages = range(min(newest, EXPERTS) + 1)  # in links, as every link is one step
    saved = [dict(make_model(newest - age).named_parameters()) for age in ages]
    for name, param in model.named_parameters():
        age = next((age for age in ages if torch.equal(saved[age][name], param)), None)
        assert age == 0 or (age and "experts" in name), (name, newest)
    return newest + 1


def train(chain: Path) -> None:
    """Go on from the chain for ever."""
    step = recover(chain)
    while True:
        plan = ucp.PartialExperts(1) if step else ucp.Full()
        ucp.save(make_model(step), None, None, chain / f"step{step}", step=step, plan=plan, chain=True)
        step += 1


def main() -> None:
    chain, kills = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    with TemporaryDirectory() as warm:  # what is imported at the first save and load; a read would start threads
        ucp.save(make_model(0), None, None, Path(warm) / "step0", step=0, chain=True)
        ucp.open(warm)
        assert ucp.load_into
    times = random.Random(0)
    for _ in range(kills):
        child = os.fork()
        if not child:
            try:
                train(chain)
            finally:
                os._exit(WRONG)
        time.sleep(times.uniform(0.05, 1.0))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the process found something wrong: {status}"
    links = recover(chain)
    assert ucp.verify(chain).ok
    print(links)


if __name__ == "__main__":
    main()
