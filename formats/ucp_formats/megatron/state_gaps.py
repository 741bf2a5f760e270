"""Parameters that lack a state which all others like them have: a gap, which nothing else shows.

Which states an optimizer keeps is not recorded, so what others have tells. A parameter without any is frozen. The
states of Muon are not those of the Adam that trains the rest, so a gap is a *part* of what another one has. Masters are
kept of halved weights alone, where the optimizer is not distributed.

>>> full = frozenset({"weight", "exp_avg", "exp_avg_sq"})
>>> gaps({"a": full, "b": full - {"exp_avg"}, "c": frozenset(), "muon": frozenset({"weight", "momentum_buffer"})}, {})
{'b': ('exp_avg',)}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ucp.errors import MalformedError, counted, listed
from ucp.state import STEP, WEIGHT

__all__ = ["check_gaps", "gaps"]


def gaps(
    states: Mapping[str, frozenset[str]], chains: Mapping[str, int | None], *, without_master: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Parameters that have a part of the states which another has, each with those that it lacks.

    `states`: parameter to its states with a value per element; the master is `weight`. `chains`: which of several
    optimizers it belongs to, where that is known. `without_master`: parameters that need none.
    """
    own = {name: held - {STEP} for name, held in states.items() if held - {STEP}}
    kinds = {(chains.get(name), held) for name, held in own.items()}
    wanted = {kind: _largest(kind, kinds) for kind in kinds}
    found = {}
    for name, held in own.items():
        lacking = wanted[chains.get(name), held] - held - ({WEIGHT} if name in without_master else set())
        if lacking:
            found[name] = tuple(sorted(lacking))
    return found


def _largest(
    kind: tuple[int | None, frozenset[str]], kinds: Collection[tuple[int | None, frozenset[str]]]
) -> frozenset[str]:
    """The states of the one with the most, among those of the same optimizer that have all of these."""
    chain, held = kind
    return max((other for own, other in kinds if own == chain and held <= other), key=len)


def check_gaps(lacking: Mapping[str, tuple[str, ...]], where: str) -> None:
    """Raise MalformedError naming every parameter in `lacking`, with the states that it lacks."""
    if lacking:
        lines = (
            f"{name}: {', '.join('master' if state == WEIGHT else state for state in states)}"
            for name, states in lacking.items()
        )
        raise MalformedError(
            f"expected of every trained parameter the states that others have; in {where} "
            f"{counted(len(lacking), 'parameter lacks', 'parameters lack')} some:\n{listed(lines)}\n"
            "Part of the optimizer is lost: copy the checkpoint again, or use another one"
        )
