"""Extras that a run resumes from: scheduler, loss scale, and values per rank such as RNG states.

A format declares where its checkpoints keep them (`Format.run`); loading into a live run reads that. A table of extras
maps each extra to its keys in the framework's files; targets use it to place the extras of any source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

from ucp.core.index import Extra, Index
from ucp.io.pickle.values import walk_paths

LR_SCHEDULER = "lr_scheduler"
"""Key under which most frameworks and scripts save the state of a learning rate scheduler."""

MODULE_STATE = "module/"
"""Prefix of extras that are entries of the model's state dict but not parameters; the name of the entry follows."""
_EXTRA_STATE = "_extra_state"
"""Last part of the name of a module's extra state (`torch.nn.Module.get_extra_state`)."""

_SCHEDULER_ENTRIES: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"last_epoch"}), frozenset({"base_lrs", "_step_count", "_last_lr"})),  # torch: LambdaLR, SequentialLR
    (frozenset({"_schedulers"}), frozenset({"_last_lr"})),  # torch: ChainedScheduler
    (frozenset({"last_batch_iteration"}), frozenset({"last_batch_iteration"})),  # DeepSpeed: WarmupLR, OneCycle
    (frozenset({"num_steps"}), frozenset({"lr_decay_style"})),  # Megatron: OptimizerParamScheduler
)
"""Entries by which the state of a scheduler is recognised: all of the first set, any of the second."""


def is_module_state(name: object) -> bool:
    """Whether an entry of a state dict is a module's extra state, whose value may be a tensor, a dict or bytes.

    >>> is_module_state("layers.0._extra_state"), is_module_state("layers.0.weight")
    (True, False)
    """
    return isinstance(name, str) and name.rpartition(".")[2] == _EXTRA_STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """The state of a learning rate scheduler, and its place in the extras."""

    extra: str
    """Name of the extra."""
    path: tuple[object, ...]
    """Keys and list positions that lead to it in the value of the extra; empty if that is the state."""
    state: dict[str, object]
    """The state."""

    @property
    def key(self) -> str:
        """The full path, as users write it."""
        return ".".join((self.extra.replace("/", "."), *map(str, self.path)))

    def remove_from(self, extra: Extra) -> Extra | None:
        """The extra without this state; None if nothing else is in it."""
        containers = [extra.value]
        for key in self.path[:-1]:
            containers.append(containers[-1][key])  # type: ignore[index]  # the path leads through dicts and lists
        rest: object = None
        for container, key in zip(reversed(containers), reversed(self.path), strict=False):
            entries = container.items() if isinstance(container, dict) else enumerate(cast("list[object]", container))
            rest_entries = {name: rest if name == key else value for name, value in entries if name != key or rest}
            rest = rest_entries if isinstance(container, dict) else list(rest_entries.values())
        return replace(extra, value=rest) if rest else None


def find_schedulers(index: Index) -> list[SchedulerState]:
    """States of schedulers among the extras that all ranks share, under any key and at any depth."""
    return [
        scheduler
        for extra in index.extras
        if extra.rank is None
        for scheduler in find_schedulers_in(extra.name, extra.value)
    ]


def find_schedulers_in(name: str, value: object) -> Iterator[SchedulerState]:
    """States of schedulers in the value of the extra `name`, without those nested in another scheduler's state.

    >>> saved = {"epoch": 1, "sched": [{"last_epoch": 3, "base_lrs": [0.1]}]}
    >>> [scheduler.key for scheduler in find_schedulers_in("app", saved)]
    ['app.sched.0']
    """
    for path, item in walk_paths(value, enter=lambda container: not _is_scheduler(container)):
        if _is_scheduler(item):
            yield SchedulerState(extra=name, path=path, state=item)  # type: ignore[arg-type]  # checked by _is_scheduler


