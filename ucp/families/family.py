"""A model family: rules by name template, and how they apply to the names of a checkpoint.

1. `bind` finds the sizes and flags of one model from its recorded arguments and the shapes of its tensors.
2. `canonical` converts a name of any style to the family's own; `to_style` converts it back.
3. `match` finds the rule of every name, or raises with all names that have none, or two.
4. `Match.layout` makes the patterns, once degrees and shapes are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ucp.errors import FamilyError, UsageError, format_count
from ucp.families.expression import Expression
from ucp.families.match import Match
from ucp.families.naming import (
    CANONICAL,
    FamilyEvidence,
    ParsedName,
    StoredName,
    Style,
    Tables,
    Tied,
    describe_ambiguity,
    describe_misfits,
    order_key,
    positions_of,
    rewrite_names,
)
from ucp.families.rule import Alias, Rule
from ucp.families.template import Template, kind, outline
from ucp.families.toml.config import ConfigPart

_Spellings = tuple[tuple[Alias, tuple[Template, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Rules, sizes and names of one kind of model; `bind` fits it to one model."""

    name: str
    """E.g. "llama"."""
    title: str = ""
    """What it is, for people."""
    rules: tuple[Rule, ...] = ()
    """Rules, in the order in which the parameters are registered."""
    sizes: Mapping[str, tuple[Expression, ...]] = field(default_factory=dict)
    """Size or flag to the formulas for it, in order, over arguments, tensors, degrees and sizes before it."""
    constants: Mapping[str, int] = field(default_factory=dict)
    """Sizes and flags that all models of the family share."""
    limits: Mapping[str, Expression] = field(default_factory=dict)
    """Field to its exclusive upper bound, for styles that number other modules after these (MTP after the layers)."""
    tensors: Mapping[str, Template] = field(default_factory=dict)
    """Names in the formulas of `sizes` that stand for the shape of a tensor."""
    evidence: FamilyEvidence = field(default_factory=FamilyEvidence)
    """How it is recognised."""
    styles: Mapping[str, Style] = field(default_factory=dict)
    """Other ways to write the names."""
    configs: Mapping[str, tuple[ConfigPart, ...]] = field(default_factory=dict)
    """Style to the parts of the model configuration that its framework loads."""
    tied: tuple[Tied, ...] = ()
    """Parameters with two names."""
    ignored: tuple[str, ...] = ()
    """Suffixes of names that need no rule, because they are not parameters."""
    required: tuple[str, ...] = ()
    """Templates of the parameters that every layer of a model has, and the model itself; see `find_missing`."""
    order: tuple[str, ...] = ()
    """Name prefixes in registration order, where the order of the rules does not give it."""
    kind_of: tuple[str, ...] = ()
    """More general families, over which it is preferred."""
    abstract: bool = False
    """Whether it exists only for others to extend."""
    source: str = ""
    """File of its rules."""
    values: Mapping[str, int] = field(default_factory=dict)
    """Sizes and flags found by `bind`."""
    conflicts: tuple[str, ...] = ()
    """Contradictions between the model passed to `bind` and the constants of the family."""
    present_names: frozenset[str] = frozenset()
    """Canonical names of the model passed to `among` that tell ambiguous names apart."""
    _rules: Mapping[str, tuple[Rule, ...]] = field(init=False, repr=False, compare=False)
    _entries: dict[tuple[str | None, str], tuple[StoredName, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _spellings: dict[tuple[int, str], tuple[Rule, _Spellings]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Cache by the `id` of a rule, which is kept with the value, and the style."""
    _tables: Tables = field(init=False, repr=False, compare=False, default_factory=Tables)
    """Shared by the copies that are bound to models."""
    _limits: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rules: dict[str, list[Rule]] = {}
        for rule in self.rules:
            rules.setdefault(rule.name.outline, []).append(rule)
        object.__setattr__(self, "_rules", {key: tuple(alike) for key, alike in rules.items()})
        limits = {name: limit.try_value(self.values) for name, limit in self.limits.items()}
        object.__setattr__(self, "_limits", {name: limit for name, limit in limits.items() if limit is not None})

    def bind(
        self,
        *,
        arguments: Mapping[str, object] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        axes: Mapping[str, int] | None = None,
    ) -> Family:
        """This family with the sizes and flags of one model.

        `arguments`: as recorded. `shapes`: by name (any style): global ones, or local ones of a rank together with the
        degrees in `axes`.
        """
        known: dict[str, object] = {"tp": 1, "etp": 1, "ep": 1, "pp": 1, **(arguments or {}), **(axes or {})}
        known |= self._tensor_shapes(shapes or {})
        values = dict(self.constants)
        conflicts = []
        for name, formulas in self.sizes.items():
            results = ((formula, formula.try_value({**known, **values})) for formula in formulas)
            formula, value = next((result for result in results if result[1] is not None), (None, None))
            if value is not None and values.setdefault(name, value) != value:
                conflicts.append(f"{name} is {values[name]} in the family, {value} in the checkpoint ({formula})")
        return self._share_tables(replace(self, values=values, conflicts=tuple(conflicts)))

    def _share_tables(self, copy: Family) -> Family:
        object.__setattr__(copy, "_tables", self._tables)
        return copy

    def _tensor_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
        """Values for `sizes`: the shape that all tensors of a template have, and `has_NAME` as 1 or 0."""
        keys = {template.text: key for key, template in self.tensors.items()}
        shapes_by_key: dict[str, set[tuple[int, ...]]] = {}
        for name, shape in distinct_shapes(shapes).items() if keys else ():
            rules = self.rules_of(name)
            key = keys.get(rules[0].name.text) if len(rules) == 1 else None
            named = None if key is None else self.read(name)
            if named is not None and key is not None:
                shapes_by_key.setdefault(key, set()).update(named.global_shapes(shape))
        unique: dict[str, object] = {
            key: next(iter(seen_shapes)) for key, seen_shapes in shapes_by_key.items() if len(seen_shapes) == 1
        }
        return unique | {f"has_{key}": int(key in shapes_by_key) for key in keys.values() if shapes}

    def among(self, names: Iterable[str]) -> Family:
        """This family with all names of one model (any style), which decide between several rules for a name."""
        aliases = [alias for rule in self.rules for rule_aliases in rule.aliases.values() for alias in rule_aliases]
        telling = {template for alias in aliases for template in alias.alongside}
        present = {
            entry.rule.name.filled(fields)
            for name in (names if telling else ())
            for entry in self._find_entries(name, None)
            if entry.rule.name.text in telling and (fields := entry.template.fields_in(name)) is not None
        }
        return self._share_tables(replace(self, present_names=frozenset(present))) if telling else self

    def match(self, names: Iterable[str]) -> dict[str, Match]:
        """Rule of every canonical name that is not ignored.

        Raises FamilyError with all names that have no rule, and all that have two.
        """
        matches_by_name: dict[str, Match] = {}
        unmatched, ambiguous = [], []
        for name in names:
            if self.ignores(name):
                continue
            matches = self._match(name)
            if not matches:
                unmatched.append(name)
            elif len(matches) > 1:
                ambiguous.append(f"{name}: {' and '.join(str(match.rule) for match in matches)}")
            else:
                matches_by_name[name] = matches[0]
        if unmatched or ambiguous:
            beyond = [name for name in unmatched if self._is_beyond(name)]
            raise FamilyError(describe_misfits(self.name, unmatched, ambiguous, beyond, limits=self._limits))
        return matches_by_name

    def _match(self, name: str) -> list[Match]:
        """Matches of a name: one per rule whose condition holds, else one of all rules whose condition may hold."""
        holding: list[Rule] = []
        undecided: list[Rule] = []
        fields: Mapping[str, int] = {}
        for rule in self._rules.get(outline(name), ()):
            numbers = rule.name.fields_in(name)
            holds = None if numbers is None else self.holds(rule.when)
            if numbers is not None and holds is not False:
                fields = numbers
                (undecided if holds is None else holding).append(rule)
        if undecided and not holding:
            return [Match(name=name, rules=tuple(undecided), fields=fields, values=self.values)]
        return [Match(name=name, rules=(rule,), fields=fields, values=self.values) for rule in holding]

    def holds(self, when: Expression | None) -> bool | None:
        """Whether the condition of a rule holds for the model; None if unknown."""
        if when is None:
            return True
        value = when.try_value(self.values)
        return None if value is None else bool(value)

    def _is_beyond(self, name: str) -> bool:
        """Whether a name has a rule, but a number of a layer or an expert that the model does not have."""
        fields = (entry.template.fields_in(name) for entry in self._find_entries(name, None))
        return any(
            any(numbers.get(field, -1) >= limit for field, limit in self._limits.items())
            for numbers in fields
            if numbers is not None
        )

    def ignores(self, name: str) -> bool:
        """Whether a name is known not to be a parameter."""
        return name.endswith(self.ignored) if self.ignored else False

    def read(self, name: str, style: str | None = None) -> ParsedName | None:
        """A stored name, parsed; None if it is not a name of the style (None: of any style).

        Raises FamilyError if it can be two parameters and the other names do not tell (see `among`).
        """
        candidates: dict[str, ParsedName] = {}
        for named in self.readings(name, style):
            candidates.setdefault(named.canonical, named)
        if len(candidates) > 1:
            confirmed = [
                candidate for candidate in candidates.values() if self.present_names.intersection(candidate.alongside)
            ]
            if len(confirmed) != 1:
                raise FamilyError(
                    f"in the family {self.name!r}, {describe_ambiguity(name, list(candidates.values()), confirmed)}"
                )
            return confirmed[0]
        return next(iter(candidates.values()), None)

    def readings(self, name: str, style: str | None = None) -> Iterator[ParsedName]:
        """All ways to parse a stored name of the style (None: of any style)."""
        for entry in self._find_entries(name, style):
            fields = entry.template.fields_in(name)
            if fields is not None and all(
                fields.get(name_of_field, -1) < limit for name_of_field, limit in self._limits.items()
            ):
                rule = entry.rule
                stacked = tuple(field_name for field_name in rule.name.fields if field_name not in fields)
                yield ParsedName(rule, rule.name.filled(fields), fields, stacked, entry.part, entry.alias, entry.style)

    def rules_of(self, name: str) -> tuple[Rule, ...]:
        """Rules for a stored name of any style; several if only the other names of the model decide."""
        entries = self._find_entries(name, None)
        rules = {entry.rule.name: entry.rule for entry in entries if entry.template.fields_in(name) is not None}
        return tuple(rules.values())

    def may_match(self, text: str, outlines: Collection[str]) -> bool:
        """Whether the rule for the template `text` may match names with these outlines, without the table of names.

        Always true for a rule with names that are computed from sizes.
        """
        rule = next((rule for rule in self.rules if rule.name.text == text), None)
        if rule is None:
            return False
        if any("=" in name for aliases in rule.aliases.values() for alias in aliases for name in alias.names):
            return True
        names_of_ways = (alias.names for style in (CANONICAL, *self.styles) for alias in self._aliases(rule, style))
        return any(Template(name).outline in outlines for names in names_of_ways for name in names)

    def missing_parts(self, text: str, outlines: Collection[str]) -> list[str]:
        """Names that are missing for the rule of the template `text`, in the style that has most of them.

        `outlines`: of the model's names. A feed-forward layer without a gate has half of the names.
        """
        rule = next(rule for rule in self.rules if rule.name.text == text)
        names_of_ways = (alias.names for style in (CANONICAL, *self.styles) for alias in self._aliases(rule, style))
        missing = [
            [f"no {name}" for name in names if Template(name).outline not in outlines] for names in names_of_ways
        ]
        return min(missing, key=len, default=[])

    def canonical(self, name: str, style: str | None = None) -> str | None:
        """Canonical name of a stored name, with `{field}` for missing numbers; None if no rule matches."""
        named = self.read(name, style)
        return None if named is None else named.canonical

    def to_style(self, name: str, style: str) -> str:
        """The name in another style, if it is one tensor there. Raises FamilyError, UsageError."""
        names = self.find_spelling(name, style)[1]
        if len(names) != 1:
            raise FamilyError(
                f"{name} is {format_count(len(names), 'tensor')} in the style {style!r}: {', '.join(names)}"
            )
        return names[0]

    def find_spelling(self, name: str, style: str) -> tuple[Alias, tuple[str, ...]]:
        """How a style stores a canonical name: the alias and the stored names.

        Raises FamilyError if the style has no such parameter, UsageError for an unknown style.
        """
        spellings = self.find_spellings(name, style)
        if not spellings:
            raise FamilyError(f"{name} has no name in the style {style!r} of the family {self.name!r}")
        return spellings[0]

    def find_spellings(self, name: str, style: str) -> tuple[tuple[Alias, tuple[str, ...]], ...]:
        """All ways in which a style may store a canonical name, the likeliest first; see `find_spelling`."""
        matches = self._match(name)
        if not matches:
            raise FamilyError(describe_misfits(self.name, [name], [], [], limits={}))
        rule, fields = matches[0].rules[0], matches[0].fields
        return tuple(
            (alias, tuple(name.filled(fields) for name in names)) for alias, names in self._spellings_of(rule, style)
        )

    def is_left_out(self, rule: Rule, style: str) -> bool:
        """Whether the models of a style have no such buffer (`[]` in place of names)."""
        aliases = rule.aliases.get(style)
        like = self.styles[style].like if style in self.styles else None
        return aliases == () if aliases is not None or like is None else self.is_left_out(rule, like)

    def written_names(self, rule: Rule, style: str) -> tuple[str, ...]:
        """Templates of the names that a style writes for a rule; empty if it has none. Raises UsageError."""
        spellings = self._spellings_of(rule, style)
        return spellings[0][0].names if spellings else ()

    def _spellings_of(self, rule: Rule, style: str) -> _Spellings:
        """Aliases by which a style may store a rule's parameters, with their templates, the likeliest first."""
        known, spellings = self._spellings.get((id(rule), style), (None, ()))
        if known is not rule:
            aliases = sorted(self._aliases(rule, style), key=lambda alias: self.holds(alias.when) is False)
            spellings = tuple((alias, tuple(map(Template, alias.names))) for alias in aliases)
            self._spellings[id(rule), style] = rule, spellings
        return spellings

    def _find_entries(self, name: str, style: str | None) -> Sequence[StoredName]:
        """Entries whose templates may match a stored name, from a table that is built when first needed."""
        if not self._entries and not self.abstract:
            self._entries.update(self._tables.get(self.values, self._stored_names()))
        return self._entries.get((style, outline(name)), ())

    def _stored_names(self) -> Iterable[StoredName]:
        for rule in self.rules:
            yield StoredName(rule.name, rule, None, 0, CANONICAL)
            for style in self.styles:
                for alias in self._aliases(rule, style):
                    for part, name in enumerate(alias.names):
                        yield StoredName(Template(name), rule, alias, part, style)

    def _aliases(self, rule: Rule, style: str) -> tuple[Alias, ...]:
        """Aliases by which a style stores a rule's parameters, with complete names; the first is the one written."""
        if style == CANONICAL:
            return (Alias(names=(rule.name.text,)),)
        if style not in self.styles:
            known = ", ".join((CANONICAL, *self.styles))
            raise UsageError(f"expected one of the naming styles {known} of {self.name!r}; got {style!r}")
        description = self.styles[style]
        aliases = rule.aliases.get(style)
        if aliases is None:
            aliases = () if description.like is None else self._aliases(rule, description.like)
        complete: list[Alias] = []
        for alias in aliases:
            rewritten = rewrite_names(alias.names, description, self.values, self.source)
            complete.extend(alias if names == alias.names else replace(alias, names=names) for names in rewritten)
        return tuple(dict.fromkeys(complete))

    def find_tied(self, name: str) -> str | None:
        """The name under which a tied parameter is stored, if `name` is its other name; else None."""
        for tie in self.tied:
            fields = Template(tie.name).fields_in(name)
            if fields is not None and self.holds(tie.when):
                return Template(tie.to).filled(fields)
        return None

    def sort_rules(self) -> tuple[Rule, ...]:
        """The rules, in registration order of their parameters."""
        positions = positions_of((*self.order, *(rule.name.text for rule in self.rules)))
        return tuple(sorted(self.rules, key=lambda rule: order_key(rule.name.text, "", positions)))

    def sort_names(self, names: Iterable[str], style: str) -> list[str] | None:
        """Names of a style in registration order; None if that is unknown."""
        return self.sort_canonical(names) if style == CANONICAL else self.styles[style].sort_names(names)

    def sort_canonical(self, names: Iterable[str]) -> list[str]:
        """Canonical names in registration order; those without a rule last, by name."""
        positions = positions_of((*self.order, *(rule.name.text for rule in self.rules)))
        known: list[tuple[list[tuple[int, int]], str]] = []
        unknown = []
        for name in names:
            rules = self._rules.get(outline(name), ())
            template = next((rule.name for rule in rules if rule.name.fields_in(name) is not None), None)
            if template is None:
                unknown.append(name)
            else:
                known.append((order_key(template.text, name, positions), name))
        return [*(name for _, name in sorted(known)), *sorted(unknown)]


def distinct_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """One name per shape and kind of name: the others tell nothing new."""
    names = {(kind(name), shape): name for name, shape in shapes.items()}
    return {name: shape for (_, shape), name in names.items()}
