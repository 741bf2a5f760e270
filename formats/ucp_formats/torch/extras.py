"""Extras of a torch checkpoint, which are everything but model and optimizer, and where scripts save the run's step.

Scripts name these values as they like. A target therefore writes all extras of a torch checkpoint under the names that
they have there; of another framework's extras it writes only those in `EXTRAS`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from ucp.contract.run_extras import LR_SCHEDULER, MODULE_STATE, ExtraRow, ExtraTable
from ucp.core.index import Extra, Index

EXTRAS: ExtraTable = {
    # the state_dict() of a torch scheduler
    LR_SCHEDULER: ExtraRow(keys=(LR_SCHEDULER,)),
    # written into the model's dict, beside its tensors
    MODULE_STATE: ExtraRow(),
}

STEP_KEYS = ("step", "global_step", "iteration", "iter_num")
"""Keys under which scripts save the step of the run."""
TRAIN_STATE = "train_state"
"""Key under which torchtitan saves steps and tokens."""

_Path = tuple[object, ...]


def extra_paths(
    index: Index, origins: Container[str], model: _Path, *, has_room: bool = True
) -> Iterator[tuple[Extra, _Path | None]]:
    """Every extra except sidecar files, with the keys under which it is written; None for one that is not written.

    `origins`: source formats whose extras are all written. `model`: keys to the model's dict. `has_room`: whether the
    target writes values beside model and optimizer.
    """
    is_torch = (index.origin or index.format) in origins
    for extra in index.extras:
        if extra.is_sidecar:
            continue
        if extra.rank is None and extra.name.startswith(MODULE_STATE):
            yield extra, (*model, extra.name.removeprefix(MODULE_STATE))
        else:
            is_known = is_torch or (extra.name in EXTRAS and isinstance(extra.value, dict))
            yield extra, (extra.name,) if extra.rank is None and has_room and is_known else None


def find_step(get: Callable[[_Path], object], above: _Path) -> int | None:
    """Step of the run, as scripts save it: at the root, or in a dict that contains the model's.

    `get`: returns the value at a path. `above`: keys to the dict that contains the model's.
    """
    for place in ((TRAIN_STATE,), *(above[:depth] for depth in range(len(above) + 1))):
        for key in STEP_KEYS:
            step = get((*place, key))
            if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
                return step
    return None
