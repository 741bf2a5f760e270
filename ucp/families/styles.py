"""Which naming style a checkpoint uses, if several styles store different elements under the same name.

1. A name is contested if two styles arrange the same parameter differently under it: nanoGPT's `c_attn.weight` is
   [out, in], that of GPT-2 in Hugging Face [in, out].
2. Every style that has all names is compared with the shapes that the rules state (`shape_conflicts`). The shapes of
   the whole model decide, because a square matrix fits both.

Pure values: names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ucp.errors import FamilyError, format_list
from ucp.families.expression import Expression
from ucp.families.family import Family, distinct_shapes
from ucp.families.naming import CANONICAL, ParsedName
from ucp.families.rule import Alias, OptionValue

_Lengths = tuple[int | None, ...]
"""Length of every dim; None for one that is not known."""


def find_source_style(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The style of the names of a model; None if all styles that have the names arrange the parameters alike.

    `family`: bound to the model. `shapes`: of global tensors, by name in any style. Raises FamilyError if no style has
    the shapes, or several that store different elements.
    """
    few_shapes = {name: shape for name, shape in distinct_shapes(shapes).items() if not family.ignores(name)}
    styles = (CANONICAL, *family.styles)
    readings = {style: {name: _arrangement(family, name, style) for name in few_shapes} for style in styles}
    contested = [
        name
        for name in few_shapes
        if len({readings_of_style[name] for readings_of_style in readings.values()} - {None}) > 1
    ]
    if not contested:
        return None
    fitting: dict[tuple[object, ...], str] = {}
    conflicts: list[str] = []
    for style in (style for style in styles if None not in readings[style].values()):
        problem = next(shape_conflicts(family, few_shapes, style), None)
        if problem is None:
            fitting.setdefault(tuple(readings[style][name] for name in contested), style)
        else:
            conflicts.append(f"{style}: {problem}")
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    raise FamilyError(_describe_undecided(family, contested[0], list(fitting.values()), conflicts))


def shape_conflicts(family: Family, shapes: Mapping[str, tuple[int, ...]], style: str) -> Iterator[str]:
    """A line for every kind of tensor of `style` whose shape is not that of its rule.

    `family`: bound to the model. Dims whose lengths do not follow from its sizes and names without a rule are skipped.
    """
    for name, shape in distinct_shapes(shapes).items():
        named = next(family.readings(name, style), None)
        lengths = None if named is None else _stored_lengths(family, named)
        if lengths is None:
            continue
        same_dims = len(lengths) == len(shape)
        if not same_dims or any(known not in (None, length) for known, length in zip(lengths, shape, strict=True)):
            expected = ", ".join("any" if known is None else str(known) for known in lengths)
            yield f"{name} is {list(shape)}, expected [{expected}]"


def _arrangement(family: Family, name: str, style: str) -> tuple[object, ...] | None:
    """What a name of a style stands for, and how its elements are arranged; None if the style has no such name."""
    named = next(family.readings(name, style), None)
    if named is None:
        return None
    alias = named.alias or Alias(names=(named.rule.name.text,))
    bare = replace(alias, names=("",) * len(alias.names), when=None, alongside=())
    return named.canonical, named.part, named.stacked, bare


def _stored_lengths(family: Family, named: ParsedName) -> _Lengths | None:
    """Shape of a stored tensor by its rule; None if the rule states none, or the tensor is viewed in another shape."""
    stated = {
        rule.shape for rule in family.rules if rule.name == named.rule.name and family.holds(rule.when) is not False
    }
    if len(stated) != 1 or not (shape := stated.pop()):
        return None
    lengths = [_length(option, family.values) for option in shape]
    unknown: list[int | None] = [None] * len(named.stacked)
    alias = named.alias
    if alias is None:
        return (*unknown, *lengths)
    if alias.view or alias.views:
        return None
    if len(alias.names) > 1:
        joined = lengths[alias.dim]
        part_length = None if joined is None else joined // len(alias.names)
        lengths[alias.dim] = _length(alias.lengths[named.part], family.values) if alias.lengths else part_length
    lengths = [*unknown, *lengths]
    order = (alias.orders[named.part] if alias.orders else alias.order) or range(len(lengths))
    return tuple(length for _, length in sorted(zip(order, lengths, strict=True), key=lambda pair: pair[0]))


def _length(option: OptionValue, values: Mapping[str, object]) -> int | None:
    if isinstance(option, Expression):
        return option.try_value(values)
    return option if isinstance(option, int) and option >= 0 else None


def _describe_undecided(family: Family, name: str, fitting: list[str], conflicts: list[str]) -> str:
    if not fitting:
        why = f":\n{format_list(conflicts)}" if conflicts else ", and no style has all of the names"
        return (
            f"several styles of {family.name!r} store different elements under names such as {name}, and the shapes "
            f"fit none of them{why}\nIs the config.json, or a --set, that of another model? Else choose another family "
            "(--family)"
        )
    return (
        f"several styles of {family.name!r} store different elements under names such as {name}, and the shapes fit "
        f"more than one: {' and '.join(fitting)}. Take the whole model, without --include and --exclude, or name the "
        f"style of the source before the colon: --names {fitting[0]}:STYLE or {fitting[1]}:STYLE"
    )
