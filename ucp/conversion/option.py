"""An option, and the checked values that options take: each parser accepts the forms of Python and of the shell.

>>> str(parse_part("3/8")), str(parse_part((1, 2)))
('3/8', '1/2')
>>> str(find_slurm_part({"SLURM_PROCID": "2", "SLURM_NTASKS": "8"}))
'3/8'
>>> array = {"ID": "14", "MIN": "10", "MAX": "16", "STEP": "2", "COUNT": "4"}
>>> str(find_slurm_part({f"SLURM_ARRAY_TASK_{key}": text for key, text in array.items()}))
'3/4'
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import index
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, TypeVar

from ucp.contract.protocols import ParamOrder, ParamOrderLike
from ucp.core.tensor import DType
from ucp.core.topology import PlacesExperts, Topology
from ucp.errors import UsageError
from ucp.io.folder import parse_path
from ucp.transfer.plan.tasks import Share

if TYPE_CHECKING:
    import torch

T = TypeVar("T", bound=StrEnum)

type_path = str | PathLike[str]
"""A path."""
if TYPE_CHECKING:
    DtypeLike: TypeAlias = str | DType | torch.dtype
else:
    DtypeLike = str | DType | object  # torch is not imported for a type hint
"""A dtype: "bfloat16", "bf16", torch.bfloat16."""
TopologyLike = Topology | str | Mapping[str, int]
"""A run: ucp.Topology(dp=4, zero=3), "dp=4,zero=3", {"dp": 4, "zero": 3}."""
MemoryLike = int | str
"""Memory: bytes, or text like "512M", "1GiB" (powers of 1024), "2GB" (powers of 1000)."""
PartLike = str | tuple[int, int]
"""A part: "3/8" or (3, 8), counted from 1; "auto": the part that Slurm's variables name."""

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE)
"""Number, prefix, "iB" or "B". Examples: 512M, 1.5GiB, 2GB, 1073741824."""
_EXPONENTS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_PART = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*")
"""Example: 3/8."""

_ARRAY = "SLURM_ARRAY_TASK_"


def parse_step(step: SupportsIndex) -> int:
    """A training step: a whole number of any type. Raises UsageError."""
    try:
        number = -1 if isinstance(step, bool) else index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise UsageError(f"expected a training step, a whole number of 0 or more; got {step!r}")
    return number


def parse_memory(memory: MemoryLike) -> int:
    """Bytes of an amount of memory. Raises UsageError.

    >>> parse_memory("1.5G"), parse_memory("2GB"), parse_memory(4096)
    (1610612736, 2000000000, 4096)
    """
    match = _MEMORY.fullmatch(memory.strip()) if isinstance(memory, str) else None
    if match is not None:
        number, prefix, unit = match.groups()
        base = 1000 if unit in {"B", "b"} else 1024
        memory = int(float(number) * base ** _EXPONENTS[prefix.upper()])
    if not isinstance(memory, int) or isinstance(memory, bool) or memory <= 0:
        raise UsageError(f"expected an amount of memory such as 512M or 2GiB, or bytes, above 0; got {memory!r}")
    return memory


def parse_iteration(iteration: int | str) -> int | None:
    """A training step; None for "newest". Raises UsageError."""
    if iteration == "newest":
        return None
    if isinstance(iteration, str) and iteration.isascii() and iteration.isdigit() and len(iteration) < 19:
        iteration = int(iteration)
    if not isinstance(iteration, int) or isinstance(iteration, bool) or iteration < 0:
        raise UsageError(f"expected an iteration as a whole number, or newest; got {iteration!r}")
    return iteration


def parse_share(share: float | str) -> float:
    """A proportion from 0 to 1. Raises UsageError."""
    try:
        number = float(share)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(share, bool) or not 0 <= number <= 1:
        raise UsageError(f"expected a proportion from 0 to 1, such as 0.0375; got {share!r}")
    return number


def parse_workers(workers: int) -> int:
    """A number of workers. Raises UsageError."""
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise UsageError(f"expected a number of workers, 1 or more, or None for the default; got {workers!r}")
    return workers


def parse_topology(topology: object) -> Topology:
    """A topology. Raises UsageError."""
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, Mapping):
        return Topology.parse(",".join(f"{axis}={degree}" for axis, degree in topology.items()))
    if not isinstance(topology, str):
        raise UsageError(f"expected a topology as ucp.Topology, a dict, or text like dp=4,zero=3; got {topology!r}")
    return Topology.parse(topology)


