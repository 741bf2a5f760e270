"""Values of options, in the forms that Python and the shell have for them, checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ucp.contract.protocols import ParamOrder, ParamOrderLike
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import UsageError
from ucp.io.folder import parse_path

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

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE)
"""Number, prefix, "iB" or "B". Examples: 512M, 1.5GiB, 2GB, 1073741824."""
_EXPONENTS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def nbytes_of(memory: MemoryLike) -> int:
    """Bytes of an amount of memory. Raises UsageError.

    >>> nbytes_of("1.5G"), nbytes_of("2GB"), nbytes_of(4096)
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


def workers_of(workers: int) -> int:
    """A number of workers. Raises UsageError."""
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise UsageError(f"expected a number of workers, 1 or more, or None for the default; got {workers!r}")
    return workers


def topology_of(topology: object) -> Topology:
    """A topology. Raises UsageError."""
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, Mapping):
        return Topology.parse(",".join(f"{axis}={degree}" for axis, degree in topology.items()))
    if not isinstance(topology, str):
        raise UsageError(f"expected a topology as ucp.Topology, a dict, or text like dp=4,zero=3; got {topology!r}")
    return Topology.parse(topology)


def choice_of(choices: type[T], what: str) -> Callable[[str], T]:
    """What gives the member of `choices` of a name, or raises UsageError; `what`: what it is, for the message."""

    def member(name: str) -> T:
        if name not in set(choices):
            raise UsageError(f"expected {what} of {', '.join(choices)}; got {name!r}")
        return choices(name)

    return member


def switch_of(argument: str) -> Callable[[object], bool]:
    """What gives the switch passed as `argument`, or raises UsageError: a text such as "no" would count as true."""

    def switch(value: object) -> bool:
        if not isinstance(value, bool):
            raise UsageError(f"expected {argument} to be True or False; got {value!r}")
        return value

    return switch


def text_of(argument: str) -> Callable[[str], str]:
    """What gives the text passed as `argument`, or raises UsageError."""

    def text(value: str) -> str:
        if not isinstance(value, str):
            raise UsageError(f"expected {argument} as text; got {value!r}")
        return value

    return text


def tag_of(tag: str) -> str:
    """A tag. Raises UsageError."""
    if not (isinstance(tag, str) and tag):
        raise UsageError(f"expected a tag such as global_step100; got {tag!r}")
    return tag


def path_of(argument: str, parse: Callable[[type_path], Path] = Path) -> Callable[[type_path], Path]:
    """What gives the path passed as `argument`, or raises UsageError; `parse`: what makes a path of it."""

    def path(value: type_path) -> Path:
        if not isinstance(value, str | PathLike):
            raise UsageError(f"expected a path as {argument}; got {value!r}")
        return parse(value)

    return path


def dtype_of(dtype: object) -> DType | None:
    """The floating dtype that is meant; None for any other value."""
    named = DType.from_name(str(dtype))
    return named if named is not None and named.is_floating else None


def dtypes_of(dtypes: Mapping[str, DtypeLike] | None) -> dict[str, str]:
    """State to the name of its dtype. Raises UsageError."""
    if not isinstance(dtypes or {}, Mapping):
        raise UsageError(f"expected dtypes by state, as in {{'weight': 'bfloat16'}}; got {dtypes!r}")
    names: dict[str, str] = {}
    for state, value in (dtypes or {}).items():
        dtype = dtype_of(value)
        if dtype is None:
            known = ", ".join(member.value for member in DType if member.is_floating)
            raise UsageError(f"expected STATE=DTYPE with a dtype of {known}; got {state}={value}")
        names[state] = dtype.value
    return names


def settings_of(settings: Mapping[str, str | int | float] | None) -> dict[str, str]:
    """Name to value as text, as the command line has it. Raises UsageError."""
    settings = settings or {}
    if not isinstance(settings, Mapping) or not all(
        isinstance(value, str | int | float) for value in settings.values()
    ):
        raise UsageError(
            f"expected settings by name, as in {{'num_attention_heads': 32}}, each a text or a number; got {settings!r}"
        )
    return {name: str(value) for name, value in settings.items()}


def globs_of(globs: Iterable[str]) -> tuple[str, ...]:
    """Several globs, or one. Raises UsageError."""
    if isinstance(globs, str):
        return (globs,)
    several = tuple(globs) if isinstance(globs, Iterable) else (globs,)
    if not all(isinstance(glob, str) for glob in several):
        raise UsageError(f"expected globs over names as text, as in ['*/weight']; got {globs!r}")
    return several


def param_order_of(names: ParamOrderLike) -> Path | ParamOrder:
    """Names of parameters by group, or the file that has them. Raises UsageError."""
    if isinstance(names, str | PathLike):
        return parse_path(names)
    if isinstance(names, Sequence):
        groups = [names] if all(isinstance(name, str) for name in names) else names
        if all(isinstance(group, list | tuple) and all(isinstance(name, str) for name in group) for group in groups):
            return tuple(tuple(map(str, group)) for group in groups)
    raise UsageError(f"expected param_order as a path, a list of names, or one for each group; got {names!r}")
