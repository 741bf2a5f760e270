"""The model in the files of all ranks: every stored tensor, which parameter it is, and which part of it.

1. Flatten what a file says of a chunk: older files nest dicts, newer ones are flat.
2. Bring every key into the family's own style, then local numbers of layers and experts to global ones.
3. Take experts apart that are packed into one tensor.
4. Match every name with its rule; all names without one, or with two, are told together.

A file numbers its layers from 0. Which they are in the model follows from the layers that are there: chunks of a
virtual pipeline interleave, so chunk 0 of all stages comes before chunk 1 of any (transformer_layer.py:
get_transformer_layer_offset). Counting is stronger than the formula: it holds for uneven stages, too.

>>> names = {(0, 0): ["decoder.layers.0.norm.weight"], (1, 0): ["decoder.layers.0.norm.weight"]}
>>> numbers = count_layers(names, num_layers=2)
>>> numbers.renamed("decoder.layers.0.norm.weight", (1, 0), first_expert=0)
'decoder.layers.1.norm.weight'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import choose_family
from ucp.core.index import Extra
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.core.union import StoredShard
from ucp.errors import MalformedError, UnsupportedError, listed
from ucp.families.expression import ExpressionError
from ucp.families.family import Family
from ucp.families.match import Match
from ucp.families.naming import CANONICAL, ParsedName
from ucp.families.template import Template
from ucp.io.pickle.fields import described, flattened
from ucp_formats.megatron.legacy.files import LegacyRun, SavedRank
from ucp_formats.megatron.mesh import Chunk
from ucp_formats.megatron.modules import find_modules

_STACK_LAYER = re.compile(r"\A(?P<stack>decoder|encoder)\.layers\.(?P<number>\d+)\.")
"""Example: decoder.layers.12."""
_EXPERT = re.compile(r"\.local_experts\.(?P<number>\d+)\.")
"""Example: .local_experts.3."""


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """The first layer of every chunk of every stack of layers."""

    firsts: Mapping[tuple[str, Chunk], int]
    """Stack ("decoder") and chunk to the global number of its layer 0."""

    def renamed(self, name: str, chunk: Chunk, *, first_expert: int) -> str:
        """A canonical name with global numbers. `first_expert`: global number of expert 0 of the file."""
        layer = _STACK_LAYER.match(name)
        if layer is not None:
            number = int(layer["number"]) + self.firsts[layer["stack"], chunk]
            name = f"{layer['stack']}.layers.{number}.{name[layer.end() :]}"
        return _EXPERT.sub(lambda found: f".local_experts.{int(found['number']) + first_expert}.", name)


def count_layers(names: Mapping[Chunk, Iterable[str]], *, num_layers: int | None) -> LayerNumbers:
    """Numbers that follow from the canonical local names of every chunk.

    `num_layers`: layers of the model, where the arguments say so.

    Raises
    ------
    MalformedError
        A chunk lacks a layer in between, or there are more or fewer layers than the model has.
    """
    there: dict[str, dict[Chunk, set[int]]] = {}
    for chunk, own in names.items():
        for name in own:
            found = _STACK_LAYER.match(name)
            if found is not None:
                there.setdefault(found["stack"], {}).setdefault(chunk, set()).add(int(found["number"]))
    order = sorted(names, key=lambda chunk: (chunk[1], chunk[0]))
    firsts: dict[tuple[str, Chunk], int] = {}
    for stack, by_chunk in there.items():
        counts = [1 + max(by_chunk.get(chunk, {-1})) for chunk in order]
        lacking = [
            f"{_chunk_label(chunk)}: {stack}.layers.{number}"
            for chunk, numbers in by_chunk.items()
            for number in range(max(numbers))
            if number not in numbers
        ]
        if lacking:
            raise MalformedError(
                f"expected layers without a gap in every file; {len(lacking)} have no parameter:\n{listed(lacking)}\n"
                "Copy the files again; where the model has layers without parameters, their numbers are not known"
            )
        if len(there) == 1 and num_layers not in (None, sum(counts)):
            lines = (f"{_chunk_label(chunk)}: {count} layers" for chunk, count in zip(order, counts, strict=True))
            raise MalformedError(
                f"expected {num_layers} layers, as the arguments say; there are {sum(counts)} in {stack}.layers:\n"
                f"{listed(lines)}\nFiles of this checkpoint are missing, or are from different runs"
            )
        begins = accumulate(counts, initial=0)
        firsts |= {(stack, chunk): first for chunk, first in zip(order, begins, strict=False)}
    return LayerNumbers(firsts)


def _chunk_label(chunk: Chunk) -> str:
    return f"stage {chunk[0]}, chunk {chunk[1]}"


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor of a rank's file as a parameter: all of it, or one of several experts in it; nothing is moved."""

    shape: Shape
    """Elements per dim of the parameter, as the rank holds it."""
    offset: int
    """Element of the stored tensor, row-major, where it starts."""
    strides: Shape
    """Elements to step in the stored tensor, per dim."""

    @classmethod
    def plain(cls, shape: Shape) -> View:
        """The stored tensor is the parameter."""
        return cls(shape=shape, offset=0, strides=contiguous_strides(shape))

    def of(self, ref: TensorRef, coords: Mapping[str, int]) -> StoredShard:
        """What the rank at `coords` stored of the parameter; `ref`: the stored tensor, consecutive."""
        return StoredShard(coords, ref.strided(self.offset, self.shape, self.strides))


