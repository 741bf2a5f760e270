"""Misspelt arguments of the public functions are named with the nearest argument there is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from ucp.errors import nearest

__all__ = ["suggest_arguments"]

P = ParamSpec("P")
R = TypeVar("R")


def suggest_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose TypeError for an unknown argument names the function and the nearest argument.

    >>> @suggest_arguments
    ... def load(*, topology=None): ...
    >>> load(topolgy="dp=2")
    Traceback (most recent call last):
    TypeError: ucp.load() has no argument 'topolgy'; did you mean 'topology'?
    """
    parameters = signature(function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - {*known}:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(known)}"
            raise TypeError(f"ucp.{function.__name__}() has no argument {name!r}; {hint}")
        return function(*args, **kwargs)

    return checked
