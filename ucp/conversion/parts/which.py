"""Which part of a conversion this process is: as it is told, or as Slurm says.

>>> str(part_of("3/8")), str(part_of((1, 2)))
('3/8', '1/2')
>>> str(slurm_part({"SLURM_PROCID": "2", "SLURM_NTASKS": "8"}))
'3/8'
>>> array = {"MIN": "10", "MAX": "16", "STEP": "2", "COUNT": "4"}
>>> str(slurm_part({"SLURM_ARRAY_TASK_ID": "14"} | {f"SLURM_ARRAY_TASK_{key}": own for key, own in array.items()}))
'3/4'
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ucp.errors import UsageError
from ucp.transfer.plan.tasks import Share

PartLike = str | tuple[int, int]
"""A part: "3/8" or (3, 8), counted from 1; "auto" where Slurm says which."""

AUTO = "auto"

_PART = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*")
"""Example: 3/8."""

_ARRAY = "SLURM_ARRAY_TASK_"


def part_of(asked: PartLike) -> Share:
    """The part that is asked for. Raises UsageError for what is none, and where Slurm does not say."""
    if asked == AUTO:
        return slurm_part(os.environ)
    match = _PART.fullmatch(asked) if isinstance(asked, str) else None
    numbers = tuple(map(int, match.groups())) if match else asked
    match numbers:
        case (int(number), int(parts)) if 1 <= number <= parts and not isinstance(numbers, str):
            return Share(number, parts)
    raise UsageError(f"expected a part K/N such as 3/8, with K from 1 to N, or auto; got {asked!r}")


def slurm_part(environment: Mapping[str, str]) -> Share:
    """The part of a process that Slurm started: a task of a step (`srun`), of a job array, or of a step in an array.

    In an array the tasks of a step count only where there is a step: a batch script itself runs once, whatever
    SLURM_NTASKS says. Variables: manual pages of sbatch (job arrays) and srun. Raises UsageError.
    """
    is_array = f"{_ARRAY}ID" in environment
    number, parts = _array_task(environment) if is_array else (0, 1)
    if not is_array or "SLURM_STEP_ID" in environment:
        task, tasks = (_number(environment, f"SLURM_{name}") for name in ("PROCID", "NTASKS"))
        if not task < tasks:
            raise UsageError(
                f"expected SLURM_PROCID below SLURM_NTASKS; got {task} of {tasks}. Say which part: --part K/N"
            )
        number, parts = number * tasks + task, parts * tasks
    return Share(number + 1, parts)


def _array_task(environment: Mapping[str, str]) -> tuple[int, int]:
    """Position of a task in a job array, and their number; indexes with gaps say neither."""
    own, first, last, step, count = (
        _number(environment, _ARRAY + name) for name in ("ID", "MIN", "MAX", "STEP", "COUNT")
    )
    if not step or last != first + (count - 1) * step or (own - first) % step or not first <= own <= last:
        raise UsageError(
            f"expected a job array of evenly spaced indexes, as of --array=1-8; got index {own} among {count} from "
            f"{first} to {last} in steps of {step}. Say which part: --part $SLURM_ARRAY_TASK_ID/N"
        )
    return (own - first) // step, count


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        found = f"{name}={text}" if name in environment else f"no {name}"
        raise UsageError(
            f"expected variables of Slurm for --part auto; got {found}. Start it with srun or in a job array, or say "
            "which part: --part K/N"
        )
    return int(text)
