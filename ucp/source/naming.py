"""Renames the source: to the naming style that a target or --names asks for, or by the rules of --rename."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from ucp.contract.model import recorded_arguments, run_arguments
from ucp.contract.protocols import Naming, SourceOptions, Target
from ucp.contract.registry import choose_family, library, naming_style_of
from ucp.core.gaps import check_weights
from ucp.core.index import Index
from ucp.core.tensor import DType
from ucp.errors import FamilyError, UnknownFamilyError, UnsupportedError, UsageError, format_list, nearest
from ucp.families.family import Family
from ucp.families.library import read_rules_text
from ucp.families.naming import CANONICAL
from ucp.families.recipes import TensorRecipe, add_copy, apply_recipes
from ucp.families.styles import find_source_style
from ucp.families.toml.rename import read_renames
from ucp.families.translate import find_missing, translate
from ucp.transfer.probe import Prober

_MOST_SHOWN = 8
"""Names of the source in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenamedSource:
    """The source under the names that the target needs."""

    index: Index
    """Index under these names."""
    family: str = ""
    """Family that translated the names; empty if none was needed."""
    used: frozenset[str] = frozenset()
    """Settings that only the family uses."""


def rename_source(
    index: Index, target: Target, naming: Naming, options: SourceOptions, settings: Mapping[str, str]
) -> RenamedSource:
    """The source under the names that the target or the user asks for; unchanged if it has them, or none are asked for.

    Raises FamilyError, UnsupportedError and UsageError, each with all names concerned.
    """
    if naming.rules is not None:
        index = apply_rules(index, naming.rules)
    style = naming.style or target.names
    if not style:
        return RenamedSource(index=index)
    if target.names:
        check_weights(index)
    if target.names not in (None, style):
        raise UsageError(f"the target {target.name} writes the names of {target.names} only: drop --names {style}")
    family = _find_family(index, target, options, settings, naming)
    if family is None:
        note = f"no known model family: all names are written unchanged; they are assumed to be names of {style}"
        return RenamedSource(index=replace(index, notes=(*index.notes, note)))
    used = frozenset(name for name in settings if name not in target.settings and name in _size_names(family))
    renamed = translate_names(index, family, style, naming.source)
    if renamed is not index:
        _check_complete(index, family, naming.source)
        renamed = replace(renamed, notes=(*renamed.notes, *_note_other_model(index, family)))
    return RenamedSource(index=renamed, family=family.name, used=used)


def _check_complete(index: Index, family: Family, source: str) -> None:
    """Raise FamilyError for parameters that a model of the family cannot lack, unless the user took only a part."""
    missing = [] if index.unselected else find_missing(family, index.shapes, source or None)
    if missing:
        raise FamilyError(
            f"expected every parameter that each model of the family {family.name!r} has; no tensor of {index.path} "
            f"gives these {len(missing)}:\n{format_list(missing, most=_MOST_SHOWN)}\n"
            "A model that loads what would be written fails for them, or computes with values of its own. If files are "
            "missing, copy them. If the model is of another family, though all its names are known (OLMo has Llama's, "
            "but norms without weights), name that family (--family), or write the model under its own names (--to "
            "deepspeed, deepspeed-universal, dcp or ucp, without --names). If the source holds a part of a model on "
            f'purpose, pass a rules file with extends = ["{family.name}"] and required = [] (--patterns my.toml)'
        )


def _note_other_model(index: Index, family: Family) -> Iterator[str]:
    """A note if the configuration has values that no model of the family has: Gemma has the names of Llama."""
    expected: dict[str, list[object]] = {}
    for part in chain.from_iterable(family.configs.values()):
        for key, value in part.fixed.items():
            expected[key] = [value] if part.when is None else [*expected.get(key, ()), value]
    recorded = recorded_arguments(index)
    differences = [
        f"{key} = {recorded[key]!r} (not {' or '.join(map(repr, values))})"
        for key, values in expected.items()
        if isinstance(recorded.get(key), str | bool) and recorded[key] not in values
    ]
    if differences:
        yield (
            f"the names are those of the family {family.name}, but the configuration says {', '.join(differences)}: "
            "make sure that the model which loads these weights computes what the source computes"
        )


def translate_names(index: Index, family: Family, style: str, source: str = "") -> Index:
    """The source under the names of `style`; unchanged if it has them.

    `source`: style of the source; empty for the one that its names and shapes fit. Raises FamilyError,
    UnsupportedError.
    """
    shown = None if source else find_source_style(family, index.shapes)
    index, tensors = restyle(index, family, style, source or shown)
    shapes = index.shapes
    if tensors.keys() == shapes.keys() and all(
        tensor.is_rename and tensor.sources == (name,) for name, tensor in tensors.items()
    ):
        return index
    _check_counts(index, tensors)
    index = _apply_translation(index, tensors, family, style)
    note = f"the source's naming style is taken to be {shown}, whose shapes fit; --names SOURCE:STYLE overrides this"
    return replace(index, notes=(*index.notes, note)) if shown else index