_EXTRA_STATE = "_extra_state"
"""Last part of a key under which a module keeps what it likes (torch.nn.Module.get_extra_state)."""
_STYLES = ("te", "grouped", "legacy")
"""Naming styles of modules, besides the canonical one."""
_FUSED = re.compile(r"\b(query_)?key_value\.(weight|bias)\Z")
"""Example: self_attention.query_key_value.weight."""
_FIRST_VERSION = 2.0
"""Version of the checkpoint since which rows are [heads, 3, head_dim] (checkpointing.py:
fix_query_key_value_ordering)."""
_LAYER = re.compile(r"\blayers\.(?P<number>\d+)\.")
"""Example: layers.12."""


class Slot(NamedTuple):
    """One tensor of the model in one file: what the optimizer has states of."""

    rank: int
    """Number of the rank's files."""
    chunk: int
    """Chunk of the model."""
    key: str
    """Key in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a stored tensor, or a part of it, is to the model."""

    slot: Slot
    """The stored tensor."""
    name: str
    """Canonical name, with global numbers."""
    ref: TensorRef
    """The stored elements."""
    view: View
    """Which of them the parameter is."""


@dataclass(slots=True, kw_only=True)
class LegacyModel:
    """The model as all ranks hold it."""

    family: Family
    """The family, bound to this model."""
    reasons: tuple[str, ...]
    """Why it is that family."""
    held: list[Held] = field(default_factory=list)
    """Every parameter of every tensor, in the order of ranks, chunks and files."""
    matches: dict[str, Match] = field(default_factory=dict)
    """Canonical name to its rule."""
    extras: list[Extra] = field(default_factory=list)
    """What is no tensor of the model."""
    modules: Mapping[str, object] = field(default_factory=dict)
    """What the keys show of the modules of its layers; empty where they do not."""


def read_model(run: LegacyRun, options: SourceOptions) -> LegacyModel:
    """The model of a run. Raises SourceError, FamilyError, UnknownFamilyError."""
    stored: dict[Slot, TensorRef] = {}
    extras: list[Extra] = []
    for number, rank in enumerate(run.ranks):
        for chunk, saved in rank.chunks:
            extras += _add(stored, rank, number, chunk, saved)
    if not stored:
        raise MalformedError(f"expected a model in the files of {run.folder}; there is not one tensor in them")
    shapes = {slot.key: ref.shape for slot, ref in stored.items() if run.ranks[slot.rank].place.tp == 0}
    family, reasons = choose_family(
        names=list(shapes), shapes=shapes, arguments=run.arguments.raw, axes=_degrees(run), options=options
    )
    model = LegacyModel(family=family, reasons=reasons, extras=extras)
    keys = dict.fromkeys(slot.key for slot in stored if not family.ignores(slot.key))
    if run.version < _FIRST_VERSION and any(_FUSED.search(key) for key in keys):
        raise UnsupportedError(
            f"expected the rows of fused attention in the order of checkpoint version {_FIRST_VERSION} or later; those "
            f"of {run.folder} have that of {run.version:g}, which Megatron-LM wrote up to 2020. Load it with "
            "Megatron-LM and save it again"
        )
    styles = (CANONICAL, *(style for style in _STYLES if style in family.styles))
    named = {key: next(filter(None, (family.read(key, style) for style in styles)), None) for key in keys}
    by_chunk: dict[Chunk, list[str]] = {(pp, vp): [] for vp in range(run.vpp) for pp in range(run.grid.pp)}
    for slot in stored:
        if slot.key in named:  # layers beyond num_layers have no name, and are to be counted all the same
            name = named[slot.key]
            by_chunk[_chunk(run, slot)].append(slot.key if name is None else name.canonical)
    numbers = count_layers(by_chunk, num_layers=run.arguments.num_layers)
    for own in stored.items():
        if own[0].key in named:
            model.held += _held(own, named[own[0].key], run, numbers, family)
    model.matches = family.match(dict.fromkeys(own.name for own in model.held))
    model.modules = find_modules(family, {key: own.canonical for key, own in named.items() if own}, renamed=False)
    return model