def parse_placement(placement: object) -> PlacesExperts | Path:
    """A placement, or the path of a file with one. Raises UsageError."""
    return placement if isinstance(placement, PlacesExperts) else path_parser("placement")(placement)  # type: ignore[arg-type]  # checked there


def take_placement(values: dict[str, Any]) -> dict[str, Any]:
    """The values of options, with the placement of a topology as an option of its own. Raises UsageError for two."""
    topology: Topology | None = values.get("topology")
    if topology is None or topology.placement is None:
        return values
    if "placement" in values:
        raise UsageError("expected one placement, as placement= or in the topology; got both")
    return {**values, "topology": replace(topology, placement=None), "placement": topology.placement}


def choice_parser(choices: type[T], argument: str) -> Callable[[str], T]:
    """A parser of the name of a choice, passed as `argument`, which raises UsageError for any other text."""

    def parse_choice(name: str) -> T:
        if name not in set(choices):
            several = "one of " if len(set(choices)) > 1 else ""
            raise UsageError(f"expected {argument} to be {several}{', '.join(choices)}; got {name!r}")
        return choices(name)

    return parse_choice


def switch_parser(argument: str) -> Callable[[object], bool]:
    """A parser of True and False, which raises UsageError for anything else: a text like "no" would count as true."""

    def parse_switch(value: object) -> bool:
        if not isinstance(value, bool):
            raise UsageError(f"expected {argument} to be True or False; got {value!r}")
        return value

    return parse_switch


def text_parser(argument: str) -> Callable[[str], str]:
    """A parser of the text passed as `argument`, which raises UsageError."""

    def parse_text(value: str) -> str:
        if not isinstance(value, str):
            raise UsageError(f"expected the argument {argument!r} to be text; got {value!r}")
        return value

    return parse_text


def parse_tag(tag: str) -> str:
    """A tag. Raises UsageError."""
    if not (isinstance(tag, str) and tag):
        raise UsageError(f"expected a tag such as global_step100; got {tag!r}")
    return tag


def path_parser(argument: str, parse: Callable[[type_path], Path] = Path) -> Callable[[type_path], Path]:
    """A parser of the path passed as `argument`, which raises UsageError. `parse`: makes a `Path` from a text."""

    def parse_value(value: type_path) -> Path:
        if not isinstance(value, str | PathLike):
            raise UsageError(f"expected a path as {argument}; got {value!r}")
        return parse(value)

    return parse_value


def parse_dtype(dtype: object) -> DType | None:
    """The floating dtype of that name; None for anything else."""
    named = DType.from_name(str(dtype))
    return named if named is not None and named.is_floating else None


def parse_dtypes(dtypes: Mapping[str, DtypeLike] | None) -> dict[str, str]:
    """State to the name of its dtype. Raises UsageError."""
    if not isinstance(dtypes or {}, Mapping):
        raise UsageError(f"expected dtypes by state, as in {{'weight': 'bfloat16'}}; got {dtypes!r}")
    names: dict[str, str] = {}
    for state, value in (dtypes or {}).items():
        dtype = parse_dtype(value)
        if dtype is None:
            known = ", ".join(member.value for member in DType if member.is_floating)
            raise UsageError(f"expected STATE=DTYPE with a dtype of {known}; got {state}={value}")
        names[state] = dtype.value
    return names


def parse_settings(settings: Mapping[str, str | int | float] | None) -> dict[str, str]:
    """Name to value as text, as on the command line. Raises UsageError."""
    settings = settings or {}
    if not isinstance(settings, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str | int | float) for name, value in settings.items()
    ):
        raise UsageError(
            f"expected settings by name, as in {{'num_attention_heads': 32}}, each a text or a number; got {settings!r}"
        )
    return {name: str(value) for name, value in settings.items()}


def parse_globs(globs: Iterable[str]) -> tuple[str, ...]:
    """Several globs, or one. Raises UsageError."""
    if isinstance(globs, str):
        return (globs,)
    several = tuple(globs) if isinstance(globs, Iterable) else (globs,)
    if not all(isinstance(glob, str) for glob in several):
        raise UsageError(f"expected globs over names as text, as in ['*/weight']; got {globs!r}")
    return several


def parse_param_order(names: ParamOrderLike) -> Path | ParamOrder:
    """Names of parameters by group, or the file that lists them. Raises UsageError."""
    if isinstance(names, str | PathLike):
        return parse_path(names)
    if isinstance(names, Sequence):
        groups = [names] if all(isinstance(name, str) for name in names) else names
        if all(isinstance(group, list | tuple) and all(isinstance(name, str) for name in group) for group in groups):
            return tuple(tuple(map(str, group)) for group in groups)
    raise UsageError(f"expected param_order as a path, a list of names, or one for each group; got {names!r}")


