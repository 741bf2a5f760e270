"""Translate the names of a checkpoint to those of the live model: as the user says, or by the one style that fits.

1. The user's own rules, and a style that the user names, are applied.
2. Otherwise, if the checkpoint lacks names or shapes of some rank, every rank finds the naming styles of the family in
   which the checkpoint has all of its names, and those in which it also has its shapes. A style that fits all ranks is
   used; if several do, none is. If the names already fit, a style must also fit the shapes.
3. Rows with which the saved run padded its vocabulary are left out of tensors that have fewer rows in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from pathlib import Path

from ucp.contract.model import parse_values, recorded_arguments, run_arguments
from ucp.contract.protocols import Naming, ParamOrder, SourceOptions
from ucp.contract.registry import choose_family, library
from ucp.core.index import WEIGHT, Index
from ucp.errors import FamilyError, LoadError, UnknownFamilyError, UnsupportedError, UsageError, nearest
from ucp.families.family import Family
from ucp.families.naming import CANONICAL
from ucp.families.recipes import TensorRecipe, keep_rows
from ucp.families.styles import find_source_style
from ucp.live.adapters import LiveRun
from ucp.live.parts import LiveTensor
from ucp.live.run.ranks import Ranks, run_together
from ucp.source.naming import apply_rules, check_styles, list_size_names, restyle, translate_names
from ucp.source.read import index_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOptions:
    """What the user says about names."""

    naming: Naming = field(default_factory=Naming)
    """Style to translate the checkpoint to, or the user's own rules."""
    rename: Callable[[str], str] | None = None
    """From a name in the model to the name in the checkpoint, after `naming` is applied."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Sizes of the model that the checkpoint does not record."""
    source: SourceOptions = field(default_factory=SourceOptions)
    """Which model family the checkpoint has, and how to read it."""

    def __post_init__(self) -> None:
        unknown = self.settings.keys() - (list_size_names() if self.settings else set())
        if unknown:
            raise UsageError(
                f"expected settings to be sizes of the model, named as in Megatron or config.json "
                f"(num_attention_heads); got {', '.join(sorted(unknown))}"
            )

    def choose_family(self, index: Index) -> Family:
        """The family of the checkpoint. Raises UnknownFamilyError."""
        arguments = {**recorded_arguments(index), **parse_values(self.settings)}
        names = index.shapes
        return choose_family(names=names, shapes=names, arguments=arguments, options=self.source)[0]

    def checkpoint_names(self, tensor: LiveTensor) -> tuple[str, ...]:
        """Names in the checkpoint that a tensor may have."""
        return tensor.names if self.rename is None else tuple(map(self.rename, tensor.names))


def rename_to_model(
    index: Index, tensors: Sequence[LiveTensor], options: NameOptions, ranks: Ranks
) -> tuple[Index, tuple[str, ...]]:
    """The checkpoint under the names of the model, and hints if they cannot be translated. Collective.

    Raises FamilyError, UnsupportedError, UsageError.
    """
    index = run_together(ranks, lambda: _rename_as_asked(index, options))
    tensors = [tensor for tensor in tensors if 0 not in tensor.part.local_shape]

    def compare() -> tuple[bool, bool]:
        """Whether the checkpoint has the names of this rank, and whether it has its shapes under them."""
        stored = index.shapes
        shapes = {**{alias: stored[name] for alias, name in index.aliases.items() if name in stored}, **stored}
        names = {*stored, *index.aliases}
        has_names = all(_is_in(names, options.checkpoint_names(tensor)) for tensor in tensors)
        arguments = run_arguments(index)
        return has_names, has_names and all(_has_shape(tensor, options, shapes, arguments) for tensor in tensors)

    has_names, has_shapes = (all(of_ranks) for of_ranks in zip(*ranks.share(run_together(ranks, compare)), strict=True))
    if options.naming != Naming() or has_shapes:
        return index, ()
    styles = run_together(ranks, lambda: _find_styles(index, tensors, options))
    agreed = styles.find_agreed(ranks, by_shape=has_names)
    family = styles.family
    if family is None or len(agreed) != 1:
        return index, styles.describe(agreed)
    return run_together(ranks, lambda: translate_names(index, family, agreed[0])), ()


