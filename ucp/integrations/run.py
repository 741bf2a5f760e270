"""What all integrations do: import a library that may be missing, and load into the objects of its run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, get_args

from ucp.contract.protocols import Observer
from ucp.conversion.arguments import LoadArguments
from ucp.conversion.option import DtypeLike, TopologyLike, type_path
from ucp.core.index import STEP
from ucp.errors import MissingLibraryError, UsageError
from ucp.live.load import load_into
from ucp.live.model.parallel.experts import PlacementLike
from ucp.live.report import LoadReport

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer


Schedule = Literal["restore", "advance"]


class LoadIntoArguments(LoadArguments, total=False):
    """Arguments of `ucp.load_into`, except the objects of the run."""

    topology: TopologyLike | DeviceMesh | None
    strict: bool
    dtype: DtypeLike | None
    rename: Callable[[str], str] | type_path | None
    rank_extras: Literal["drop", "carry", "replicate"]
    exchange: Literal["auto", "always", "never"]
    verify: bool
    progress: bool | Observer
    placement: PlacementLike | None


class ResumeArguments(LoadIntoArguments, total=False):
    """Further arguments of an integration."""

    schedule: Schedule
    """"restore" (the default) loads the saved state of the learning rate scheduler. "advance" steps the scheduler of
    this run as often as the checkpoint was stepped: for one whose schedule is of another class."""


def import_library(module: str) -> ModuleType:
    """A module of another library. Raises MissingLibraryError if it, or something that it needs, is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingLibraryError(
            f"expected {library}, which this integration is for; got: {error}. Install it: pip install {library}"
        ) from error


def find_base(module: str, name: str) -> type:
    """A class of another library, to derive from. Without the library, a class that raises MissingLibraryError."""
    try:
        return cast("type", getattr(import_library(module), name))
    except MissingLibraryError:

        def refuse(*args: object, **kwargs: object) -> None:
            import_library(module)

        return type(name, (), {"__new__": refuse, "Config": object})  # so that modules can be imported without it


def load_run(
    checkpoint: type_path | None,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[object],
    *,
    scaler: object = None,
    schedule: Schedule = "restore",
    **options: Unpack[LoadIntoArguments],
) -> LoadReport:
    """Load a checkpoint into the objects of a run, as `ucp.load_into` does. Collective.

    If it records no step, the report has the one that the optimizer counted. Raises UsageError for several models.
    """
    for count, what in ((len(models), "model"), (len(optimizers), "optimizer"), (len(schedulers), "scheduler")):
        if count > 1 or (count == 0 and what == "model"):
            raise UsageError(
                f"expected a run with one {what}; got {count}. Call ucp.load_into(model, optimizer=...) for each of "
                "them, with the checkpoint that holds it"
            )
    if schedule not in get_args(Schedule):
        raise UsageError(f"expected schedule to be one of {', '.join(get_args(Schedule))}; got {schedule!r}")
    restored, advanced = (schedulers, ()) if schedule == "restore" else ((), schedulers)
    report = load_into(
        models[0],
        checkpoint=checkpoint,
        optimizer=next(iter(optimizers), None),
        scheduler=next(iter(restored), None),
        scaler=scaler,
        **options,
    )
    if report.step is None:  # a script's own file, perhaps: then the optimizer has counted
        states = [state for optimizer in optimizers for state in getattr(optimizer, "state", {}).values()]
        report = replace(report, step=max((int(state[STEP]) for state in states if STEP in state), default=None))
    for scheduler in advanced:
        inner: Any = getattr(scheduler, "scheduler", scheduler)  # accelerate's counts steps of all ranks
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            for _ in range(report.step or 0):
                inner.step()
    return report