def restyle(index: Index, family: Family, style: str, source: str | None) -> tuple[Index, dict[str, TensorRecipe]]:
    """The source with each tensor only once, and how every tensor of `style` is made from it.

    `source`: style of the source; None for any.

    Raises FamilyError, UnsupportedError.
    """
    index = _drop_copies(index, family, source)
    return index, translate(family, index.shapes, style, source=source)


def list_size_names() -> set[str]:
    """Names of model sizes that --set takes, those of all families."""
    return {name for family in library().concrete() for name in _size_names(family)}


def _size_names(family: Family) -> set[str]:
    return {name for sources in family.sizes.values() for source in sources for name in source.names}


def _find_family(
    index: Index, target: Target, options: SourceOptions, settings: Mapping[str, str], naming: Naming
) -> Family | None:
    """The family that the user names, or that is detected; None if names are to be written unchanged.

    Without --names, names of a run that records its arguments (Megatron's) are never written unchanged.

    Raises UnknownFamilyError if no family knows all names of the source, FamilyError if the named family does not. The
    message lists the unknown names, and says what is needed.
    """
    shapes, arguments = index.shapes, target.model_arguments(index, settings)
    try:
        family, _ = choose_family(names=shapes, shapes=shapes, arguments=arguments, options=options)
    except UnknownFamilyError as error:
        unread = min((_find_unknown(candidate, shapes) for candidate in library().concrete()), key=len)
        has_names = not naming.style and naming_style_of(index) == target.names
        if not unread and not has_names:  # several families know all names: the error asks which
            raise
        if naming.style:  # the user may say that unknown names are already those to write
            are_final = naming.source == naming.style and not target.takes_family(None)
        else:  # or the target can accept them
            are_known = naming.rules is not None or target.takes_names_of(index, settings)
            are_final = are_known and not run_arguments(index)
        if are_final:
            return None
        raise UnknownFamilyError(_describe_unknown(index, unread, "a model family", target, naming)) from error
    unread = _find_unknown(family, shapes)
    if unread:
        raise FamilyError(_describe_unknown(index, unread, f"the family {family.name!r}", target, naming))
    check_styles(family, naming)
    return family


def check_styles(family: Family, naming: Naming) -> None:
    """Raise UsageError for a style that the family does not have."""
    styles = [CANONICAL, *family.styles]
    for style in filter(None, (naming.style, naming.source)):
        if style not in styles:
            near = nearest(style, styles)
            hint = f"; did you mean {near!r}?" if near else ""
            raise UsageError(
                f"expected one of the naming styles {', '.join(styles)} of {family.name!r}; got {style!r}{hint}"
            )


def _find_unknown(family: Family, names: Iterable[str]) -> list[str]:
    """Names that a family has no rule for and does not ignore."""
    return [name for name in names if not family.ignores(name) and not family.rules_of(name)]


def _describe_unknown(index: Index, unread: Sequence[str], whose: str, target: Target, naming: Naming) -> str:
    families = ", ".join(family.name for family in library().concrete())
    style = naming.style or target.names
    who = f"under --names {naming.style}" if naming.style else f"for {target.name}, which writes the names of {style}"
    as_they_are = f"If all names are already names of {style}, pass --names {style}:{style} to keep them. "
    as_they_are = "" if target.takes_family(None) else as_they_are
    return (
        f"expected names that {whose} has, to write them {who}: Megatron's "
        "(decoder.layers.0.self_attention.linear_qkv.weight, ...), Hugging Face's, or those of another style; "
        f"{len(unread)} of the {len(index.atoms)} names in {index.path} are not among them:\n"
        f"{format_list(unread, most=_MOST_SHOWN)}\n"
        f"{as_they_are}The families are {families} (`ucp patterns show llama` prints one). If your model belongs to "
        "one of them but has other names, give rules for these (--rename FILE), or write a rules file that extends the "
        "family, with your names under [alias.huggingface], and pass it with --patterns my.toml; --family chooses "
        "among several families. Any model can be written under its own names with --to deepspeed, "
        "deepspeed-universal, dcp or ucp"
    )


