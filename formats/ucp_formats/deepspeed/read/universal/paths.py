"""Where `zero/` of a universal checkpoint keeps the states of a parameter, and which names have no place there.

DeepSpeed joins folder and name (`os.path.join(dir, "zero", name)`, runtime/base_optimizer.py and zero/stage3.py,
0.19.8), as its converter does: a name with "/" in it is a folder in a folder.

>>> state_path("global_step3", "experts/0.weight", "fp32")
'global_step3/zero/experts/0.weight/fp32.pt'
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from ucp.contract.output_names import check_named

__all__ = ["GLOBALS", "check_places", "state_path"]

GLOBALS = "optimizer_state.pt"
"""File in `zero/` beside the folders of parameters."""

_TAKEN_FOR_STATES = re.compile("(.+).pt")
"""What stages 1 and 2 search for in every entry of a parameter's folder, whose dot is any character
(checkpoint/universal_checkpoint.py, 0.19.8). Example: "prompt", which is taken for a file pro.pt."""


def state_path(tag: str, param: str, stem: str) -> str:
    """Path, relative to the destination, of a parameter's state; `stem`: of the file's name."""
    return f"{tag}/zero/{param}/{stem}.pt"


def check_places(tag: str, stems: Mapping[str, Collection[str]]) -> None:
    """Raise DestinationError, naming all of them, for parameters that no folder can be named after.

    `stems`: parameter to the stems of its files.
    """
    check_named(
        _paths(tag, stems),
        expected="names of parameters that can be folders (zero/<parameter>/<state>.pt)",
        remedy="rename them in the model, or write native files (--to deepspeed), which name no file after a parameter",
        taken=[f"{tag}/zero/{GLOBALS}"],
        faults=[*_states_with_folders(stems), *_nested_in_others(stems)],
    )


def _paths(tag: str, stems: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    for param, own in stems.items():
        for stem in own:
            yield param, state_path(tag, param, stem)


def _states_with_folders(stems: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """States whose file would lie in a folder of its own, where it would be another parameter's."""
    for param, own in stems.items():
        for stem in own:
            if "/" in stem:
                yield param, f"its state {stem!r} has a '/' in its name"


def _nested_in_others(stems: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """Parameters whose folder lies in that of another and is taken for a file of states there."""
    for param in stems:
        parts = param.split("/")
        for count in range(1, len(parts)):
            outer = "/".join(parts[:count])
            if outer in stems and _TAKEN_FOR_STATES.search(parts[count]):
                yield (
                    param,
                    f"DeepSpeed would take the folder {parts[count]!r} in that of {outer!r} for a file of states",
                )