def _degrees(run: LegacyRun) -> dict[str, int]:
    grid = run.grid
    return {"tp": grid.tp, "pp": grid.pp, "ep": grid.ep, "etp": grid.etp}


def _add(stored: dict[Slot, TensorRef], rank: SavedRank, number: int, chunk: int, saved: object) -> Iterator[Extra]:
    """Add the tensors that a chunk of one rank holds to `stored`; gives what is none."""
    where = f"the model of {rank.path}"
    if not isinstance(saved, dict):
        raise MalformedError(f"expected a dict for {where}; got {described(saved)}")
    strided = []
    for key, value in flattened(saved):
        if key.rpartition(".")[2] == _EXTRA_STATE:
            is_empty = value is None or (isinstance(value, TensorRef) and value.numel == 0) or value in (b"", "")
            if not is_empty:
                yield Extra(name=f"extra_state/{rank.name}/{chunk}/{key}", value=value)
        elif isinstance(value, TensorRef):
            stored[Slot(number, chunk, key)] = value
            if not value.is_contiguous:
                strided.append(f"{key}: {described(value)}")
        elif value is not None:
            yield Extra(name=f"model/{rank.name}/{chunk}/{key}", value=value)
    if strided:
        raise UnsupportedError(f"{where} holds tensors whose elements are not consecutive:\n{listed(strided)}")


def _chunk(run: LegacyRun, slot: Slot) -> Chunk:
    return run.ranks[slot.rank].place.pp, slot.chunk


def _held(
    stored: tuple[Slot, TensorRef], named: ParsedName | None, run: LegacyRun, numbers: LayerNumbers, family: Family
) -> Iterator[Held]:
    """Parameters in a stored tensor; one without a rule has its key, for `Family.match` to report."""
    slot, ref = stored
    chunk = _chunk(run, slot)
    if named is None:
        firsts = [first for (_, own), first in numbers.firsts.items() if own == chunk]
        key = slot.key
        if len(firsts) == 1:  # stages have keys alike: with the number that its layer has in the model
            key = _LAYER.sub(lambda layer: f"layers.{int(layer['number']) + firsts[0]}.", key, count=1)
        yield Held(slot=slot, name=key, ref=ref, view=View.plain(ref.shape))
        return
    views = _views(slot.key, ref, named, {**_degrees(run), **family.values})
    first = 0
    if run.grid.ep > 1:
        count = run.arguments.num_experts
        if count is None and not named.stacked:
            raise MalformedError(
                f"expected num_experts in the arguments of {run.ranks[0].path}, where experts lie on {run.grid.ep} "
                "ranks"
            )
        first = run.ranks[slot.rank].place.ep * (len(views) if count is None else count // run.grid.ep)
    for number, view in enumerate(views):
        local = Template(named.canonical).filled({"expert": number}) if named.stacked else named.canonical
        name = numbers.renamed(local, chunk, first_expert=first)
        yield Held(slot=slot, name=family.find_tied(name) or name, ref=ref, view=view)


def _views(key: str, ref: TensorRef, named: ParsedName, values: Mapping[str, object]) -> tuple[View, ...]:
    """What a stored tensor holds: a parameter, or that of every expert of a layer. Raises MalformedError."""
    alias = named.alias
    if not named.stacked and (alias is None or len(alias.names) == 1):
        return (View.plain(ref.shape),)
    if alias is None or named.stacked != ("expert",) or len(alias.names) > 1:
        raise UnsupportedError(
            f"{key} of {ref.path} is {named.canonical} in a way that files of ranks are not known to have"
        )
    try:
        elements = alias.elements(ref.shape, values)
    except (ValueError, ExpressionError) as error:
        raise MalformedError(f"{key} of {ref.path}: {error}") from error
    each, *strides = elements.strides
    shape = elements.shape[1:]
    return tuple(View(shape=shape, offset=at * each, strides=tuple(strides)) for at in range(elements.shape[0]))
