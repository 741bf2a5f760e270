"""Which parameters are frozen, where the user says it: `--set frozen=GLOB,...`, or `none`.

DeepSpeed and Megatron leave frozen parameters (`requires_grad=False`) out of their optimizers, and fail to load what
counts them in. torch lists them in groups like any other and records nothing of it. A reader takes those without
states for frozen where others have theirs; one that is trained and never got a gradient looks the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from ucp.core.index import AtomIndex, Index, Kind
from ucp.core.names import WEIGHT
from ucp.errors import UsageError, listed

__all__ = ["FROZEN", "with_frozen"]

FROZEN = "frozen"
"""Setting that every target takes: globs of the parameters that are frozen."""
_NONE = "none"


def with_frozen(index: Index, settings: Mapping[str, str]) -> tuple[Index, Mapping[str, str]]:
    """`index` with just the parameters frozen that --set frozen names, and the other settings. Raises UsageError."""
    if FROZEN not in settings:
        return index, settings
    globs = [] if settings[FROZEN] == _NONE else settings[FROZEN].split(",")
    idle = [glob for glob in globs if not any(fnmatchcase(name, glob) for name in index.atoms)]
    if idle:
        raise UsageError(f"--set frozen: no parameter of {index.path} matches {', '.join(idle)}")
    frozen = {
        name
        for name, atom in index.atoms.items()
        if name in globs or (atom.kind is not Kind.BUFFER and any(fnmatchcase(name, glob) for glob in globs))
    }
    stepped = [name for name in index.atoms if name in frozen and index.atoms[name].states.keys() - {WEIGHT}]
    if stepped:
        raise UsageError(
            f"--set frozen: expected parameters without optimizer states; these were stepped:\n{listed(stepped)}"
        )
    grouped = {name for group in index.groups for name in group.params}
    atoms = {
        name: _as(atom, is_frozen=name in frozen, is_grouped=name in grouped) for name, atom in index.atoms.items()
    }
    others = {name: value for name, value in settings.items() if name != FROZEN}
    return replace(index, atoms=atoms), others


def _as(atom: AtomIndex, *, is_frozen: bool, is_grouped: bool) -> AtomIndex:
    """The parameter, frozen or not; what no group lists and nobody names stays as it is, as do buffers in a glob."""
    if is_frozen:
        return replace(atom, kind=Kind.FROZEN)
    return replace(atom, kind=Kind.PARAMETER) if is_grouped and atom.kind is not Kind.BUFFER else atom
