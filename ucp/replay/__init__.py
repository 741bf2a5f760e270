"""Replay the iterations of a sparse window: `ucp.densify`, and helpers for the training step that it calls.

import ucp

def step(iteration, active, scalars):
    with ucp.replay.frozen(model, active):
        loss_of(model, batch_of(iteration)).backward()
    ucp.replay.clip(model.parameters(), 1.0, scalars["clip_norm"])
    optimizer.step()
    optimizer.zero_grad()

ucp.densify("run", step, model, optimizer, "dp=2")
"""

from ucp.replay.modules import StageLog, clip, frozen

__all__ = ["StageLog", "clip", "frozen"]
