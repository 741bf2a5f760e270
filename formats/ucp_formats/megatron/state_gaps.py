"""Parameters that lack a state which all others like them have (`ucp.core.state_gaps`), as Megatron keeps states.

The master is a state, under the name `weight`. Masters are kept of halved weights alone, where the optimizer is not
distributed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from ucp.core.names import STEP, WEIGHT
from ucp.core.state_gaps import gaps
from ucp.errors import MalformedError, counted, listed

__all__ = ["check_gaps"]


def check_gaps(
    states: Mapping[str, frozenset[str]],
    optimizers: Mapping[str, Hashable],
    where: str,
    *,
    without_master: Collection[str] = (),
) -> None:
    """Raise MalformedError naming every parameter that lacks states, with these.

    `states`: parameter to its states with a value per element. `optimizers`: which of several it belongs to,
    where that is known. `without_master`: parameters that need none.
    """
    lacking: dict[str, list[str]] = {}
    for name, own in gaps({name: own - {STEP} for name, own in states.items()}, optimizers).items():
        for state in own:
            if state != WEIGHT or name not in without_master:
                lacking.setdefault(name, []).append("master" if state == WEIGHT else state)
    if lacking:
        lines = (f"{name}: {', '.join(own)}" for name, own in lacking.items())
        raise MalformedError(
            f"expected of every trained parameter the states that others have; in {where} "
            f"{counted(len(lacking), 'parameter lacks', 'parameters lack')} some:\n{listed(lines)}\n"
            "Part of the optimizer is lost: copy the checkpoint again, or use another one"
        )