def _is_scheduler(value: object) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(key, str) for key in value)
        and any(
            required <= value.keys() and alternatives & value.keys() for required, alternatives in _SCHEDULER_ENTRIES
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """State of a dynamic loss scale, in the terms of `torch.amp.GradScaler`. None: not recorded.

    A number may be a reference to a tensor of one element.
    """

    found_in: str
    """Name of the extra."""
    scale: object
    """Loss scale."""
    growth_factor: object = None
    """What the scale is multiplied by when it grows."""
    backoff_factor: object = None
    """What it is multiplied by after an overflow."""
    growth_interval: object = None
    """Steps without overflow after which it grows."""
    growth_tracker: object = None
    """Steps without overflow since it last changed."""


_SCALERS = ("scaler", "grad_scaler", "loss_scaler", "GradScaler")
"""Names that scripts save the state of a `torch.amp.GradScaler` under."""


def find_torch_scale(index: Index) -> LossScale | None:
    """The state of a `torch.amp.GradScaler` among the extras, if there is one."""
    for extra in index.extras:
        state = extra.value
        if extra.name in _SCALERS and isinstance(state, dict) and {"scale", "_growth_tracker"} <= state.keys():
            return parse_torch_scaler(extra.name, state)
    return None


def parse_torch_scaler(name: str, state: dict[object, object]) -> LossScale:
    """The state of a `torch.amp.GradScaler`."""
    factors = {key: state.get(key) for key in ("growth_factor", "backoff_factor", "growth_interval")}
    return LossScale(found_in=name, scale=state["scale"], growth_tracker=state["_growth_tracker"], **factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExtras:
    """Extras of a format that a run resumes from."""

    scheduler: str | None = None
    """Extra in which the framework itself keeps a scheduler's state; None if scripts save it under any key."""
    scale: Callable[[Index], LossScale | None] = find_torch_scale
    """Finds the loss scale."""
    places: re.Pattern[str] | None = None
    """Matches NAME/PLACE of values that differ by rank: groups `name`, and `tp`, `pp`, `dp`, `ep` for the place.

    PLACE may also be a key of a dict. A value that is a list has one entry for each dp rank of the place, or one for
    all of them.
    """
    client: str = ""
    """Name of the extra, a dict, with all that the training script passed to save; empty if each entry is an extra."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraRow:
    """How a format stores one extra."""

    keys: tuple[str, ...] = ()
    """Keys of the value in its files; empty if it is not read from a key."""
    is_carried: bool = True
    """Whether the target writes the source's value unchanged; else it writes another value, or none."""
    rank_stage: int = 0
    """Lowest ZeRO stage in which every rank has a file that can hold a separate value."""


ExtraTable = Mapping[str, ExtraRow]
"""Name of an extra, or a prefix of names that ends with a slash, to its row."""


class ExtraValues:
    """Extras of `index`, by name and rank, for a target with `table`.

    `same_ranks`: whether the target has as many ranks as the source; only then does each rank keep its own values.
    """

    def __init__(self, index: Index, table: ExtraTable, *, same_ranks: bool = True) -> None:
        extras = [extra for extra in index.extras if not extra.is_sidecar]
        self._common = {extra.name: extra.value for extra in extras if extra.rank is None}
        self._of_ranks = {(extra.name, extra.rank): extra.value for extra in extras if extra.rank is not None}
        self._table = table
        self._same_ranks = same_ranks

    def names(self) -> list[str]:
        """Every name, once."""
        return list(dict.fromkeys([*self._common, *(name for name, _ in self._of_ranks)]))

    def get(self, name: str, rank: int = 0) -> object:
        """Value of `name` for `rank`: its own, else the common one, else None. A dict is merged over a common dict."""
        common = self._common.get(name)
        value = self._of_ranks.get((name, rank if self._same_ranks else 0))
        if value is None or (common is not None and not self._same_ranks):
            return common
        return {**common, **value} if isinstance(common, dict) and isinstance(value, dict) else value

    def mapping(self, name: str, rank: int = 0) -> Mapping[str, object]:
        """Value of `name` as a mapping; empty if it is none."""
        value = self.get(name, rank)
        return value if isinstance(value, dict) else {}

    def with_prefix(self, prefix: str, rank: int = 0) -> Iterator[tuple[str, object]]:
        """(rest of the name, value for `rank`) of the extras whose name starts with `prefix`, if `rank` has a value."""
        for name in self.names():
            if name.startswith(prefix) and (value := self.get(name, rank)) is not None:
                yield name.removeprefix(prefix), value

    def without_place(self) -> list[str]:
        """Names that are not in the table, sorted."""
        return sorted(name for name in self.names() if self._row(name) is None)

    def without_rank(self, stage: int) -> list[str]:
        """Names for which ranks above 0 have values that the files of ZeRO stage `stage` cannot hold, sorted.

        Those that are not in the table are left out: `without_place` lists them.
        """
        lost = {name for name, rank in self._of_ranks if rank > 0}
        stages = {name: row.rank_stage for name in lost if (row := self._row(name)) is not None}
        return sorted(name for name in stages if not (self._same_ranks and stage >= stages[name]))

    def _row(self, name: str) -> ExtraRow | None:
        starts = (row for start, row in self._table.items() if start.endswith("/") and name.startswith(start))
        return self._table.get(name) or next(starts, None)
