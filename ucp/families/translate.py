"""A model's tensors under the names of another style: which of them make up which, and how.

1. `_canonical` joins what the source keeps apart, and takes apart what it stacks: one tensor per canonical name.
2. `_styled` goes from there to the names of the style that is wanted, in the same way.

Pure values: shapes and patches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from ucp.core.region import Box, RegionPair
from ucp.errors import FamilyError, UnsupportedError, listed
from ucp.families.expression import ExpressionError, UnknownNameError
from ucp.families.family import Family
from ucp.families.naming import CANONICAL, ParsedName
from ucp.families.recipes import TensorRecipe
from ucp.families.rule import Alias, JoinedBox
from ucp.families.template import Template

_WHOLE = "Take the whole model, without --include and --exclude, or choose another family with --family"


class _Unit(NamedTuple):
    """Tensors that join to canonical ones: to one, or to a stack of them."""

    alias: Alias
    """How."""
    names: tuple[str, ...]
    """Stored names, in the order in which they join."""


@dataclass(frozen=True, slots=True)
class _Canonical:
    """A tensor of the model."""

    made: TensorRecipe
    """What it is made of."""
    unit: _Unit
    """Its unit in the source."""


def translate(
    family: Family, shapes: Mapping[str, tuple[int, ...]], style: str, *, source: str | None = None
) -> dict[str, TensorRecipe]:
    """Every tensor of a model in `style`, made of those whose `shapes` are given.

    Ignored names are left out, and buffers of which the style says that it has none.

    `family`: bound to the model. `source`: style of the names that are given; None for any.

    Raises
    ------
    FamilyError
        Names without a rule, or without a name in that style; all are named.
    UnsupportedError
        Tensors of which parts are missing, or that do not have the shapes that the family expects.
    """
    units = _units(family, shapes, source)
    if style == CANONICAL:
        whole = _canonical(family, units, shapes)
        return {name: whole[name].made for name in family.sort_canonical(whole)}
    ways = ((unit, () if named.stacked else family.find_spellings(named.canonical, style)) for named, unit in units)
    kept = {unit: None for unit, first in ways if first and _Unit(*first[0]) == unit}  # the style writes them so
    whole = _canonical(family, [own for own in units if own[1] not in kept], shapes)
    found = {name: TensorRecipe.identity(name, shapes[name]) for unit in kept for name in unit.names}
    return found | _styled(family, whole, shapes, style)


def _units(family: Family, shapes: Mapping[str, tuple[int, ...]], source: str | None) -> list[tuple[ParsedName, _Unit]]:
    """Tensors of the source that join, none of which is missing; each with what its first one stands for."""
    found: dict[tuple[str, Alias], list[tuple[ParsedName, str]]] = {}
    for name, named in _read(family, shapes, source):
        alias = named.alias or Alias(names=(named.rule.name.text,))
        found.setdefault((named.canonical, alias), []).append((named, name))
    units = []
    problems = []
    for (canonical, alias), parts in found.items():
        parts.sort(key=lambda own: own[0].part)
        unit = _Unit(alias, tuple(name for _, name in parts))
        units.append((parts[0][0], unit))
        if [named.part for named, _ in parts] != list(range(len(alias.names))):
            problems.append(f"{canonical}: {', '.join(unit.names)} of {', '.join(alias.names)}")
    if problems:
        raise _misparted(family, problems)
    return units


def _canonical(
    family: Family, units: Iterable[tuple[ParsedName, _Unit]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, _Canonical]:
    found: dict[str, _Canonical] = {}
    problems = []
    for named, unit in units:
        for name, made in _joined(family, unit, named, shapes):
            if name in found:
                problems.append(f"{name}: {', '.join((*found[name].unit.names, *unit.names))}")
            found[name] = _Canonical(made, unit)
    if problems:
        raise _misparted(family, problems)
    return found


def _misparted(family: Family, problems: Sequence[str]) -> UnsupportedError:
    return UnsupportedError(
        f"expected every tensor that makes up a parameter of {family.name!r}, once; got\n{listed(problems)}\n{_WHOLE}"
    )


def _read(family: Family, names: Iterable[str], source: str | None) -> Iterator[tuple[str, ParsedName]]:
    without = []
    for name in names:
        named = family.read(name, source)
        if named is not None:
            yield name, named
        elif not family.ignores(name):
            without.append(name)
    if without and source is None:
        family.match(without)  # raises, with all of them and what to do
    if without:
        raise FamilyError(
            f"no rule of {family.name!r} knows these names{f' in {source}' if source else ''}:\n{listed(without)}"
        )


def _joined(
    family: Family, unit: _Unit, named: ParsedName, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, TensorRecipe]]:
    """Canonical tensors of a unit."""
    if named.alias is None and not named.stacked and 0 not in shapes[unit.names[0]]:  # most: it has this name
        yield named.canonical, TensorRecipe.identity(unit.names[0], shapes[unit.names[0]])
        return
    alias, depth = unit.alias, len(named.stacked)
    try:
        seen = [alias.unpack(part, shapes[name], depth, family.values) for part, name in enumerate(unit.names)]
        stacks = {own.shape[:depth] for own in seen}
        if len(stacks) > 1 or any(len(own) < depth for own in stacks):
            raise ValueError(f"expected {', '.join(named.stacked)} as leading dims, of equal lengths")
        if any(0 in own for own in stacks):
            raise ValueError("there is none in the stack")
        inner = [own.shape[depth:] for own in seen]
        if alias.lengths:
            alias.check_lengths(inner, family.values)
        pairs = _pairs(alias, inner, family.values)
    except (ValueError, ExpressionError) as error:
        raise _misfit(family, [f"{name} {list(shapes[name])}" for name in unit.names], error) from error
    shape = tuple(map(max, zip(*(pair.global_box.stops for pair in pairs), strict=True)))
    dims, steps = tuple(range(depth, depth + len(shape))), (1,) * len(shape)
    for index in product(*map(range, seen[0].shape[:depth])):
        wanted = [RegionPair.strided(own.global_box, "", (*index, *own.local.offsets), dims, steps) for own in pairs]
        patches = tuple(
            found._replace(source=unit.names[pair.tensor])
            for pair, patch in zip(pairs, wanted, strict=True)
            for inner in seen[pair.tensor].patches
            if (found := patch.after(inner)) is not None
        )
        fields = {**named.fields, **dict(zip(named.stacked, index, strict=True))}
        yield named.rule.name.filled(fields), TensorRecipe(shape, patches)


def _pairs(alias: Alias, shapes: Sequence[tuple[int, ...]], values: Mapping[str, object]) -> Sequence[JoinedBox]:
    """Where the tensors of an alias lie in the one that they join to."""
    if len(shapes) == 1 and alias.groups is None and not alias.blocks:
        return (JoinedBox(0, Box.full(shapes[0]), Box.full(shapes[0])),)
    others = {(*own[: alias.dim], *own[alias.dim + 1 :]) for own in shapes}
    if len(others) > 1 or any(len(own) <= alias.dim or not own[alias.dim] for own in shapes):
        raise ValueError(f"expected shapes that agree but for dim {alias.dim}, where none is empty")
    return alias.locate_parts(shapes, values)


def _styled(
    family: Family, whole: Mapping[str, _Canonical], shapes: Mapping[str, tuple[int, ...]], style: str
) -> dict[str, TensorRecipe]:
    units: dict[_Unit, dict[tuple[int, ...], str]] = {}
    without: list[str] = []
    twice: list[str] = []
    for name, match in family.match(family.sort_canonical(whole)).items():
        ways = family.find_spellings(name, style)
        if not ways:
            without += [] if family.is_left_out(match.rules[0], style) else [name]
            continue
        alias, names = ways[0]
        stacked = [own for own in match.rules[0].name.fields if own not in Template(alias.names[0]).fields]
        members = units.setdefault(_Unit(alias, names), {})
        if members.setdefault(tuple(match.fields[own] for own in stacked), name) != name:
            twice += names
    if without:
        raise FamilyError(
            f"the family {family.name!r} has no name in the style {style!r} for\n{listed(without)}\n"
            f"give them one in a rules file of your own ([alias.{style}], --patterns my.toml), or leave them out "
            "(--exclude)"
        )
    counts = Counter(name for unit in units for name in unit.names)
    twice += [name for name, count in counts.items() if count > 1]
    if twice:
        raise FamilyError(f"several tensors would have these names in the style {style!r}:\n{listed(twice)}")
    found: dict[str, TensorRecipe] = {}
    for unit, members in units.items():
        if all(whole[name].unit == unit for name in members.values()):  # a stack, as it stands in the source
            found |= {own: TensorRecipe.identity(own, shapes[own]) for own in unit.names}
        else:
            found |= _stored(family, unit, members, {name: whole[name].made for name in members.values()})
    return found


def _stored(
    family: Family, unit: _Unit, members: Mapping[tuple[int, ...], str], whole: Mapping[str, TensorRecipe]
) -> dict[str, TensorRecipe]:
    """Tensors of a unit, out of the canonical ones that they hold."""
    alias = unit.alias
    counts = tuple(1 + max(numbers) for numbers in zip(*members, strict=True))
    inner = {own.shape for own in whole.values()}
    if prod(counts) != len(members) or len(inner) > 1:
        raise UnsupportedError(
            f"expected all {prod(counts)} tensors that make {', '.join(unit.names)}, of one shape; got\n"
            f"{listed(f'{name} {list(own.shape)}' for name, own in whole.items())}\n{_WHOLE}"
        )
    (shape,) = inner
    try:
        parts = alias.part_shapes(shape, family.values)
        pairs = _pairs(alias, parts, family.values)
        stored = [alias.pack(n, (*counts, *own), len(counts), family.values) for n, own in enumerate(parts)]
    except (ValueError, ExpressionError) as error:
        raise _misfit(
            family, [f"{' and '.join(own.sources)}, {list(own.shape)}," for own in whole.values()], error
        ) from error
    ones = (1,) * len(counts)
    dims, steps = (*(None for _ in counts), *range(len(shape))), ones + (1,) * len(shape)
    found = {}
    for number, (name, own) in enumerate(zip(unit.names, stored, strict=True)):
        seen = [
            RegionPair.strided(Box((*index, *own.offsets), (*ones, *own.sizes)), member, start, dims, steps)
            for index, member in sorted(members.items())
            for own, start in ((pair.local, pair.global_box.offsets) for pair in pairs if pair.tensor == number)
        ]
        found[name] = TensorRecipe(own.shape, tuple(_followed(own.patches, seen, whole)))
    return found


def _followed(
    outer: Iterable[RegionPair], seen: Sequence[RegionPair], whole: Mapping[str, TensorRecipe]
) -> Iterator[RegionPair]:
    """Patches of a stored tensor, down to the tensors of the source."""
    for patch in outer:
        for inner in seen:
            own = patch.after(inner)
            for last in () if own is None else whole[own.source].patches:
                found = None if own is None else own.after(last)
                if found is not None:
                    yield found


def _misfit(family: Family, tensors: Sequence[str], error: Exception) -> FamilyError:
    if isinstance(error, UnknownNameError):
        ways = [str(way) for way in family.sizes.get(str(error), ()) if str(way).isidentifier()] or [str(error)]
        why = f"nothing records how many {error} the model has. Say it: --set {ways[0]}=N"
        why += f" (or {', '.join(ways[1:])})" if ways[1:] else ""
    elif not family.source:  # rules of the user's own
        why = f"{error}. Correct the rule (dim, groups, blocks, lengths, view, order)"
    else:
        why = (
            f"{error}. Say with --set what is otherwise (num_query_groups, ...); if the names are those of another "
            "style, say which (--names nanogpt:huggingface); or choose another family (--family)"
        )
    return FamilyError(f"{', '.join(tensors)} cannot be brought to other names by {family.name}: {why}")
