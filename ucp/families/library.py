"""Model families by name, from the folders that are registered for them, and the choice of one by evidence.

Group `ucp.families`: an entry point names a package; every `*.toml` file in it is a family.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from ucp.errors import UnknownFamilyError, UsageError
from ucp.families.family import Family, distinct_shapes
from ucp.families.rule import PatternFactory, Rule
from ucp.families.template import kind, outline
from ucp.families.toml.family import read_family, read_header
from ucp.io.pickle.fields import format_value

_MOST_BYTES = 4 << 20
"""Longest rules file that is read."""


@dataclass(frozen=True, slots=True)
class Library:
    """All installed families; each is read when it is first used."""

    pattern: Callable[[str], PatternFactory]
    """Gives the pattern registered under a name."""
    texts: Mapping[str, tuple[str, str]]
    """Family to the place of its file, and its TOML text."""
    _read: dict[str, Family] = field(default_factory=dict)

    @classmethod
    def from_packages(cls, packages: Iterable[str], pattern: Callable[[str], PatternFactory]) -> Library:
        """Families of the TOML files in these packages. Raises UsageError when two have one name."""
        texts: dict[str, tuple[str, str]] = {}
        entries = ((package, entry) for package in packages for entry in files(package).iterdir())
        for package, entry in sorted(entries, key=lambda item: item[1].name):
            if entry.name.endswith(".toml"):
                text, source = entry.read_text(encoding="utf-8"), f"{package.replace('.', '/')}/{entry.name}"
                name = read_header(text, source).name
                if name in texts:
                    raise UsageError(f"the family {name!r} is defined twice, in {texts[name][0]} and in {source}")
                texts[name] = (source, text)
        return cls(pattern, texts)

    def with_file(self, path: Path) -> tuple[Library, str]:
        """This library with one more file, and the name of the family in that file. Raises UsageError."""
        text = read_rules_text(path)
        texts = dict(self.texts)
        name = read_header(text, str(path)).name
        if name in texts:
            raise UsageError(f"{path}: the name {name!r} is taken by {texts[name][0]}; give it another")
        texts[name] = (str(path), text)
        return Library(self.pattern, texts), name

    def names(self) -> tuple[str, ...]:
        """Names of all families, also of abstract ones."""
        return tuple(sorted(self.texts))

    def family(self, name: str) -> Family:
        """The family of that name, also an abstract one. Raises UsageError that lists the families of checkpoints."""
        return self._family(name, ())

    def get_concrete(self, name: str) -> Family:
        """The family of that name. Raises UsageError for an abstract one too, to which no checkpoint belongs."""
        family = self.family(name)
        if family.abstract:
            raise UsageError(
                f"expected one of the families {', '.join(self._choices())}; {name!r} is only a part that "
                "families extend"
            )
        return family

    def list_replaced(self, name: str) -> tuple[str, ...]:
        """Templates for which family `name` has other rules than the families that it extends."""
        source, text = self.texts[name]
        ours = _by_template(self.family(name).rules)
        theirs = _by_template(
            rule for parent in read_header(text, source).extends for rule in self.family(parent).rules
        )
        return tuple(template for template, rules in theirs.items() if ours.get(template, rules) != rules)

    def _family(self, name: str, below: tuple[str, ...]) -> Family:
        if name in below:
            raise UsageError(f"families extend one another in a circle: {' -> '.join((*below, name))}")
        if name not in self.texts:
            choices = self.names() if below else self._choices()
            near = get_close_matches(name.lower(), choices, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            where = f" (extended by {below[-1]!r})" if below else ""
            raise UsageError(f"expected one of the families {', '.join(choices)}; got {name!r}{where}{hint}")
        if name not in self._read:
            source, text = self.texts[name]
            extended = [self._family(parent, (*below, name)) for parent in read_header(text, source).extends]
            self._read[name] = read_family(text, source, pattern=self.pattern, extended=extended)
        return self._read[name]

    def _choices(self) -> tuple[str, ...]:
        return tuple(family.name for family in self.concrete())

    def concrete(self) -> tuple[Family, ...]:
        """Families that a checkpoint can belong to."""
        return tuple(family for family in map(self.family, self.names()) if not family.abstract)

    def likely(self, arguments: Mapping[str, object]) -> Iterator[Family]:
        """Families that the recorded arguments do not contradict, specific ones first; each is read when reached."""
        headers = {name: read_header(text, source) for name, (source, text) in self.texts.items()}
        kinds = {name: document.kind_of for name, document in headers.items()}
        for name in sorted(headers, key=lambda name: (-len(_more_general([name], kinds)), name)):
            if not headers[name].abstract and not list(_contradicted(headers[name].evidence.arguments, arguments)):
                yield self.family(name)


def _by_template(rules: Iterable[Rule]) -> dict[str, list[Rule]]:
    by_template: dict[str, list[Rule]] = {}
    for rule in rules:
        by_template.setdefault(rule.name.text, []).append(rule)
    return by_template


def choose(
    families: Iterable[Family],
    *,
    names: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    arguments: Mapping[str, object],
    axes: Mapping[str, int],
    explain: bool = True,
) -> tuple[Family, tuple[str, ...]]:
    """The family of a checkpoint, bound to its sizes, and the reasons for the choice.

    `names`: of the model's tensors, in any style. `explain`: whether an error says why the nearest family does not fit;
    names are then looked up in all families. Raises UnknownFamilyError if no family fits, or if none of those that fit
    is more specific than all others.
    """
    names = list(names)
    names_by_kind = {kind(name): name for name in names}
    outlines = set(map(outline, names_by_kind.values()))
    objections: dict[str, list[str]] = {}
    unread: dict[str, int] = {}
    fitting: dict[str, Family] = {}
    few_shapes = distinct_shapes(shapes)
    kinds_of: dict[str, Sequence[str]] = {}
    for family in families:
        kinds_of[family.name] = family.kind_of
        if family.name in _more_general(fitting, kinds_of):
            continue
        if not explain and not all(family.may_match(text, outlines) for text in family.evidence.names):
            continue
        bound = family.bind(arguments=arguments, shapes=few_shapes, axes=axes)
        objections[family.name] = _find_objections(bound, names_by_kind.values(), arguments)
        unread[family.name] = sum(
            not bound.ignores(name) and not bound.rules_of(name) for name in names_by_kind.values()
        )
        if not objections[family.name]:
            fitting[family.name] = bound
    general = _more_general(fitting, kinds_of)
    best = [family for name, family in fitting.items() if name not in general]
    if len(best) == 1:
        evidence = best[0].evidence
        arguments_text = [f"{key} = {value!r}" for key, value in evidence.arguments.items() if key in arguments]
        return best[0].among(names), (*(f"has {name}" for name in evidence.names), *arguments_text)
    nearest = min(objections, key=lambda name: (unread[name], len(objections[name])), default="")
    is_near = bool(objections) and unread[nearest] < len(names_by_kind)
    raise UnknownFamilyError(
        _describe_undecided([family.name for family in best], nearest, objections[nearest] if is_near else ())
    )


def find_contradictions(
    family: Family, *, arguments: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    """Sizes and flags of a model for which its recorded arguments give one value and its tensors another.

    `shapes`: global shape by name (any style). Sizes under [given] of the family are not compared, nor are those that
    differ from layer to layer.
    """
    few_shapes = distinct_shapes(shapes)
    recorded = family.bind(arguments=arguments).values
    inferred = family.bind(shapes=few_shapes).values
    return tuple(
        _contradiction(family, name, arguments, few_shapes)
        for name, value in recorded.items()
        if name not in family.constants and inferred.get(name, value) != value
    )


def _contradiction(
    family: Family, size: str, arguments: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """A line of `find_contradictions`: "hidden: the arguments say hidden_size = 40; word_embeddings is [64, 20]"."""
    inputs: dict[str, None] = {}
    queue = [size]
    while queue:
        inputs[name := queue.pop(0)] = None
        queue += sorted(other for formula in family.sizes.get(name, ()) for other in formula.names - inputs.keys())
    recorded = (f"{name} = {format_value(arguments[name])}" for name in inputs if arguments.get(name) is not None)
    templates = {family.tensors[name].text for name in inputs if name in family.tensors}
    shape_texts: dict[str, str] = {}
    for name, shape in shapes.items():
        for rule in family.rules_of(name):
            if rule.name.text in templates:
                shape_texts.setdefault(rule.name.text, f"{name} is {list(shape)}")
    return f"{size}: the arguments say {', '.join(recorded)}; {', '.join(shape_texts.values())}"


def _find_objections(family: Family, names: Collection[str], arguments: Mapping[str, object]) -> list[str]:
    """Reasons why a family does not fit. `names`: one of each kind; names of other layers have the same rules."""
    objections: list[str] = []
    present: set[str] = set()
    unread: list[str] = []
    for name in names:
        if not family.ignores(name):
            rules = family.rules_of(name)
            present.update(rule.name.text for rule in rules)
            unread += [] if rules else [name]
    outlines = set(map(outline, names))
    for text in family.evidence.names:
        objections += [f"no {text}"] if text not in present else family.missing_parts(text, outlines)
    objections += [f"has {text}" for text in family.evidence.absent if text in present]
    objections += _contradicted(family.evidence.arguments, arguments)
    objections += family.conflicts
    if unread:
        rest = f" and {len(unread) - 1} more like it" if len(unread) > 1 else ""
        objections.append(f"no rule for {unread[0]}{rest}")
    return objections


def _contradicted(wanted: Mapping[str, object], arguments: Mapping[str, object]) -> Iterator[str]:
    """A line for each recorded argument whose value is not the one in `wanted`."""
    for key, value in wanted.items():
        if key in arguments and arguments[key] != value:
            yield f"{key} is {format_value(arguments[key])}, not {value!r}"


def _more_general(names: Iterable[str], kinds: Mapping[str, Sequence[str]]) -> set[str]:
    """All families more general than `names`, directly or through others. `kinds`: family to its own `kind_of`."""
    general_names: set[str] = set()
    waiting = [general for name in names for general in kinds.get(name, ())]
    while waiting:
        name = waiting.pop()
        if name not in general_names:
            general_names.add(name)
            waiting.extend(kinds.get(name, ()))
    return general_names


def _describe_undecided(best: Sequence[str], nearest: str, objections: Sequence[str]) -> str:
    """`nearest`: the family with rules for most names; `objections`: why it does not fit."""
    if best:
        return f"the model may be of the families {', '.join(best)}; say which with --family"
    why = f"the nearest is {nearest}: {'; '.join(objections[:3])}" if objections else "none has a rule for any of them"
    return (
        f"no model family fits the names of this checkpoint: {why}. Say which with --family, or write rules in a file "
        "for --patterns my.toml (`ucp patterns check CKPT --patterns my.toml` shows which names have one)"
    )


def read_rules_text(path: Path) -> str:
    """Text of a rules file. Raises UsageError for what cannot be one."""
    if not path.is_file():
        raise UsageError(
            f"expected a rules file (TOML) at {path}; there is {'no file' if path.exists() else 'nothing'}"
        )
    if path.stat().st_size > _MOST_BYTES:
        raise UsageError(
            f"expected a rules file of at most {_MOST_BYTES:,} bytes at {path}; got {path.stat().st_size:,}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"expected a rules file at {path}; it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"expected a rules file (TOML) at {path}; byte {error.start} is not UTF-8 text") from error
