"""Resume a run of Lightning from any checkpoint, with any strategy.

    from ucp.integrations.lightning import ResumeFrom

    trainer = lightning.Trainer(callbacks=[ResumeFrom("saved.ckpt")], strategy="ddp", max_epochs=3)
    trainer.fit(module)  # without ckpt_path

Tested with lightning 2.6.6: DDP and ModelParallelStrategy (FSDP2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack, cast

from ucp.conversion.option import type_path
from ucp.core.index import SIDECAR
from ucp.integrations.run import ResumeArguments, find_base, load_run
from ucp.live.report import LoadReport
from ucp.live.resume.values import list_inert_classes
from ucp.log import LOGGER

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = find_base("lightning.pytorch", "Callback")

_META = f"{SIDECAR}meta.pt"
"""File of a folder that Lightning saved, with everything but tensors of the model and the optimizer."""


class ResumeFrom(Callback):  # type: ignore[misc]  # Any for a type checker that does not see the library
    """Loads a checkpoint when `fit` starts: model, optimizer, scheduler, loss scale, loops, and states of callbacks.

    If Lightning saved the checkpoint (as a file or a folder), `fit` goes on at its epoch and batch. Otherwise only the
    number of steps is known: data and epochs start anew. Hooks such as `on_load_checkpoint` are not called.
    """

    def __init__(self, checkpoint: type_path | None = None, **options: Unpack[ResumeArguments]) -> None:
        """`checkpoint`: by default the one that UCP_CHECKPOINT names. `options`: see `ucp.load_into`."""
        self.checkpoint, self.options = checkpoint, options
        self.report: LoadReport | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load, on all ranks. Raises as `ucp.load_into`."""
        self.report = report = load_run(
            self.checkpoint,
            [pl_module],
            trainer.optimizers,
            [config.scheduler for config in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **self.options,
        )
        saved = report.saved
        if _META in saved.extras:  # of a folder
            entries = cast("dict[str, Any]", saved.extra(_META))
        else:  # of a file, if Lightning saved it
            entries = {name: saved.extra(name) for name in ("loops", "callbacks") if name in saved.extras}
        if "loops" in entries:
            trainer.fit_loop.load_state_dict(entries["loops"]["fit_loop"])
        else:
            _count_steps(trainer, pl_module, report.step or 0)
        _restore_callbacks(trainer, entries.get("callbacks", {}))


def _count_steps(trainer: Trainer, module: LightningModule, step: int) -> None:
    """Have `trainer.global_step` count on from the steps of the checkpoint."""
    loop = trainer.fit_loop.epoch_loop
    if module.automatic_optimization:
        total = loop.automatic_optimization.optim_progress.optimizer.step.total
    else:
        total = loop.manual_optimization.optim_step_progress.total
    total.ready = total.completed = step


def _restore_callbacks(trainer: Trainer, states: Mapping[str, Any]) -> None:
    """Give callbacks what they saved. One that saved objects of its own classes keeps its state, with a warning."""
    for callback in trainer.callbacks:
        state = states.get(callback.state_key)
        classes = list_inert_classes(state)
        if classes:
            LOGGER.warning("%s keeps its state: it saved objects of %s", callback.state_key, ", ".join(classes))
        elif state:
            callback.load_state_dict(state)
