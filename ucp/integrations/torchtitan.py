"""Start or resume a run of torchtitan from any checkpoint.

In the configuration of the run:

    from ucp.integrations.torchtitan import ResumingManager

    config.checkpoint = ResumingManager.Config(
        enable=True, initial_load_path="/runs/ckpt/global_step1000", initial_load_model_only=False
    )

Tested with torchtitan 0.3.0: its manager, optimizers and schedulers, over FSDP2.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucp.integrations.run import find_base, load_run
from ucp.live.run.request import ENVIRONMENT

if TYPE_CHECKING:
    from torchtitan.components.checkpoint import CheckpointManager
else:
    CheckpointManager = find_base("torchtitan.components.checkpoint", "CheckpointManager")


class ResumingManager(CheckpointManager):  # type: ignore[misc]  # Any for a type checker that does not see the library
    """torchtitan's manager, which reads the checkpoint of `initial_load_path` with `ucp`.

    As in torchtitan, `initial_load_path` is for a run whose own folder has no checkpoint, and with
    `initial_load_model_only` only the model is loaded. Without a path, the environment variable UCP_CHECKPOINT names
    one. `initial_load_in_hf` leaves the load to torchtitan. The position of the data loader is not restored.
    """

    initial_load_path: str | None
    """As in the settings, until `load` has read it."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """Settings of torchtitan's manager; it builds the class that declares it."""

    def load(self, step: int = -1) -> bool:
        """Load the newest checkpoint of the run, or else the one to start from. Raises as `ucp.load_into`."""
        if not self.enable or self.initial_load_in_hf:
            return bool(super().load(step))
        checkpoint = self.initial_load_path or os.environ.get(ENVIRONMENT)
        self.initial_load_path = None
        if super().load(step):
            return True
        if not checkpoint:
            return False
        models, states = self.states["model"].model, self.states
        if self.initial_load_model_only:
            load_run(checkpoint, models, (), ())
            return True
        report = load_run(checkpoint, models, list(states["optimizer"]), [states["lr_scheduler"]])
        states["train_state"].step = report.step or 0
        return True
