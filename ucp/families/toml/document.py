"""What a rules file may hold, as structures that msgspec decodes; a mistake is a UsageError with its place in the file.

docs/reference/families.md says what each key means. Formulas are text, numbers and flags here; they become expressions
when rules are made of them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from ucp.core.text.typed import convert
from ucp.errors import UsageError
from ucp.families.expression import Expression
from ucp.families.naming import FamilyEvidence
from ucp.families.rule import Alias, OptionValue
from ucp.families.template import Template

T = TypeVar("T")

WholeNumber = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Dim = Annotated[int, Meta(ge=0, lt=64)]
Formula = bool | WholeNumber | str
Formulas = Formula | list[Formula]
Length = bool | Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)] | str
PatternOption = Formula | list[Formula]
AxisTable = str | dict[str, PatternOption]


class Joining(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How stored tensors join to one; the fields are those of `ucp.families.rule.Alias`."""

    dim: Dim = 0
    groups: Formula | None = None
    blocks: tuple[Length, ...] = ()
    lengths: tuple[Length, ...] = ()
    view: tuple[Length, ...] = ()
    views: tuple[tuple[Length, ...], ...] = ()
    order: tuple[Dim, ...] = ()
    orders: tuple[tuple[Dim, ...], ...] = ()


class AliasTable(Joining, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way to store a parameter: under one `name`, or several `names`."""

    name: str | None = None
    names: tuple[str, ...] = ()
    when: Formula | None = None
    alongside: tuple[str, ...] = msgspec.field(default=(), name="beside")


AliasWays = str | AliasTable | list[str | AliasTable]


class RuleTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule. The order of its axes is that in the dict from which it is decoded."""

    name: str
    when: Formula | None = None
    meaning: str = ""
    buffer: bool = False
    shape: tuple[Length, ...] = ()
    padded: Dim | None = None
    alias: dict[str, AliasWays] = {}
    pp: AxisTable | None = None
    ep: AxisTable | None = None
    etp: AxisTable | None = None
    tp: AxisTable | None = None
    cp: AxisTable | None = None
    dp: AxisTable | None = None


class TiedTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter with a second name."""

    name: str
    to: str
    when: Formula | None = None


class StyleTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way to write names."""

    like: str | None = None
    rewrite: dict[str, str | list[str]] = {}
    modules: str = ""
    has_all_names: bool = False


class ConfigTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the configuration of another framework; see `ucp.families.toml.config`."""

    when: str | None = None
    needs: tuple[str, ...] = ()
    equals: dict[str, object] = {}
    absent: dict[str, object] = {}
    fixed: dict[str, object] = {}
    must: tuple[str, ...] = ()
    keys: dict[str, Formulas] = {}
    floats: dict[str, Formulas] = {}
    flags: dict[str, Formulas] = {}


class FamilyDocument(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model family. `rule`: tables for `RuleTable`, kept as dicts because the order of their keys matters."""

    name: str
    title: str = ""
    extends: tuple[str, ...] = ()
    kind_of: tuple[str, ...] = ()
    abstract: bool = False
    order: tuple[str, ...] | None = None
    ignored: tuple[str, ...] = ()
    required: tuple[str, ...] | None = None
    evidence: FamilyEvidence = FamilyEvidence()
    sizes: dict[str, Formulas] = {}
    constants: dict[str, bool | WholeNumber] = msgspec.field(default_factory=dict, name="given")
    limits: dict[str, Formula] = {}
    tensors: dict[str, str] = {}
    style: dict[str, StyleTable] = {}
    tied: tuple[TiedTable, ...] = ()
    rule: tuple[dict[str, object], ...] = ()
    drop: tuple[str, ...] = ()
    alias: dict[str, dict[str, AliasWays]] = {}
    repeat: tuple[dict[str, str | dict[str, str]], ...] = ()
    config: dict[str, tuple[ConfigTable, ...]] = {}


class RenameTable(Joining, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule of the user that renames tensors; one of the two sides may be several names."""

    old: str | list[str] = msgspec.field(name="from")
    new: str | list[str] = msgspec.field(name="to")


class RenameDocument(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file for `--rename`."""

    rename: Annotated[tuple[RenameTable, ...], Meta(min_length=1)]
    sizes: dict[str, bool | WholeNumber] = {}


@lru_cache(maxsize=256)
def read_document(text: str, source: str, kind: type[T]) -> T:
    """The TOML document `text` of the file `source` as a `kind`. Raises UsageError."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{source}: expected a TOML file of rules; {error}. docs/reference/families.md says what one holds"
        ) from error
    with error_context(source):
        return convert(document, kind)


@contextmanager
def error_context(place: str) -> Iterator[None]:
    """Adds `place` to errors raised inside: ValueErrors and UsageErrors become UsageErrors."""
    try:
        yield
    except (ValueError, UsageError) as error:
        raise UsageError(f"{place}: {error}") from error


def make_expression(formula: Formula) -> Expression:
    """A formula as an expression; true and false are 1 and 0. Raises ExpressionError, a ValueError."""
    return Expression(formula if isinstance(formula, str) else str(int(formula)))


def make_expressions(formulas: Formulas) -> tuple[Expression, ...]:
    """Alternative formulas for a value as expressions, in order."""
    return tuple(map(make_expression, formulas if isinstance(formulas, list) else [formulas]))


def make_option(value: PatternOption) -> OptionValue:
    """An option of a pattern: a number, an expression, or several of these."""
    return make_lengths(value) if isinstance(value, list) else make_lengths([value])[0]


def make_lengths(values: Sequence[Formula]) -> tuple[int | Expression, ...]:
    """Lengths as numbers and expressions."""
    return tuple(Expression(value) if isinstance(value, str) else int(value) for value in values)


def make_aliases(tables: AliasWays) -> tuple[Alias, ...]:
    """Ways to store a parameter. An empty list: the style has no such buffer. Raises ValueError."""
    return tuple(
        make_alias((table,), Joining())
        if isinstance(table, str)
        else make_alias(
            table.names or ((table.name,) if table.name is not None else ()),
            table,
            when=table.when,
            alongside=table.alongside,
        )
        for table in (tables if isinstance(tables, list) else [tables])
    )


def make_alias(
    names: tuple[str, ...], how: Joining, *, when: Formula | None = None, alongside: tuple[str, ...] = ()
) -> Alias:
    """The alias of stored tensors of these names. Raises ValueError."""
    if not names:
        raise ValueError("expected a name, or names")
    for name in (*names, *alongside):
        if "{=" not in name and "+=" not in name:
            Template(name)
    for key in ("lengths", "views", "orders"):
        entries = getattr(how, key)
        if entries and len(entries) != len(names):
            raise ValueError(f"{key}: expected one entry for each of {', '.join(names)}; got {len(entries)}")
    for order in (how.order, *how.orders):
        if sorted(order) != list(range(len(order))):
            raise ValueError(f"order: expected every dim once; got {list(order)}")
    return Alias(
        names=names,
        dim=how.dim,
        groups=None if how.groups is None else make_expression(how.groups),
        blocks=make_lengths(how.blocks),
        view=make_lengths(how.view),
        order=how.order,
        views=tuple(map(make_lengths, how.views)),
        orders=how.orders,
        lengths=make_lengths(how.lengths),
        when=None if when is None else make_expression(when),
        alongside=alongside,
    )
