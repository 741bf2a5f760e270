"""A run of plain torch, saved as torch's DCP tutorial does it and resumed in DeepSpeed: app_state_worker.py FOLDER."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import ucp

STEPS, MORE = 3, 3
CONFIG = {"train_batch_size": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}}


def make(seed: int):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def engine():
    import deepspeed

    model, optimizer, scheduler = make(1)
    config = {**CONFIG, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def trained(root: Path) -> list[float]:
    """Losses of the uninterrupted run after the save."""
    model, optimizer, scheduler = make(0)
    losses = []
    for step in range(STEPS + MORE):
        if step == STEPS:
            weights, states = get_state_dict(model, optimizer)
            app = {"model": weights, "optimizer": states, "scheduler": scheduler.state_dict()}
            dcp.save({"app": app}, checkpoint_id=root / "app")
        loss = (model(torch.ones(1, 4)) ** 2).sum()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return losses[STEPS:]


def resumed(run) -> dict[str, object]:
    """Step and losses of an engine that goes on."""
    step, losses = run.global_steps, []
    for _ in range(MORE):
        loss = (run(torch.ones(1, 4)) ** 2).sum()
        losses.append(loss.item())
        run.backward(loss)
        run.step()
    return {"step": step, "losses": losses}


def main(root: Path) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    first = engine()  # which initialises torch.distributed
    del first
    report: dict[str, object] = {"losses": trained(root)}
    ucp.convert(root / "app", root / "zero", to="deepspeed", topology="dp=1,zero=1")
    converted = engine()
    converted.load_checkpoint(root / "zero")
    report["converted"] = resumed(converted)
    loaded = engine()
    ucp.load_into(loaded, root / "app", optimizer=loaded.optimizer, scheduler=loaded.lr_scheduler)
    report["loaded"] = resumed(loaded)
    (root / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
