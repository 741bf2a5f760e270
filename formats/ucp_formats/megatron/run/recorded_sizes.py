"""Whether the sizes that a checkpoint records are those of its tensors.

What a family's sizes are found from, arguments and shapes of tensors, must give one value: where they differ, the
arguments were edited, are of another run, or the rules joined the wrong rows. Which sizes these are is data of the
family (its [sizes]), so rules of the user's own are held against what the run recorded, too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from ucp.core.names import STEP, WEIGHT
from ucp.core.state_gaps import gaps
from ucp.errors import MalformedError, counted, listed
from ucp.families.family import Family
from ucp.families.library import contradictions

__all__ = ["check_gaps", "check_recorded", "sizes_in_doubt"]

_HETEROGENEOUS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
"""Arguments of a model whose layers each have sizes of their own, which no other argument tells."""
_PADDING = "padded_vocab_size"
"""Rows that a run pads its embedding to; torch_dist adds and drops padding at loading, so files may have others."""


def sizes_in_doubt(
    family: Family, arguments: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], *, pads_on_load: bool
) -> tuple[str, ...]:
    """What arguments and whole tensors say differently, a line each.

    `shapes`: canonical name to global shape. `pads_on_load`: whether the run may pad the vocabulary otherwise.
    """
    if any(arguments.get(key) for key in _HETEROGENEOUS):
        return ()
    said = {key: own for key, own in arguments.items() if not pads_on_load or key != _PADDING}
    return contradictions(family, arguments=said, shapes=shapes)


def check_recorded(
    family: Family,
    arguments: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    *,
    pads_on_load: bool,
) -> None:
    """Raise MalformedError naming every recorded size that is not that of the tensors put together.

    `where`: the checkpoint, for the message; the rest as for `sizes_in_doubt`.
    """
    lines = sizes_in_doubt(family, arguments, shapes, pads_on_load=pads_on_load)
    if lines:
        raise MalformedError(
            f"expected the tensors of {where} to have the sizes that its arguments record; put together by the rules "
            f"of the family {family.name!r} they have not:\n{listed(lines)}\n"
            "The arguments were edited or are of another run: use another copy; or rules of your own (--patterns) "
            "join the wrong rows: mend them. Where the arguments are wrong and the tensors right, say the size under "
            "[given] in a rules file"
        )


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
