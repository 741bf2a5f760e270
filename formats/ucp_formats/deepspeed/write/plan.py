"""Putting the files of a target together: the plan, its casts, its notes, and the small files that name a tag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ucp.core.index import Index
from ucp.core.names import WEIGHT
from ucp.core.target import Literal, OutputFile, TargetPlan
from ucp.core.topology import Topology
from ucp.errors import counted
from ucp.io.torch_file.draft import Drafted
from ucp_formats.deepspeed.write.optimizer.groups import Group

__all__ = ["group_notes", "pointer_file", "target_plan"]


def target_plan(
    index: Index, drafted: Sequence[Drafted], *, notes: Iterable[str], topology: Topology | None = None
) -> TargetPlan:
    """The plan of all files, in the order given. `topology`: of the run that loads them, where only one can."""
    return TargetPlan(
        files=tuple(own.file for own in drafted),
        placements=tuple(place for own in drafted for place in own.placements),
        raw=tuple(copy for own in drafted for copy in own.raw),
        notes=tuple(dict.fromkeys(notes)),
        casts=_casts(index, drafted),
        topology=topology,
    )


def _casts(index: Index, drafted: Sequence[Drafted]) -> tuple[str, ...]:
    """One line per state and change of type, with the number of parameters concerned.

    The weights that the model computes with stand beside their masters, rounded: that loses nothing, and is no cast.
    A master that is made of such a weight, wider than the source has it, is one.
    """
    changed: dict[tuple[str, str, str], set[str]] = {}
    masters = {(p.slice.param, p.slice.dtype) for own in drafted for p in own.placements if p.slice.state == WEIGHT}
    for own in drafted:
        for place in own.placements:
            state = place.slice.state
            source = index.atoms[place.slice.param].states[state].dtype
            is_wider = place.slice.dtype.itemsize > source.itemsize
            beside = state == WEIGHT and (place.slice.param, source) in masters and not is_wider
            if source is not place.slice.dtype and not beside:
                changed.setdefault((state, source.value, place.slice.dtype.value), set()).add(place.slice.param)
    return tuple(
        f"{state}: {old} -> {new} in {counted(len(params), 'parameter')}"
        for (state, old, new), params in changed.items()
    )


def group_notes(groups: Sequence[Group]) -> tuple[str, ...]:
    """What was assumed of the states of flat groups."""
    lines = []
    missing = [name for group in groups for name in group.never_stepped()]
    if missing:
        lines.append(
            f"{counted(len(missing), 'parameter lacks', 'parameters lack')} "
            f"states that others of their group have ({missing[0]}, ...): those are "
            "zero, and the step count is the group's, as DeepSpeed has it for a parameter that was never stepped"
        )
    unsure = sorted({name for group in groups for name in group.scalars if not group.scalar(name).certain})
    if unsure:
        lines.append(
            f"{', '.join(unsure)}: the source keeps a tensor of its own per parameter, a flat group one for all: the "
            "first parameter's is taken"
        )
    return tuple(lines)


def pointer_file(path: str, tag: str) -> OutputFile:
    """A file at the root that names the tag to load."""
    return OutputFile(path=path, nbytes=len(tag.encode()), literals=(Literal(0, tag.encode()),))
