"""Signatures, help and errors of the public functions that take options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter, cleandoc, get_annotations, signature
from operator import attrgetter
from textwrap import fill
from typing import Literal, ParamSpec, TypedDict, TypeVar

from ucp.contract.protocols import ParamOrderLike
from ucp.conversion.option import DtypeLike, MemoryLike, Option, PartLike, TopologyLike, type_path
from ucp.conversion.options import OPTIONS
from ucp.core.topology import PlacesExperts
from ucp.errors import UcpError, nearest

P = ParamSpec("P")
R = TypeVar("R")

ZeroMomentsName = Literal["error", "keep"]
AcceptName = Literal["equal-ranks", "missing-layers", "moment-shapes", "config", "experts", "layout"]


class SourceArguments(TypedDict, total=False):
    """Options of `open`, `inspect` and `patterns check`, and their types; see `ConvertOptions` for their meaning."""

    family: str | None
    patterns: type_path | None
    shapes_from: type_path | None
    param_order: ParamOrderLike | None
    at: int | str | None
    exact: bool
    max_plt: float | None


class CompareArguments(SourceArguments, total=False):
    """Options of `verify` and `diff`."""

    include: Iterable[str]
    exclude: Iterable[str]
    weights: bool
    workers: int | None
    memory: MemoryLike


class VerifyArguments(CompareArguments, total=False):
    """Options of `verify`."""

    accept: Iterable[AcceptName]


class ExpertArguments(SourceArguments, total=False):
    """Options of `experts`."""

    workers: int | None
    memory: MemoryLike


class LoadArguments(SourceArguments, total=False):
    """Options of `load_into`."""

    settings: Mapping[str, str | int | float] | None
    names: str | None
    zero_moments: ZeroMomentsName
    accept: Iterable[AcceptName]
    memory: MemoryLike


class PlanArguments(LoadArguments, total=False):
    """Options of `plan`."""

    to: str
    topology: TopologyLike | None
    placement: PlacesExperts | type_path | None
    layout: str
    virtual: bool
    compress: bool
    include: Iterable[str]
    exclude: Iterable[str]
    dtypes: Mapping[str, DtypeLike] | None
    rename: type_path | None
    drift: Literal["error", "first", "mean"]
    step: Literal["error", "newest"]
    optimizer: Literal["zero"] | None
    tag: str | None
    companions: Literal["small", "all", "none"]
    engine: str | None
    workers: int | None
    scratch: type_path | None


class ConvertArguments(PlanArguments, total=False):
    """Options of `convert`."""

    resume: bool
    overwrite: bool
    fsync: bool
    verify: bool
    part: PartLike | None
    finalize: bool


_TYPES: dict[str, str] = {
    name: annotation.__forward_arg__
    for arguments in (CompareArguments, ConvertArguments)
    for name, annotation in get_annotations(arguments).items()
}
"""Argument to its type, as `help` shows it."""
_FLAG = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*")
"""Example: --zero-moments."""
_PLACE = "\nOPTIONS\n"
"""The line of a docstring that is replaced by explanations of the options that the docstring lacks."""


def list_options(arguments: type[SourceArguments]) -> list[Option]:
    """The options that are among `arguments`, in the order of help pages."""
    return [option for name, option in OPTIONS.items() if name in get_annotations(arguments)]


def takes_options(arguments: type[SourceArguments]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show the options of `arguments` in the signature and docstring of a function, in place of its `**options`.

    An error about a misspelt argument suggests the nearest one, and an error that names options of the command line
    gets a note with the Python arguments.

    >>> @takes_options(SourceArguments)
    ... def open(path, **options): ...
    >>> open("ckpt", famly="llama")
    Traceback (most recent call last):
    TypeError: ucp.open() has no argument 'famly'; did you mean 'family'?
    """
    names = {option.flag: f"`{option.name}`" for option in OPTIONS.values()}

    def explained(option: Option) -> str:
        """The explanation of an option in a docstring: its help, with the arguments in place of the flags."""
        text = _FLAG.sub(lambda match: names.get(match.group(), match.group()), option.python or option.help)
        return f"{option.name}\n{fill(text, 112, initial_indent='    ', subsequent_indent='    ')}"

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        *parameters, _ = signature(function).parameters.values()
        parameters += [
            Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default, annotation=_TYPES[option.name])
            for option in list_options(arguments)
        ]
        shown = signature(function).replace(parameters=sorted(parameters, key=attrgetter("kind")))
        known = list(shown.parameters)
        flags = {option.flag: option for option in OPTIONS.values() if option.name in known}

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - {*known}:
                near = nearest(name, known)
                hint = f"did you mean {near!r}?" if near else f"it has {', '.join(known)}"
                raise TypeError(f"ucp.{function.__name__}() has no argument {name!r}; {hint}")
            try:
                return function(*args, **kwargs)
            except UcpError as error:
                named = [flag for flag in dict.fromkeys(_FLAG.findall(str(error))) if flag in flags]
                if named:
                    spelled = ", ".join(f"{flag} is {flags[flag].in_python}" for flag in named)
                    error.add_note(f"In Python: {spelled}")
                raise

        vars(checked)["__signature__"] = shown
        text = cleandoc(checked.__doc__ or "")
        more = [explained(option) for option in list_options(arguments) if f"\n{option.name}\n" not in text]
        checked.__doc__ = text.replace(_PLACE, "\n".join(("", *more, "")))
        return checked

    return decorate