def parse_part(value: PartLike) -> Share:
    """A part of the work; for "auto", the part that Slurm assigns to this process. Raises UsageError."""
    if value == "auto":
        return find_slurm_part(os.environ)
    match = _PART.fullmatch(value) if isinstance(value, str) else None
    numbers = tuple(map(int, match.groups())) if match else value
    match numbers:
        case (int(number), int(parts)) if 1 <= number <= parts and not isinstance(numbers, str):
            return Share(number, parts)
    raise UsageError(f"expected a part K/N such as 3/8, with K from 1 to N, or auto; got {value!r}")


def find_slurm_part(environment: Mapping[str, str]) -> Share:
    """The part of a process that Slurm started: a task of a step (`srun`), of a job array, or of a step in an array.

    In an array, the tasks of a step count only inside a step: the batch script itself runs once, whatever SLURM_NTASKS
    says. Variables: manual pages of sbatch (job arrays) and srun. Raises UsageError.
    """
    number, parts = 0, 1
    is_array = f"{_ARRAY}ID" in environment
    if is_array:
        index, first, last, step, parts = (
            _parse_variable(environment, _ARRAY + name) for name in ("ID", "MIN", "MAX", "STEP", "COUNT")
        )
        if not step or last != first + (parts - 1) * step or (index - first) % step or not first <= index <= last:
            raise UsageError(
                f"expected a job array of evenly spaced indexes, as of --array=1-8; got index {index} among {parts} "
                f"from {first} to {last} in steps of {step}. Name the part: --part $SLURM_ARRAY_TASK_ID/N"
            )
        number = (index - first) // step
    if not is_array or "SLURM_STEP_ID" in environment:
        task, tasks = (_parse_variable(environment, f"SLURM_{name}") for name in ("PROCID", "NTASKS"))
        if not task < tasks:
            raise UsageError(
                f"expected SLURM_PROCID below SLURM_NTASKS; got {task} of {tasks}. Name the part: --part K/N"
            )
        number, parts = number * tasks + task, parts * tasks
    return Share(number + 1, parts)


def _parse_variable(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        got = f"{name}={text}" if name in environment else f"no {name}"
        raise UsageError(
            f"expected variables of Slurm for --part auto; got {got}. Start it with srun or in a job array, or name "
            "the part: --part K/N"
        )
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How an option is spelled, what values it takes, and what it decides."""

    name: str = ""
    """Argument of functions; set by `ucp.conversion.options.OPTIONS`."""
    flag: str = ""
    """Flag of the command line; by default the name with dashes."""
    alternative: str = ""
    """Another spelling of the flag."""
    metavar: str | None = None
    """The value on a help page; None for a flag without value, or with one of `choices`."""
    help: str
    """What it does."""
    python: str = ""
    """The help for the argument of Python functions, if it takes other forms."""
    comparing: str = ""
    """The help for `verify` and `diff`, if the option means something else there."""
    parse: Callable[[Any], object] = bool
    """Makes the field's value from the argument, or raises UsageError."""
    choices: type[StrEnum] | None = None
    """All values, if they are few."""
    repeats: bool = False
    """Whether it can be given several times on the command line."""
    shown: str = ""
    """The default on a help page."""
    identity: str = ""
    """Name in messages that compare two conversions; empty if the option does not affect what is written."""
    default: object = None
    """Default of the argument; set by `OPTIONS`."""

    def parse_argument(self, argument: object) -> object:
        """The field's value. Raises UsageError for an argument of another kind."""
        return (switch_parser(self.name) if isinstance(self.default, bool) else self.parse)(argument)

    @property
    def in_python(self) -> str:
        """The argument as a Python user writes it, for the note below a message.

        >>> Option(name="fsync", help="", default=True).in_python
        'fsync=False'
        """
        is_map = self.parse in {parse_dtypes, parse_settings}
        value = not self.default if isinstance(self.default, bool) else "{...}" if is_map else "..."
        return f"{self.name}={value}"


def option(text: str, /, *, default: Any = None, **more: Any) -> Any:
    """A dataclass field with that default and an `Option` as metadata; its type is that of the parsed value."""
    arguments: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return field(**arguments, metadata={"option": Option(help=text, **more)})
