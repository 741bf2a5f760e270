"""Resume the Trainer of transformers from any checkpoint.

    from ucp.integrations.transformers import accept_any_checkpoint

    trainer = accept_any_checkpoint(Trainer(model=model, args=args, train_dataset=data))
    trainer.train(resume_from_checkpoint="ckpt/global_step1000")

Tested with transformers 5.23.0 and accelerate 1.15.0, over DDP, FSDP2 and DeepSpeed 0.19.8.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import get_annotations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack, cast

from ucp.conversion.arguments import SourceArguments
from ucp.conversion.option import type_path
from ucp.core.index import SIDECAR, STEP
from ucp.errors import UnsupportedError
from ucp.integrations.run import ResumeArguments, import_library, load_run
from ucp.live.checkpoint import Checkpoint
from ucp.live.run.shared_index import open_together

if TYPE_CHECKING:
    from transformers import Trainer

_METHODS = ("train", "_inner_training_loop", "_init_training_state", "_prepare_for_training")
"""Methods of the Trainer that load, in the order in which it calls them."""
_STATE = f"{SIDECAR}trainer_state.json"
"""The Trainer's file with the steps done, the history of the log and the states of callbacks."""


def accept_any_checkpoint(trainer: Trainer, **options: Unpack[ResumeArguments]) -> Trainer:
    """The trainer, whose `train(resume_from_checkpoint=PATH)` now takes whatever `ucp` reads. Also subclasses of it.

    If a Trainer saved the checkpoint, also on other ranks or over another framework, its history, its callbacks and
    its place in the data are restored, and the RNG states of ranks that saved some. Otherwise the place in the data
    follows from the number of steps. `trainer.load_report` is what `ucp.load_into` returned. `options`: see
    `ucp.load_into`. Raises UnsupportedError for a release of transformers whose Trainer loads in another way.
    """
    missing = [name for name in _METHODS if not hasattr(trainer, name)]
    if missing:
        raise UnsupportedError(
            f"expected a Trainer that loads as in transformers 5.23; got a {type(trainer).__name__} without "
            f"{', '.join(missing)}. Install transformers 5.23, or call ucp.load_into in a callback"
        )
    resumption = _Resumption(trainer, options)
    for name in _METHODS:
        setattr(trainer, name, getattr(resumption, name.removeprefix("_")))
    return trainer


class _Resumption:
    """The methods of a trainer that load, in which `ucp` loads instead."""

    def __init__(self, trainer: Trainer, options: ResumeArguments) -> None:
        self._trainer, self._options = trainer, options
        self._original: dict[str, Callable[..., Any]] = {name: getattr(trainer, name) for name in _METHODS}
        self._path: type_path | None = None
        self._saved: Checkpoint | None = None

    def train(self, resume_from_checkpoint: object = None, *args: object, **kwargs: object) -> object:
        """`Trainer.train`, without what it loads itself before the loop."""
        path = resume_from_checkpoint
        if path is True:
            utils = import_library("transformers.trainer_utils")
            path = utils.get_last_checkpoint(self._trainer.args.output_dir)
        if not path:  # also if there is none, which the Trainer says
            return self._original["train"](resume_from_checkpoint, *args, **kwargs)
        self._path = cast("type_path", path)
        try:
            return self._original["train"](None, *args, **kwargs)
        finally:
            self._path = self._saved = None

    def inner_training_loop(self, *args: object, **kwargs: object) -> object:
        """The loop, which is told that it resumes."""
        if self._path is not None:
            source = {name: value for name, value in self._options.items() if name in get_annotations(SourceArguments)}
            self._saved = open_together(self._path, self._trainer.args.device, **cast("SourceArguments", source))
            kwargs["resume_from_checkpoint"] = self._path
        return self._original["_inner_training_loop"](*args, **kwargs)

    def init_training_state(
        self, max_steps: int, steps_of_epoch: int, epochs: int, resume_from_checkpoint: object, trial: object
    ) -> object:
        """Epochs done, and batches of the next one: from the file of a Trainer, or from the number of steps."""
        original, saved, trainer = self._original["_init_training_state"], self._saved, self._trainer
        if saved is not None and _STATE in saved.extras:
            with TemporaryDirectory() as folder:
                Path(folder, Path(_STATE).name).write_text(json.dumps(saved.extra(_STATE)))
                return original(max_steps, steps_of_epoch, epochs, folder, trial)
        beginning = original(max_steps, steps_of_epoch, epochs, resume_from_checkpoint, trial)
        if saved is None:
            return beginning
        counts = (saved.read(name, STEP) for name, atom in saved.items() if STEP in atom.states)
        trainer.state.global_step = saved.step or max(map(int, counts), default=0)
        done, steps = divmod(trainer.state.global_step, steps_of_epoch)
        return done, 0 if trainer.args.ignore_data_skip else steps * trainer.args.gradient_accumulation_steps

    def prepare_for_training(self, max_steps: int, loader: object, resume_from_checkpoint: object) -> object:
        """Wrapped model, optimizer and schedule, and the checkpoint loaded into them."""
        trainer = self._trainer
        if self._path is None:
            return self._original["_prepare_for_training"](max_steps, loader, resume_from_checkpoint)
        prepared = self._original["_prepare_for_training"](max_steps, loader, None)
        trainer.load_report = load_run(
            self._path,
            [trainer.model_wrapped],
            [trainer.optimizer],
            [trainer.lr_scheduler],
            scaler=trainer.accelerator.scaler,
            **self._options,
        )
        return prepared
