"""The checkpoint under the names of the live model: as the user says, or as all names of all ranks show.

1. Rules of the user's own, and a style that the user names, are taken as they are said.
2. Else, where names or shapes of some rank are not those of the checkpoint, every rank says which styles of the chosen
   family have all of its own, and which give them its shapes. One that holds for all ranks is taken; between two none
   is. Where the names agree, only shapes speak for another style.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING

from ucp.contract.model import parse_values, recorded_arguments
from ucp.contract.protocols import Naming, ParamOrder, SourceOptions
from ucp.contract.registry import choose_family
from ucp.core.index import WEIGHT, Index
from ucp.errors import FamilyError, LoadError, UnknownFamilyError, UnsupportedError, UsageError
from ucp.families.family import Family
from ucp.families.naming import CANONICAL
from ucp.families.recipes import TensorRecipe
from ucp.families.styles import find_source_style
from ucp.live.adapters import LiveRun
from ucp.live.parts import LiveTensor
from ucp.live.run.ranks import Ranks, run_together
from ucp.source.naming import by_rules, check_styles, family_sizes, restyled, under_style
from ucp.source.read import index_of

if TYPE_CHECKING:
    from ucp.live.run.request import LoadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOptions:
    """What the user says of names."""

    naming: Naming = field(default_factory=Naming)
    """Style to bring the checkpoint to, or rules of the user's own."""
    rename: Callable[[str], str] | None = None
    """From a name in the model to the name in the checkpoint, once that is under other names."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Sizes of the model that nothing records."""
    source: SourceOptions = field(default_factory=SourceOptions)
    """Which family it is of."""

    def __post_init__(self) -> None:
        unknown = self.settings.keys() - (family_sizes() if self.settings else set())
        if unknown:
            raise UsageError(
                f"expected sizes of the model as settings, by the names of Megatron or config.json "
                f"(num_attention_heads); got {', '.join(sorted(unknown))}"
            )

    def choose_family(self, index: Index) -> Family:
        """The family of the checkpoint. Raises UnknownFamilyError."""
        arguments = {**recorded_arguments(index), **parse_values(self.settings)}
        names = index.shapes
        return choose_family(names=names, shapes=names, arguments=arguments, options=self.source)[0]

    def checkpoint_names(self, own: LiveTensor) -> tuple[str, ...]:
        """Names in the checkpoint that a tensor may have."""
        return own.names if self.rename is None else tuple(map(self.rename, own.names))


def rename_to_model(
    index: Index, tensors: Sequence[LiveTensor], asked: NameOptions, ranks: Ranks
) -> tuple[Index, tuple[str, ...]]:
    """The checkpoint under the names of the model, and what may cure it where it is not. Collective.

    Raises FamilyError, UnsupportedError, UsageError.
    """
    index = run_together(ranks, lambda: _rename_as_asked(index, asked))
    held = [own for own in tensors if 0 not in own.part.local_shape]

    def fit() -> tuple[bool, bool]:
        """Whether the checkpoint has the names of this rank, and whether it has its shapes under them."""
        if not all(_is_in(asked.checkpoint_names(own), index.shapes, index.aliases) for own in held):
            return False, False
        shapes = index.shapes
        known = {**{alias: shapes[name] for alias, name in index.aliases.items() if name in shapes}, **shapes}
        return True, all(_is_shaped(own, asked, known) for own in held)

    fits = run_together(ranks, fit)
    same_names, same_shapes = (all(each) for each in zip(*ranks.share(fits), strict=True))
    if asked.naming != Naming() or same_shapes:
        return index, ()
    found = run_together(ranks, lambda: _styles(index, held, asked))
    ways = found.agreed(ranks, by_shape=same_names)
    if found.family is None or len(ways) != 1:
        return index, found.hints(ways)
    family = found.family
    return run_together(ranks, lambda: under_style(index, family, ways[0])), ()


