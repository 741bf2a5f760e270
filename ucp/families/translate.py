"""The tensors of a model under the names of another style: a recipe for each.

1. `_to_canonical` joins tensors that the source splits and unstacks those that it stacks: one per canonical name.
2. `_to_style` splits and stacks these as the requested style does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from ucp.core.region import Box, RegionPair
from ucp.errors import FamilyError, UnsupportedError, format_list
from ucp.families.expression import ExpressionError, UnknownNameError
from ucp.families.family import Family
from ucp.families.naming import CANONICAL, ParsedName
from ucp.families.recipes import TensorRecipe
from ucp.families.rule import Alias, JoinedBox
from ucp.families.template import Template

_REMEDY = "Take the whole model, without --include and --exclude, or choose another family with --family"


class _Unit(NamedTuple):
    """Stored tensors that join to a canonical tensor, or to a stack of these."""

    alias: Alias
    """How they are joined."""
    names: tuple[str, ...]
    """Stored names, in the order in which they join."""


@dataclass(frozen=True, slots=True)
class _CanonicalTensor:
    """A tensor under its canonical name."""

    recipe: TensorRecipe
    """What it is made of."""
    unit: _Unit
    """Its unit in the source."""


def translate(
    family: Family, shapes: Mapping[str, tuple[int, ...]], style: str, *, source: str | None = None
) -> dict[str, TensorRecipe]:
    """Recipes for the tensors of a model under the names of `style`, made of those in `shapes`.

    Ignored names are left out, and buffers that the style does not have. `family`: bound to the model. `source`: style
    of the names in `shapes`; None for any. Raises FamilyError with all names without a rule, or without a name in
    `style`; UnsupportedError for missing parts of tensors, and for other shapes than the family expects.
    """
    units = _units(family, shapes, source)
    if style == CANONICAL:
        canonical = _to_canonical(family, units, shapes)
        return {name: canonical[name].recipe for name in family.sort_canonical(canonical)}
    spellings = (
        (unit, () if named.stacked else family.find_spellings(named.canonical, style)) for named, unit in units
    )
    unchanged = {unit: None for unit, known in spellings if known and _Unit(*known[0]) == unit}
    canonical = _to_canonical(family, [(named, unit) for named, unit in units if unit not in unchanged], shapes)
    recipes = {name: TensorRecipe.identity(name, shapes[name]) for unit in unchanged for name in unit.names}
    return recipes | _to_style(family, canonical, shapes, style)


def _units(family: Family, shapes: Mapping[str, tuple[int, ...]], source: str | None) -> list[tuple[ParsedName, _Unit]]:
    """Units of the source, each with its first name as parsed. Raises UnsupportedError if a part is missing."""
    parts_by_tensor: dict[tuple[str, Alias], list[tuple[ParsedName, str]]] = {}
    for name, named in _parse_names(family, shapes, source):
        alias = named.alias or Alias(names=(named.rule.name.text,))
        parts_by_tensor.setdefault((named.canonical, alias), []).append((named, name))
    units = []
    problems = []
    for (canonical, alias), parts in parts_by_tensor.items():
        parts.sort(key=lambda part: part[0].part)
        unit = _Unit(alias, tuple(name for _, name in parts))
        units.append((parts[0][0], unit))
        if [named.part for named, _ in parts] != list(range(len(alias.names))):
            problems.append(f"{canonical}: {', '.join(unit.names)} of {', '.join(alias.names)}")
    if problems:
        raise _parts_error(family, problems)
    return units


def _to_canonical(
    family: Family, units: Iterable[tuple[ParsedName, _Unit]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, _CanonicalTensor]:
    tensors: dict[str, _CanonicalTensor] = {}
    problems = []
    for named, unit in units:
        for name, recipe in _join_unit(family, unit, named, shapes):
            if name in tensors:
                problems.append(f"{name}: {', '.join((*tensors[name].unit.names, *unit.names))}")
            tensors[name] = _CanonicalTensor(recipe, unit)
    if problems:
        raise _parts_error(family, problems)
    return tensors


def _parts_error(family: Family, problems: Sequence[str]) -> UnsupportedError:
    return UnsupportedError(
        f"expected every tensor that makes up a parameter of {family.name!r}, once; "
        f"got\n{format_list(problems)}\n{_REMEDY}"
    )


def _parse_names(family: Family, names: Iterable[str], source: str | None) -> Iterator[tuple[str, ParsedName]]:
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
            f"no rule of {family.name!r} knows these names{f' in {source}' if source else ''}:\n{format_list(without)}"
        )


def _join_unit(
    family: Family, unit: _Unit, named: ParsedName, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, TensorRecipe]]:
    """Canonical tensors of a unit, with their names."""
    if named.alias is None and not named.stacked and 0 not in shapes[unit.names[0]]:  # usually: stored as it is named
        yield named.canonical, TensorRecipe.identity(unit.names[0], shapes[unit.names[0]])
        return
    alias, depth = unit.alias, len(named.stacked)
    try:
        views = [alias.unpack(part, shapes[name], depth, family.values) for part, name in enumerate(unit.names)]
        stacks = {view.shape[:depth] for view in views}
        if len(stacks) > 1 or any(len(lengths) < depth for lengths in stacks):
            raise ValueError(f"expected {', '.join(named.stacked)} as leading dims, of equal lengths")
        if any(0 in lengths for lengths in stacks):
            raise ValueError("the stack is empty")
        inner = [view.shape[depth:] for view in views]
        if alias.lengths:
            alias.check_lengths(inner, family.values)
        pairs = _pairs(alias, inner, family.values)
    except (ValueError, ExpressionError) as error:
        raise _misfit_error(family, [f"{name} {list(shapes[name])}" for name in unit.names], error) from error
    shape = tuple(map(max, zip(*(pair.global_box.stops for pair in pairs), strict=True)))
    dims, steps = tuple(range(depth, depth + len(shape))), (1,) * len(shape)
    for index in product(*map(range, views[0].shape[:depth])):
        targets = [
            RegionPair.strided(pair.global_box, "", (*index, *pair.local.offsets), dims, steps) for pair in pairs
        ]
        patches = tuple(
            region._replace(source=unit.names[pair.tensor])
            for pair, patch in zip(pairs, targets, strict=True)
            for inner in views[pair.tensor].patches
            if (region := patch.after(inner)) is not None
        )
        fields = {**named.fields, **dict(zip(named.stacked, index, strict=True))}
        yield named.rule.name.filled(fields), TensorRecipe(shape, patches)


def _pairs(alias: Alias, shapes: Sequence[tuple[int, ...]], values: Mapping[str, object]) -> Sequence[JoinedBox]:
    """Where the tensors of an alias lie in the joined tensor."""
    if len(shapes) == 1 and alias.groups is None and not alias.blocks:
        return (JoinedBox(0, Box.full(shapes[0]), Box.full(shapes[0])),)
    other_dims = {(*shape[: alias.dim], *shape[alias.dim + 1 :]) for shape in shapes}
    if len(other_dims) > 1 or any(len(shape) <= alias.dim or not shape[alias.dim] for shape in shapes):
        raise ValueError(f"expected shapes that differ only in dim {alias.dim}, and none that is empty there")
    return alias.locate_parts(shapes, values)


def _to_style(
    family: Family, canonical: Mapping[str, _CanonicalTensor], shapes: Mapping[str, tuple[int, ...]], style: str
) -> dict[str, TensorRecipe]:
    units: dict[_Unit, dict[tuple[int, ...], str]] = {}
    without: list[str] = []
    twice: list[str] = []
    for name, match in family.match(family.sort_canonical(canonical)).items():
        spellings = family.find_spellings(name, style)
        if not spellings:
            without += [] if family.is_left_out(match.rules[0], style) else [name]
            continue
        alias, names = spellings[0]
        stacked = [field for field in match.rules[0].name.fields if field not in Template(alias.names[0]).fields]
        members = units.setdefault(_Unit(alias, names), {})
        if members.setdefault(tuple(match.fields[field] for field in stacked), name) != name:
            twice += names
    if without:
        raise FamilyError(
            f"the family {family.name!r} has no name in the style {style!r} for\n{format_list(without)}\n"
            f"give them one in a rules file of your own ([alias.{style}], --patterns my.toml), or leave them out "
            "(--exclude)"
        )
    counts = Counter(name for unit in units for name in unit.names)
    twice += [name for name, count in counts.items() if count > 1]
    if twice:
        raise FamilyError(f"several tensors would have these names in the style {style!r}:\n{format_list(twice)}")
    recipes: dict[str, TensorRecipe] = {}
    for unit, members in units.items():
        if all(canonical[name].unit == unit for name in members.values()):  # the source has the same stack
            recipes |= {stored: TensorRecipe.identity(stored, shapes[stored]) for stored in unit.names}
        else:
            recipes |= _split_unit(family, unit, members, {name: canonical[name].recipe for name in members.values()})
    return recipes


def _split_unit(
    family: Family, unit: _Unit, members: Mapping[tuple[int, ...], str], canonical: Mapping[str, TensorRecipe]
) -> dict[str, TensorRecipe]:
    """Recipes for the tensors of a unit, made of canonical ones. `members`: stack indexes to canonical name."""
    alias = unit.alias
    counts = tuple(1 + max(numbers) for numbers in zip(*members, strict=True))
    inner = {recipe.shape for recipe in canonical.values()}
    if prod(counts) != len(members) or len(inner) > 1:
        raise UnsupportedError(
            f"expected all {prod(counts)} tensors that make {', '.join(unit.names)}, of one shape; got\n"
            f"{format_list(f'{name} {list(recipe.shape)}' for name, recipe in canonical.items())}\n{_REMEDY}"
        )
    (shape,) = inner
    try:
        parts = alias.part_shapes(shape, family.values)
        pairs = _pairs(alias, parts, family.values)
        packed = [alias.pack(n, (*counts, *part), len(counts), family.values) for n, part in enumerate(parts)]
    except (ValueError, ExpressionError) as error:
        raise _misfit_error(
            family, [f"{' and '.join(recipe.sources)}, {list(recipe.shape)}," for recipe in canonical.values()], error
        ) from error
    ones = (1,) * len(counts)
    dims, steps = (*(None for _ in counts), *range(len(shape))), ones + (1,) * len(shape)
    recipes = {}
    for number, (name, recipe) in enumerate(zip(unit.names, packed, strict=True)):
        targets = [
            RegionPair.strided(Box((*index, *local.offsets), (*ones, *local.sizes)), member, start, dims, steps)
            for index, member in sorted(members.items())
            for local, start in ((pair.local, pair.global_box.offsets) for pair in pairs if pair.tensor == number)
        ]
        recipes[name] = TensorRecipe(recipe.shape, tuple(_follow(recipe.patches, targets, canonical)))
    return recipes


def _follow(
    outer: Iterable[RegionPair], targets: Sequence[RegionPair], canonical: Mapping[str, TensorRecipe]
) -> Iterator[RegionPair]:
    """Patches of a stored tensor, followed down to the tensors of the source."""
    for patch in outer:
        for inner in targets:
            outer_region = patch.after(inner)
            for last in () if outer_region is None else canonical[outer_region.source].patches:
                region = None if outer_region is None else outer_region.after(last)
                if region is not None:
                    yield region


def _misfit_error(family: Family, tensors: Sequence[str], error: Exception) -> FamilyError:
    if isinstance(error, UnknownNameError):
        names = [str(way) for way in family.sizes.get(str(error), ()) if str(way).isidentifier()] or [str(error)]
        others = {str(way) for size, ways in family.sizes.items() if size != str(error) for way in ways}
        alone = [name for name in names if name not in others] or names
        shared = [name for name in names if name not in alone]
        why = f"nothing records how many {error} the model has. Pass --set {alone[0]}=N"
        why += f" (or {', '.join(alone[1:])})" if alone[1:] else ""
        why += f" and --set {shared[0]}=N; the latter is enough if both are equal" if shared else ""
    elif not family.source:  # rules of the user's own
        why = f"{error}. Correct the rule (dim, groups, blocks, lengths, view, order)"
    else:
        why = (
            f"{error}. Pass sizes that are not recorded with --set (num_query_groups, ...); if the names are those of "
            "another style, name it (--names nanogpt:huggingface); or choose another family (--family)"
        )
    return FamilyError(f"{', '.join(tensors)} cannot be renamed by {family.name}: {why}")