def _drop_copies(index: Index, family: Family, style: str | None) -> Index:
    """The source without duplicates: of a tensor that a style stores twice (DeepSeek-V3), the second becomes a copy."""
    read = {name: family.read(name, style) for name in index.atoms}
    first: dict[str, str] = {}
    copies: dict[str, str] = {}
    for name, named in read.items():
        if named is not None and not named.stacked and (named.alias is None or named.alias.is_plain):
            original = first.setdefault(named.canonical, name)
            if original != name:
                copies[name] = original
    if not copies:
        return index
    atoms = {name: atom for name, atom in index.atoms.items() if name not in copies}
    for name, original in copies.items():
        atoms[original] = add_copy(atoms[original], index.atoms[name])
    groups = tuple(replace(group, params=tuple(p for p in group.params if p not in copies)) for group in index.groups)
    return replace(index, atoms=atoms, groups=groups, aliases={**index.aliases, **copies})


def _apply_translation(index: Index, tensors: Mapping[str, TensorRecipe], family: Family, style: str) -> Index:
    renamed = apply_recipes(index, tensors)
    used = {source for item in tensors.values() for source in item.sources}
    unused = [name for name in index.atoms if name not in used]
    dropped = (
        [f"not parameters, and without a name in {style} in the family {family.name}:\n{format_list(unused)}"]
        if unused
        else []
    )
    names = {item.sources[0]: name for name, item in tensors.items() if item.is_rename}
    second = {old: _translate_alias(old, family, style) for old, to in index.aliases.items() if to in names}
    aliases = {new: names[index.aliases[old]] for old, new in second.items() if new}
    aliases |= {further: new for old, new in names.items() for further in _list_further_names(old, family, style)}
    dropped += _list_lost_aliases(index, {old for old, new in second.items() if new})
    order = family.sort_names(renamed.atoms, style)
    places = {name: place for place, name in enumerate(order or renamed.atoms)}
    groups = (replace(item, params=tuple(sorted(item.params, key=places.__getitem__))) for item in renamed.groups)
    return replace(
        renamed,
        atoms={name: renamed.atoms[name] for name in places},
        groups=tuple(groups),
        unordered=order is None,
        aliases={new: to for new, to in aliases.items() if new not in renamed.atoms},
        notes=(*renamed.notes, f"names are translated to {style} by the rules of the family {family.name}"),
        dropped=(*renamed.dropped, *dropped),
    )


def _list_further_names(name: str, family: Family, style: str) -> list[str]:
    """The names of a tensor in another style after the first, if models of that style have it under all of them."""
    canonical = family.canonical(name)
    if canonical is None or style not in family.styles or not family.styles[style].has_all_names:
        return []
    return [names[0] for alias, names in family.find_spellings(canonical, style)[1:] if alias.is_plain]


def _translate_alias(name: str, family: Family, style: str) -> str:
    """The second name of a tied tensor in another style; empty if it has none."""
    canonical = family.canonical(name)
    spellings = family.find_spellings(canonical, style) if canonical is not None else ()
    return spellings[0][1][0] if spellings and spellings[0][0].is_plain else ""


def apply_rules(index: Index, path: Path) -> Index:
    """The source under the names that the user's own rules give; names without a rule stay."""
    tensors, unmatched = read_renames(read_rules_text(path), str(path), index.shapes)
    _check_counts(index, tensors)
    names = {tensor.sources[0]: name for name, tensor in tensors.items() if tensor.is_rename}
    renamed = apply_recipes(index, tensors)
    note = f"names that no rule in {path} matches are unchanged:\n{format_list(unmatched)}"
    aliases = {alias: names[to] for alias, to in index.aliases.items() if to in names and alias not in tensors}
    return replace(
        renamed,
        aliases=aliases,
        notes=(*renamed.notes, *([note] if unmatched else [])),
        dropped=(*renamed.dropped, *_list_lost_aliases(index, aliases)),
    )


def _list_lost_aliases(index: Index, known: Collection[str]) -> list[str]:
    """A line for second names that are lost: the tensor was joined or split, or another tensor has the name now."""
    lost = [f"{alias} = {name}" for alias, name in index.aliases.items() if alias not in known]
    return [f"second names of tied tensors, which the new names do not have:\n{format_list(lost)}"] if lost else []


def _check_counts(index: Index, tensors: Mapping[str, TensorRecipe]) -> None:
    """Raise UnsupportedError for tensors that are to be joined and have different step counts."""
    problems = []
    with Prober() as prober:
        for name, tensor in tensors.items():
            atoms = [index.atoms[source] for source in tensor.sources]
            for state in (state for state in atoms[0].states if len(atoms) > 1 and atoms[0].is_count(state)):
                states = [atom.states[state] for atom in atoms if state in atom.states]
                values = {prober.window(each.fragments[0].ref, 0, 1, dtype=DType.FLOAT64) for each in states}
                if len(values) > 1:
                    problems.append(f"{name}: {state} of {', '.join(tensor.sources)}")
    if problems:
        raise UnsupportedError(
            "expected one count of steps for all tensors that are joined into one, as optimizers do; these differ:\n"
            f"{format_list(problems)}\nLeave the optimizer out (--include '*/weight'), or keep the names"
        )
