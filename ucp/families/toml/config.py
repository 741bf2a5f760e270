"""Makes the configuration with which another framework loads a model from what a run recorded, by tables of a family.

    [[config.huggingface]]
    when = "use_rope_scaling"                         # condition for this part; if left out, it always applies
    needs = ["not rotary_interleaved"]                # unless these hold, the framework has no such model
    equals = { norm_epsilon = 1e-6 }                  # unless arguments have these values, it has none either
    absent = { rotary_interleaved = false }           # values for arguments that older versions lack
    fixed = { model_type = "llama" }
    keys = { num_attention_heads = "heads" }          # whole numbers, texts and lists, unchanged; "None" gives null
    floats = { "rope_parameters.rope_theta" = "rotary_base" }
    flags = { tie_word_embeddings = "tied" }
    must = ["activation_function"]                    # keys for which some part with a condition must give a value

Values are sizes of the model and recorded arguments, or expressions over them; of several, the first that can be
computed is used. A key with a dot names an entry of a nested object. Later parts override earlier ones. Nothing is
guessed: values that are not recorded are reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ucp.families.expression import Expression, ExpressionError
from ucp.families.toml.document import ConfigTable, make_expression, make_expressions

_NULL = "None"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigPart:
    """Part of a configuration."""

    when: Expression | None = None
    """Condition for it; None for always."""
    needs: tuple[Expression, ...] = ()
    """Conditions without which the other framework has no such model."""
    equals: Mapping[str, object] = field(default_factory=dict)
    """Argument to the only value for which the other framework has such a model."""
    absent: Mapping[str, object] = field(default_factory=dict)
    """Argument to the value that it has in runs of versions without it."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Key to value."""
    keys: Mapping[str, tuple[str, tuple[Expression, ...]]] = field(default_factory=dict)
    """Key to kind (keys, floats, flags), and the ways to find its value."""
    must: tuple[str, ...] = ()
    """Keys that some part must give."""
    family: str = ""
    """Family that defines it."""


def make_part(table: ConfigTable, family: str) -> ConfigPart:
    """The part that a table of `family` describes. Raises ExpressionError, a ValueError."""
    kinds = {"keys": table.keys, "floats": table.floats, "flags": table.flags}
    return ConfigPart(
        when=None if table.when is None else _condition(table.when),
        needs=tuple(map(_condition, table.needs)),
        equals=table.equals,
        absent=table.absent,
        fixed=table.fixed,
        keys={
            key: (kind, make_expressions(formulas))
            for kind, expressions in kinds.items()
            for key, formulas in expressions.items()
        },
        must=table.must,
        family=family,
    )


def _condition(text: str) -> Expression:
    """An expression whose value is 1 or 0, even if that of `text` is not a number (an argument that is None)."""
    return make_expression(f"not not ({text})")


def merge_parts(
    first: Mapping[str, tuple[ConfigPart, ...]], then: Mapping[str, tuple[ConfigPart, ...]]
) -> dict[str, tuple[ConfigPart, ...]]:
    """Parts of both configurations; a part that several families inherit from the same one is kept once."""
    parts = {style: [*first.get(style, ()), *then.get(style, ())] for style in (*first, *then)}
    return {
        style: tuple(part for number, part in enumerate(parts_of_style) if part not in parts_of_style[:number])
        for style, parts_of_style in parts.items()
    }


def build_config(
    parts: Sequence[ConfigPart], values: Mapping[str, object]
) -> tuple[dict[str, object], tuple[str, ...]]:
    """The configuration, and a line for each reason why it cannot be made.

    `values`: sizes and recorded arguments by name.

    >>> way = {"n": ("keys", (Expression("heads"),)), "rope.theta": ("floats", (Expression("base"),))}
    >>> build_config([ConfigPart(keys=way)], {"heads": 8, "base": 10000})
    ({'n': 8, 'rope': {'theta': 10000.0}}, ())
    >>> build_config([ConfigPart(keys=way, needs=(Expression("heads == 4"),))], {"heads": 8})[1]
    ('heads == 4: heads = 8', 'rope.theta: base is not recorded')
    """
    known = {key: value for part in parts for key, value in part.absent.items()} | dict(values)
    flat: dict[str, object] = {}
    lines: list[str] = []
    for part in parts:
        if part.when is None or _holds(part.when, known):
            lines += (
                f"{condition.text.removeprefix('not not (').removesuffix(')')}: {_describe(condition, known)}"
                for condition in part.needs
                if not _holds(condition, known)
            )
            lines += (
                f"{name} == {value!r}: {_describe(Expression(name), known)}"
                for name, value in part.equals.items()
                if known.get(name) != value
            )
            flat |= part.fixed
            lines += _filled(part, known, flat)
    for key in dict.fromkeys(key for part in parts for key in part.must if key not in flat):
        giving = (part.when for part in parts if part.when and (key in part.fixed or key in part.keys))
        unknown = sorted({name for when in giving for name in when.names if name not in known})
        lines.append(f"{key}: {', '.join(unknown)} not recorded")
    return _nested(flat), tuple(dict.fromkeys(lines))


def _filled(part: ConfigPart, known: Mapping[str, object], flat: dict[str, object]) -> Iterator[str]:
    """Put the keys of a part into `flat`; a line for each that has no value."""
    for key, (kind, expressions) in part.keys.items():
        try:
            flat[key] = _value(kind, expressions, known)
        except ExpressionError:
            flat.pop(key, None)
            yield f"{key}: {' or '.join(_describe(expression, known) for expression in expressions)}"


def _value(kind: str, expressions: Iterable[Expression], known: Mapping[str, object]) -> object:
    """The value of the first expression that has one. Raises ExpressionError if none has."""
    for expression in expressions:
        plain = known.get(expression.text)
        if expression.text == _NULL:
            return None
        try:
            value = expression.value(known) if plain is None else plain
        except ExpressionError:
            continue
        if kind == "flags":
            return bool(value)
        if kind == "keys" or isinstance(value, int | float):
            return float(value) if kind == "floats" and isinstance(value, int | float) else value
    raise ExpressionError("no value")


def _holds(condition: Expression, known: Mapping[str, object]) -> bool:
    return bool(condition.try_value(known))


def _describe(expression: Expression, known: Mapping[str, object]) -> str:
    """What is known of the names in an expression."""
    return ", ".join(
        f"{name} = {known[name]!r}"[:80] if known.get(name) is not None else f"{name} is not recorded"
        for name in sorted(expression.names)
    )


def _nested(flat: Mapping[str, object]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in flat.items():
        *heads, last = key.split(".")
        table = result
        for head in heads:
            below = table.setdefault(head, {})
            assert isinstance(below, dict)
            table = below
        table[last] = value
    return result
