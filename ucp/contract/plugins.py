"""Installed plugins, which packages register as entry points. The built-in ones are registered in the same way.

Groups: `ucp.formats`, `ucp.targets`, `ucp.engines`, `ucp.patterns`: the name of the entry point is the name users type.
`ucp.families`: a package with a TOML file per model family (see `ucp.families`).
`ucp.live`: adapters that describe live runs of a framework (`ucp.live.adapters`).
`ucp.unread`: functions that take a path that no format reads, and say what it is and what to do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ucp.core.layout import Pattern
from ucp.errors import UsageError, nearest
from ucp.io.folder import names_in

if TYPE_CHECKING:
    from ucp.families.rule import PatternFactory


def producer() -> str:
    """This program and its version, e.g. "ucp 0.1.0"."""
    version = next((version for name, version, _ in _installed(tuple(sys.path)) if name == "universal_checkpoint"), "")
    return f"ucp {version or '(not installed)'}"


def entry_points(group: str) -> dict[str, str]:
    """Entry points that installed packages declare in a group: name to "module:attribute".

    They are those that `importlib.metadata` finds; importing that module alone would take longer.
    """
    declared = {}
    for _, _, folder in _installed(tuple(sys.path)):
        with suppress(OSError), open(os.path.join(folder, "entry_points.txt"), encoding="utf-8") as file:
            section = ""
            for line in map(str.strip, file):
                if line.startswith("["):
                    section = line.strip("[]")
                elif section == group and "=" in line and line[0] not in "#;":
                    name, _, value = line.partition("=")
                    declared[name.strip()] = value.partition("[")[0].strip()  # without extras
    return declared


@cache
def _installed(path: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Packages on Python's path (name, version, folder with the metadata), the first one of each name."""
    packages: dict[str, tuple[str, str, str]] = {}
    for folder in path:
        for entry in names_in(Path(folder or ".")):
            if entry.endswith((".dist-info", ".egg-info")):
                name, _, version = os.path.splitext(entry)[0].lower().partition("-")
                packages.setdefault(name, (name, version, os.path.join(folder, entry)))
    return list(packages.values())


@cache
def registered(group: str) -> dict[str, str]:
    """`entry_points`, read once."""
    return entry_points(group)


def names(group: str) -> tuple[str, ...]:
    """Names registered in one of the groups, e.g. `ucp.formats`."""
    return tuple(sorted(registered(group)))


@cache
def load(group: str, name: str) -> object:
    """Load what is registered under a name. Raises UsageError listing the registered names."""
    points = registered(group)
    if name not in points:
        known = ", ".join(sorted(points)) or "none: is universal-checkpoint installed?"
        targets = points if group == "ucp.targets" else ()
        called = (point for point in targets if name.lower() in getattr(load(group, point), "also_called", ()))
        near = next(called, None) or nearest(name, points)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UsageError(f"expected one of the {group.removeprefix('ucp.')} {known}; got {name!r}{hint}")
    module, _, attributes = points[name].partition(":")
    return reduce(getattr, filter(None, attributes.split(".")), import_module(module))


@cache
def instance(group: str, name: str) -> object:
    """An instance of the class registered under a name. Raises UsageError listing the registered names."""
    return cast("Callable[[], object]", load(group, name))()  # classes of a group take no required arguments


def pattern_factory(name: str) -> PatternFactory:
    """The factory of patterns with that name. Raises UsageError listing the registered names."""
    return cast("PatternFactory", load("ucp.patterns", name))  # what the group promises


def pattern(name: str, **fields: object) -> Pattern:
    """The pattern of that name with these fields. Raises UsageError listing the registered names.

    >>> pattern("shard", dim=0, blocks=(4, 2)).name
    'shard(dim=0, blocks=[4, 2])'
    """
    return pattern_factory(name)(**fields)


def describe_pattern(value: Pattern) -> tuple[str, dict[str, object]] | None:
    """Registered name of a pattern, and its fields that differ from their defaults; None if it is not registered.

    >>> describe_pattern(pattern("shard", dim=1))
    ('shard', {'dim': 1})
    """
    name = next((name for name in names("ucp.patterns") if load("ucp.patterns", name) is type(value)), None)
    if name is None or not is_dataclass(value):
        return None
    values = {
        item.name: getattr(value, item.name) for item in fields(value) if getattr(value, item.name) != item.default
    }
    return name, values