def _rename_as_asked(index: Index, asked: NameOptions) -> Index:
    if asked.naming.rules is not None:
        index = by_rules(index, asked.naming.rules)
    if not asked.naming.style:
        return index
    family = asked.choose_family(index)
    check_styles(family, asked.naming)
    return under_style(index, family, asked.naming.style, asked.naming.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Styles:
    """Styles that have all names of this rank."""

    family: Family | None = None
    """The family that they are of."""
    named: Mapping[str, Mapping[str, TensorRecipe]] = field(default_factory=dict)
    """Style to the tensors of the checkpoint in it."""
    shaped: frozenset[str] = frozenset()
    """Styles in which they have the shapes of this rank."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Style with such names to why the checkpoint cannot be brought to it."""
    undecided: str = ""
    """Why the style of the checkpoint itself is not known."""

    def agreed(self, ranks: Ranks, *, by_shape: bool) -> list[str]:
        """Styles that hold for all ranks, one of those that come to the same; all that stay. Collective.

        `by_shape`: only those in which the shapes are those of all ranks.
        """
        told = ranks.share((frozenset(self.named), self.shaped))
        named, shaped = (reduce(frozenset.intersection, each) for each in zip(*told, strict=True))
        ways: list[str] = []
        for style in (own for own in self.named if own in (shaped if by_shape else shaped or named)):
            if not any(self.named[style] == self.named[own] for own in ways):
                ways.append(style)
        return ways

    def hints(self, ways: Sequence[str]) -> tuple[str, ...]:
        """How to say the style, where `ways` are not one, or why it cannot be had; nothing where neither would help."""
        if ways:
            names = " or ".join(f"names={way!r}" for way in ways)
            return (f"several naming styles have the names of the model, for other tensors: pass {names}",)
        if self.undecided:
            return (self.undecided,)
        return tuple(
            f"the names of the model are those of the style {style}, to which the checkpoint cannot be brought: {why}"
            for style, why in islice(self.failures.items(), 1)
        )


def _styles(index: Index, tensors: Sequence[LiveTensor], asked: NameOptions) -> _Styles:
    try:
        family = asked.choose_family(index)
    except UnknownFamilyError:
        return _Styles()
    named: dict[str, Mapping[str, TensorRecipe]] = {}
    failures: dict[str, str] = {}
    try:
        source = find_source_style(family, index.shapes)
    except FamilyError as error:
        return _Styles(family=family, undecided=str(error))
    for style in (CANONICAL, *family.styles):
        if not all(_is_read(family, asked.checkpoint_names(own), style) for own in tensors):
            continue
        try:
            _, made = restyled(index, family, style, source)
        except (FamilyError, UnsupportedError) as error:
            failures[style] = str(error)
            continue
        if all(_is_in(asked.checkpoint_names(own), made) for own in tensors):
            named[style] = made
    shapes = {style: {name: each.shape for name, each in made.items()} for style, made in named.items()}
    shaped = (style for style, each in shapes.items() if all(_is_shaped(own, asked, each) for own in tensors))
    return _Styles(family=family, named=named, shaped=frozenset(shaped), failures=failures)


def _is_in(names: Sequence[str], held: Collection[str], aliases: Collection[str] = ()) -> bool:
    return any(name in held or name in aliases for name in names)


def _is_read(family: Family, names: Sequence[str], style: str) -> bool:
    try:
        return any(family.ignores(name) or family.read(name, style) is not None for name in names)
    except FamilyError:  # a name that can be two parameters
        return False


def _is_shaped(own: LiveTensor, asked: NameOptions, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    shape = next(shapes[name] for name in asked.checkpoint_names(own) if name in shapes)
    try:
        own.part.to_slice(own.name, WEIGHT, shape, own.dtype)
    except ValueError:
        return False
    return True


def reorder_to_optimizer(index: Index, run: LiveRun, asked: LoadRequest, ranks: Ranks) -> Index:
    """`index`, with the states of its optimizer named by the order of the live one, where they need it and it fits.

    Collective. Raises LoadError where both that order and the one inferred fit, and differ.
    """
    if not index.is_numbered or asked.names.source.param_order is not None or run.optimizer is None:
        return index
    rename = asked.options.rename or str
    order: ParamOrder = tuple(tuple(map(rename, group.params)) for group in run.optimizer.groups())
    if any(other != order for other in ranks.share(order)):
        return index  # ranks step parameters of their own: no number means the same on all

    def read() -> Index | None:
        try:
            return index_of(asked.path, source=replace(asked.names.source.without_family(), param_order=order))
        except UsageError:  # it does not fit
            return None

    live = run_together(ranks, read)
    if live is None or index.unnamed is not None:
        return live or index
    if [group.params for group in live.groups] == [group.params for group in index.groups]:
        return index
    name, other = next(
        pair
        for ours, theirs in zip(index.groups, live.groups, strict=True)
        for pair in zip(ours.params, theirs.params, strict=True)
        if pair[0] != pair[1]
    )
    raise LoadError(
        f"{index.path}: the optimizer numbers its parameters, and two orders fit: that of the model, in which the "
        f"states of one are of {name}, and that of the optimizer that is loaded into, in which they are of {other}. "
        "Say which holds: param_order=[[names of each group], ...]"
    )
