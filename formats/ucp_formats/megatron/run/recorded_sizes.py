"""Whether the sizes that a checkpoint records are those of its tensors.

What a family's sizes are found from, arguments and shapes of tensors, must give one value: where they differ, the
arguments were edited, are of another run, or the rules joined the wrong rows. Which sizes these are is data of the
family (its [sizes]), so rules of the user's own are held against what the run recorded, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from ucp.errors import MalformedError, listed
from ucp.families.family import Family
from ucp.families.library import contradictions

__all__ = ["check_recorded", "sizes_in_doubt"]

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
