"""Names in a family: by which it is recognised, how styles write them, and what a stored name stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from msgspec import Struct

from ucp.errors import UsageError, format_count, format_list
from ucp.families.expression import Expression
from ucp.families.rule import Alias, Rule
from ucp.families.template import MOST_SHIFT, Template

CANONICAL = "mcore"
"""The style of the names that rules are written in."""


class FamilyEvidence(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a family is recognised."""

    names: tuple[str, ...] = ()
    """Templates, each of which must match a name of the checkpoint."""
    absent: tuple[str, ...] = ()
    """Templates that must match no name."""
    arguments: dict[str, object] = {}
    """Values that recorded arguments must have, where they are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """A way to write the names of the same parameters."""

    name: str
    """E.g. "te", "torch_dist", "huggingface"."""
    like: str | None = None
    """Style whose names are used for rules without a name in this one; if None, these have no name in this style."""
    rewrite: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Part of a template to its replacements; the first is the one that is written."""
    modules: tuple[str, ...] = ()
    """Segments of its names, in the order in which modules register them; empty if that is not known."""
    has_all_names: bool = False
    """Whether a model has a parameter under each of the names that a rule gives it, not only under the first."""

    def sort_names(self, names: Iterable[str]) -> list[str] | None:
        """Names in the order in which the model registers its parameters; None unless it is known for all of them."""
        places = {module: place for place, module in enumerate(self.modules)}
        keys: dict[str, list[int]] = {}
        for name in names:
            parts = name.split(".")
            if not all(part in places or part.isdecimal() for part in parts):
                return None
            keys[name] = [int(part) if part.isdecimal() else places[part] for part in parts]
        return sorted(keys, key=keys.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """A parameter that is another one under a second name."""

    name: str
    """Second name."""
    to: str
    """Name it is stored under."""
    when: Expression | None
    """Condition on the model; None for always."""


class ParsedName(NamedTuple):
    """What a stored name stands for."""

    rule: Rule
    """Rule of the parameter, or the first of several."""
    canonical: str
    """Canonical name; fields in `stacked` are left open."""
    fields: Mapping[str, int]
    """Numbers found in the name."""
    stacked: tuple[str, ...]
    """Fields that count leading dims of the stored tensor, outermost first."""
    part: int
    """Number of this tensor among those that join to the canonical tensor; 0 if it is the only one."""
    alias: Alias | None
    """How they join, or None for the canonical name itself."""
    style: str
    """Style of the stored name."""

    def global_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shape of a canonical tensor in a stored one of `shape`, in a list; empty if the shape alone does not tell."""
        alias = self.alias
        if alias is not None and (len(alias.names) > 1 or alias.view or alias.order):
            return []
        return [tuple(shape[len(self.stacked) :])]

    @property
    def alongside(self) -> tuple[str, ...]:
        """Canonical names; the model has one of them if the stored name stands for this parameter."""
        return (
            ()
            if self.alias is None
            else tuple(Template(template).filled(self.fields) for template in self.alias.alongside)
        )


def describe_ambiguity(name: str, candidates: Sequence[ParsedName], confirmed: Sequence[ParsedName]) -> str:
    """Why it is not known which of `candidates` a name stands for, and what to do.

    `confirmed`: candidates for which the checkpoint has one of the names in `alongside`.
    """
    texts = [
        candidate.canonical + (f" (beside {' or '.join(candidate.alongside)})" if candidate.alongside else "")
        for candidate in candidates
    ]
    rules = "give the name to one of them in a rules file of your own (--patterns)"
    if not any(candidate.alongside for candidate in candidates):
        either = " or ".join(texts)
        return f"{name} can be {either}, and nothing tells which. Choose another family with --family, or {rules}"
    seen = (
        f"such neighbours of {' and of '.join(candidate.canonical for candidate in confirmed)}"
        if confirmed
        else "none of these neighbours"
    )
    return (
        f"{name} can be {', or '.join(texts)}; the checkpoint has {seen}. Take the whole model, without --include and "
        f"--exclude, or {rules}"
    )


def describe_misfits(
    family: str,
    unmatched: Sequence[str],
    ambiguous: Sequence[str],
    beyond: Sequence[str],
    *,
    limits: Mapping[str, int],
) -> str:
    """Names that the rules of a family do not fit, and what to do.

    `beyond`: those of `unmatched` that have a rule, but a number of a layer outside `limits`.
    """
    parts, outside = [], set(beyond)
    if beyond:
        sizes = ", ".join(f"{limit} {field}s" for field, limit in limits.items())
        parts.append(
            f"{format_count(len(beyond), 'name does', 'names do')} not belong to a model of {sizes}, as config.json or "
            f"the arguments of the run describe it:\n{format_list(beyond)}\n"
            "If you passed a config.json (--set config=DIR), pass that of this model"
        )
    within = [name for name in unmatched if name not in outside]
    for names, count in ((within, "no rule"), (ambiguous, "two rules")):
        if names:
            have = format_count(len(names), "name has", "names have")
            parts.append(f"{have} {count} in the family {family!r}:\n{format_list(names)}")
    if within or ambiguous:
        parts.append(
            "choose another family with --family, or add rules of your own with --patterns my.toml "
            "(`ucp patterns check` shows which names have a rule)"
        )
    return "\n".join(parts)


class StoredName(NamedTuple):
    """A name under which a style stores a rule's parameters, or a part of them."""

    template: Template
    """The name."""
    rule: Rule
    """The rule."""
    alias: Alias | None
    """How several tensors join to the parameter, or None for the canonical name."""
    part: int
    """Number of the tensor among these."""
    style: str
    """The style."""


_COMPUTED = re.compile(r"(?:\{|\+)=([^}]*)\}")
"""A number in an alias that is computed from sizes: `{=layers + 4}.weight`, or `{mtp+=layers}` beside a field."""


def rewrite_names(
    names: tuple[str, ...], style: Style, values: Mapping[str, int], source: str
) -> list[tuple[str, ...]]:
    """The names of an alias in every spelling of `style`; none if a size is unknown. `source`: rules file.

    Raises UsageError for a rewrite that gives no valid name.
    """
    filled = [name for name in (_fill_computed(name, values) for name in names) if name is not None]
    if len(filled) < len(names):
        return []
    choices = [
        [(part, replacement) for replacement in replacements]
        for part, replacements in style.rewrite.items()
        if any(part in name for name in filled)
    ]
    results = []
    for choice in product(*choices):
        spelling = filled
        for part, replacement in choice:
            try:
                spelling = [Template(name.replace(part, replacement)).text for name in spelling]
            except ValueError as error:
                where = f"{source}: style: {style.name}: rewrite: {part}"
                raise UsageError(f"{where}: {error}, from {', '.join(map(repr, spelling))}") from error
        results.append(tuple(spelling))
    return results


def _fill_computed(name: str, values: Mapping[str, int]) -> str | None:
    """The name with its computed numbers; None if a size is unknown, or no name can have such a number."""
    for text in _COMPUTED.findall(name) if "=" in name else ():
        value = Expression(text).try_value(values)
        if value is None or not 0 <= value <= MOST_SHIFT:
            return None
        name = name.replace("{=" + text + "}", str(value)).replace("+=" + text + "}", f"+{value}}}")
    return name


def positions_of(templates: Iterable[str]) -> dict[tuple[str, ...], int]:
    """Path of a module or parameter, as templates write it, to its position in the order of first mention."""
    positions: dict[tuple[str, ...], int] = {}
    for text in templates:
        path = tuple(text.split("."))
        for stop in range(1, len(path) + 1):
            positions.setdefault(path[:stop], len(positions))
    return positions


def order_key(template: str, name: str, positions: Mapping[tuple[str, ...], int]) -> list[tuple[int, int]]:
    """Sort key. For each segment of a name, the position of its module, and its number if the template has a field.

    Without a name, all numbers are 0.
    """
    path = tuple(template.split("."))
    segments = name.split(".") if name else ["0"] * len(path)
    return [
        (positions[path[: depth + 1]], int(segment) if path[depth].startswith("{") else 0)
        for depth, segment in enumerate(segments)
    ]


Table = Mapping[tuple[str | None, str], tuple[StoredName, ...]]
"""Style (None: any) and outline of a name, to the entries that may match it."""

_MOST = 4
"""Tables that are kept: for the family as it was read, and for the last models that it was bound to."""


class Tables:
    """Tables by the sizes of the model: all copies of a family agree in everything else that names depend on."""

    __slots__ = ("_by_sizes",)

    def __init__(self) -> None:
        self._by_sizes: dict[frozenset[tuple[str, int]], Table] = {}

    def __reduce__(self) -> tuple[type[Tables], tuple[()]]:
        return Tables, ()

    def get(self, values: Mapping[str, int], entries: Iterable[StoredName]) -> Table:
        """The table for these sizes. `entries`: read only if the table has to be made."""
        key = frozenset(values.items())
        table = self._by_sizes.pop(key, None)
        if table is None:
            table = _table(entries)
        while len(self._by_sizes) >= _MOST:
            self._by_sizes.pop(next(iter(self._by_sizes)))
        self._by_sizes[key] = table  # now the newest one
        return table


def _table(entries: Iterable[StoredName]) -> Table:
    entries_by_key: dict[tuple[str | None, str], dict[tuple[Template, Template], StoredName]] = {}
    for entry in entries:
        for key_style in (entry.style, None):  # key None: any style
            alike = entries_by_key.setdefault((key_style, entry.template.outline), {})
            alike.setdefault((entry.template, entry.rule.name), entry)
    return {key: tuple(alike.values()) for key, alike in entries_by_key.items()}
