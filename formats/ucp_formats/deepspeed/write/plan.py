"""What a plan says of flat groups, and the small files that name a tag."""

from __future__ import annotations

from collections.abc import Sequence

from ucp.core.target import Literal, OutputFile
from ucp.errors import counted
from ucp_formats.deepspeed.write.optimizer.groups import Group

__all__ = ["group_notes", "pointer_file"]


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
    return OutputFile(path=path, nbytes=len(tag.encode()), literals=(Literal(0, tag.encode()),), is_pointer=True)
