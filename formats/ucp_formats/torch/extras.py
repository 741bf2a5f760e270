"""Everything in a torch checkpoint that is neither model nor optimizer: the table of extras, and where a run's step is.

Scripts name their values as they like: a target writes all extras of another torch checkpoint under their own names,
and of other frameworks those in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from ucp.contract.run_extras import LR_SCHEDULER, MODULE_STATE, ExtraRow, ExtraTable
from ucp.core.index import Extra, Index

EXTRAS: ExtraTable = {
    # plain values only: a scheduler's own state dict
    LR_SCHEDULER: ExtraRow(keys=(LR_SCHEDULER,)),
    # written in the model's own dict
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
    """Every extra but companion files, with the keys under which it is written; None for one without a place.

    `origins`: formats whose extras have a place. `model`: keys to the model. `has_room`: whether values beside model
    and optimizer have a place.
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
    """Step of the run, as scripts save it: in the root, or in a dict above the model. `get`: the value at a path."""
    for place in ((TRAIN_STATE,), *(above[:depth] for depth in range(len(above) + 1))):
        for key in STEP_KEYS:
            step = get((*place, key))
            if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
                return step
    return None