def _rename_as_asked(index: Index, options: NameOptions) -> Index:
    naming = options.naming
    if naming.rules is not None:
        index = apply_rules(index, naming.rules)
    if not naming.style:
        return index
    try:
        family = options.choose_family(index)
    except UnknownFamilyError:  # a misspelt style is the first thing to mend
        styles = dict.fromkeys((CANONICAL, *(style for family in library().concrete() for style in family.styles)))
        for style in filter(None, (naming.style, naming.source)):
            if style not in styles:
                near = nearest(style, styles)
                hint = f"; did you mean {near!r}?" if near else ""
                raise UsageError(
                    f"expected one of the naming styles {', '.join(styles)}; got {style!r}{hint}"
                ) from None
        raise
    check_styles(family, naming)
    return translate_names(index, family, naming.style, naming.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Styles:
    """Naming styles in which the checkpoint has all names of this rank."""

    family: Family | None = None
    """The model family that defines them."""
    tensors: Mapping[str, Mapping[str, TensorRecipe]] = field(default_factory=dict)
    """Style to the tensors of the checkpoint in it."""
    with_shapes: frozenset[str] = frozenset()
    """Styles in which the tensors also have the shapes of this rank."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Style that has all names, to the reason why the checkpoint cannot be translated to it."""
    nearest: tuple[str, str] | None = None
    """A style that has most names of this rank, and one that it lacks, if no style has all."""
    why_no_source: str = ""
    """Why the style of the checkpoint itself is not known."""

    def find_agreed(self, ranks: Ranks, *, by_shape: bool) -> list[str]:
        """Styles that fit all ranks: by shapes if any does, else by names. Of equal results, one style. Collective.

        `by_shape`: do not accept styles that only fit by names.
        """
        of_ranks = ranks.share((frozenset(self.tensors), self.with_shapes))
        with_names, with_shapes = (reduce(frozenset.intersection, styles) for styles in zip(*of_ranks, strict=True))
        agreed: list[str] = []
        for style in (style for style in self.tensors if style in (with_shapes or (() if by_shape else with_names))):
            if not any(self.tensors[style] == self.tensors[other] for other in agreed):
                agreed.append(style)
        return agreed

    def describe(self, agreed: Sequence[str]) -> tuple[str, ...]:
        """How to choose between `agreed` styles, or why there is none; nothing if neither would help."""
        if agreed:
            names = " or ".join(f"names={style!r}" for style in agreed)
            return (f"several naming styles fit the names of the model, but assign them differently: pass {names}",)
        if self.why_no_source:
            return (self.why_no_source,)
        if self.nearest is not None and not self.failures:
            style, name = self.nearest
            text = (
                f"most names of the model have the style {style}, but not {name}: if that is new in this model, pass "
            )
            return (text + f"names={style!r} and strict=False",)
        return tuple(
            f"the names of the model have the style {style}, to which the checkpoint cannot be translated: {why}"
            for style, why in islice(self.failures.items(), 1)
        )


def _find_styles(index: Index, tensors: Sequence[LiveTensor], options: NameOptions) -> _Styles:
    try:
        family = options.choose_family(index)
    except UnknownFamilyError:
        return _Styles()
    translated: dict[str, Mapping[str, TensorRecipe]] = {}
    failures: dict[str, str] = {}
    try:
        source = find_source_style(family, index.shapes)
    except FamilyError as error:
        return _Styles(family=family, why_no_source=str(error))
    as_stored = sum(_is_in({*index.shapes, *index.aliases}, options.checkpoint_names(tensor)) for tensor in tensors)
    nearest_style, most = None, max(len(tensors) // 2, as_stored)
    for style in (CANONICAL, *family.styles):
        unread = [t.name for t in tensors if not _is_read(family, options.checkpoint_names(t), style)]
        if unread:
            if style != source and len(tensors) - len(unread) > most:
                nearest_style, most = (style, unread[0]), len(tensors) - len(unread)
            continue
        try:
            _, recipes = restyle(index, family, style, source)
        except (FamilyError, UnsupportedError) as error:
            failures[style] = str(error)
            continue
        if all(_is_in(recipes, options.checkpoint_names(tensor)) for tensor in tensors):
            translated[style] = recipes
    with_shapes, arguments = set(), run_arguments(index)
    for style, by_name in translated.items():
        shapes = {name: recipe.shape for name, recipe in by_name.items()}
        if all(_has_shape(tensor, options, shapes, arguments) for tensor in tensors):
            with_shapes.add(style)
    return _Styles(
        family=family,
        tensors=translated,
        with_shapes=frozenset(with_shapes),
        failures=failures,
        nearest=None if translated else nearest_style,
    )


def _is_in(stored: Collection[str], names: Sequence[str]) -> bool:
    return any(name in stored for name in names)


def _is_read(family: Family, names: Sequence[str], style: str) -> bool:
    try:
        return any(family.ignores(name) or family.read(name, style) is not None for name in names)
    except FamilyError:  # a name that can be two parameters
        return False


def _has_shape(
    tensor: LiveTensor,
    options: NameOptions,
    shapes: Mapping[str, tuple[int, ...]],
    arguments: Mapping[str, object],
) -> bool:
    """Whether the checkpoint has the shape of a tensor. `arguments`: of the saved run, which may have padded it."""
    shape = next(shapes[name] for name in options.checkpoint_names(tensor) if name in shapes)
    if _lacks_padding(tensor, shape, arguments):
        return True
    try:
        tensor.part.to_slice(tensor.name, WEIGHT, shape, tensor.dtype)
    except ValueError:
        return False
    return True


def drop_padding(index: Index, tensors: Sequence[LiveTensor], options: NameOptions, ranks: Ranks) -> Index:
    """`index` without the rows that pad the vocabulary of the saved run, as far as the model lacks them. Collective."""
    rows: dict[str, int] = {}
    for tensor in tensors:
        name = next((name for name in options.checkpoint_names(tensor) if name in index.atoms), None)
        if name is not None and _lacks_padding(tensor, index.atoms[name].global_shape, run_arguments(index)):
            rows[name] = (tensor.part.global_shape or tensor.part.local_shape)[0]
    rows = {name: kept for of_rank in ranks.share(rows) for name, kept in of_rank.items()}
    if not rows:
        return index
    atoms = {name: keep_rows(index.atoms[name], kept) for name, kept in rows.items()}
    note = "rows that pad the vocabulary in the checkpoint are not loaded: " + ", ".join(
        f"{name} has {kept:,} of {index.atoms[name].global_shape[0]:,}" for name, kept in rows.items()
    )
    return replace(index, atoms={**index.atoms, **atoms}, notes=(*index.notes, note))


def _lacks_padding(tensor: LiveTensor, stored: tuple[int, ...], arguments: Mapping[str, object]) -> bool:
    """Whether `stored` is the shape of a tensor in a run that padded its vocabulary, and the model has fewer rows."""
    vocabulary, padded = arguments.get("vocab_size"), arguments.get("padded_vocab_size")
    shape = tensor.part.global_shape or tensor.part.local_shape
    if tensor.part.is_padded or not shape or not isinstance(vocabulary, int) or not isinstance(padded, int):
        return False
    return stored == (padded, *shape[1:]) and vocabulary <= shape[0] < padded


def reorder_to_optimizer(index: Index, path: Path, run: LiveRun, options: NameOptions, ranks: Ranks) -> Index:
    """`index`, with numbered optimizer states assigned by the order of the live optimizer, if that fits. Collective.

    Raises LoadError if that order and the inferred one both fit, and differ.
    """
    if not index.is_numbered or options.source.param_order is not None or run.optimizer is None:
        return index
    rename = options.rename or str
    order: ParamOrder = tuple(tuple(map(rename, group.params)) for group in run.optimizer.groups())
    if any(other != order for other in ranks.share(order)):
        return index  # ranks step different parameters: a number means different ones

    def read() -> Index | None:
        try:
            return index_of(path, source=replace(options.source.without_family(), param_order=order))
        except UsageError:  # the order does not fit
            return None

    reordered = run_together(ranks, read)
    if reordered is None or index.unnamed is not None:
        return reordered or index
    for current, other in zip(index.groups, reordered.groups, strict=True):
        for name, other_name in zip(current.params, other.params, strict=True):
            if name != other_name:
                raise LoadError(
                    f"{index.path}: the saved optimizer only numbers its parameters, and two orders fit: in the order "
                    f"of the model some states belong to {name}; in that of the optimizer passed, to {other_name}. "
                    "Say which is right: param_order=[[names of each group], ...]"
                )
    return index
