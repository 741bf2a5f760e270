"""Names of parameters and states, and choosing among them.

States are an open set. Two have a meaning that the core relies on; every other name is what the optimizer calls it
(`exp_avg`, `exp_avg_sq`, `momentum_buffer`, ...).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from ucp.errors import UsageError

WEIGHT = "weight"
"""The parameter itself, in the best precision that the checkpoint holds (the fp32 master where there is one)."""

STEP = "step"
"""How often the optimizer has stepped; 0-d."""


@dataclass(frozen=True, slots=True)
class NameFilter:
    """Keeps names that match an include pattern (all, if none is given) and no exclude pattern.

    A pattern is a shell glob over the whole name; `NAME/STATE` narrows it to one state.

    >>> NameFilter(include=("layers.*",), exclude=("*/exp_avg*",)).keeps("layers.0.weight", "exp_avg")
    False
    """

    include: tuple[str, ...] = ()
    """Globs to keep; empty keeps everything."""
    exclude: tuple[str, ...] = ()
    """Globs to leave out, stronger than include."""

    def keeps(self, param: str, state: str) -> bool:
        """Whether state `state` of parameter `param` is wanted."""
        wanted = not self.include or any(_matches(glob, param, state) for glob in self.include)
        return wanted and not any(_matches(glob, param, state) for glob in self.exclude)

    def check_used(self, names: Iterable[tuple[str, str]]) -> None:
        """Raise UsageError for patterns that match none of `names` (parameter, state)."""
        pairs = list(names)
        unused = [g for g in (*self.include, *self.exclude) if not any(_matches(g, p, s) for p, s in pairs)]
        if unused:
            raise UsageError(f"no parameter matches {', '.join(map(repr, unused))}; {_hint(unused, pairs)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKeys:
    """Where one optimizer stands in the state dict of a training script."""

    root: tuple[object, ...]
    """Keys to it."""
    is_flat: bool = False
    """Whether names and settings are joined to one key, as by `flatten_optimizer_state_dict`."""
    groups: tuple[int, ...]
    """Its parameter groups, by their place among those of the checkpoint."""
    params: Mapping[str, str | int] = field(default_factory=dict)
    """Name of a parameter to what the optimizer calls it, where that differs: a number, or a name with wrappers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictKeys:
    """Where model and optimizers stand in the state dict of a training script."""

    model: tuple[object, ...]
    """Keys to the model."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Name of a parameter or buffer to its key there, where that differs: a name with wrappers."""
    optimizers: tuple[OptimizerKeys, ...] = ()
    """Every optimizer."""


def _matches(glob: str, param: str, state: str) -> bool:
    return fnmatchcase(param, glob) or fnmatchcase(f"{param}/{state}", glob)


def _hint(globs: Sequence[str], pairs: Sequence[tuple[str, str]]) -> str:
    """What to write instead: a glob is of the whole name."""
    for glob in globs:
        wider = f"*{glob}*"
        found = dict.fromkeys(param for param, state in pairs if _matches(wider, param, state))
        if found:
            first, more = next(iter(found)), len(found) - 1
            return f"globs are of the whole name: {wider!r} matches {first}{f' and {more:,} more' if more else ''}"
    known = dict.fromkeys(name for param, state in pairs for name in (param, f"{param}/{state}"))
    near = [name for glob in globs for name in get_close_matches(glob, known, 2)]
    if near:
        return f"did you mean {' or '.join(map(repr, near))}? `ucp inspect` lists the names"
    return "`ucp inspect` lists the names"
