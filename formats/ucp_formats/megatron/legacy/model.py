"""The model in the files of all ranks: every stored tensor, which parameter it is, and which part of it.

1. Flatten what a file says of a chunk: older files nest dicts, newer ones are flat.
2. Bring every key into the family's own style, then local numbers of layers and experts to global ones.
3. See what is stored otherwise as what it means: old orders of attention rows, experts packed into one tensor.
4. Match every name with its rule; all names without one, or with two, are told together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ucp.core.index import Extra
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError, listed
from ucp.families.expression import ExpressionError
from ucp.families.family import CANONICAL, Family, Match, Named
from ucp.families.template import Template
from ucp.io.pickle.fields import described, flattened
from ucp_formats.megatron.legacy.files import LegacyRun, SavedRank
from ucp_formats.megatron.legacy.numbers import Chunk, LayerNumbers, count_layers
from ucp_formats.megatron.legacy.views import View, experts_in_one, old_attention_rows, plain
from ucp_formats.megatron.run.family import ChooseFamily
from ucp_formats.megatron.run.modules import modules_shown

__all__ = ["Held", "LegacyModel", "Slot", "Stored", "read_model"]

_EXTRA_STATE = "_extra_state"
"""Last part of a key under which a module keeps what it likes (torch.nn.Module.get_extra_state)."""
_STYLES = ("te", "grouped", "legacy")
"""Naming styles of modules, besides the canonical one."""
_ATTENTION = {"query_key_value": 3, "key_value": 2}
"""Fused projections whose rows had other orders, and the parts they fuse."""
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
class Stored:
    """A tensor of the model as it is stored."""

    slot: Slot
    """Where it stands."""
    ref: TensorRef
    """Its elements."""


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
    stored: list[Stored] = field(default_factory=list)
    """Every tensor, in the order of ranks, chunks and files."""
    held: list[Held] = field(default_factory=list)
    """Every parameter of every tensor, in the same order."""
    matches: dict[str, Match] = field(default_factory=dict)
    """Canonical name to its rule."""
    extras: list[Extra] = field(default_factory=list)
    """What is no tensor of the model."""
    modules: Mapping[str, object] = field(default_factory=dict)
    """What the keys show of the modules of its layers; empty where they do not."""
    notes: list[str] = field(default_factory=list)
    """What was inferred."""


def read_model(run: LegacyRun, choose: ChooseFamily) -> LegacyModel:
    """The model of a run. Raises SourceError, FamilyError, UnknownFamilyError."""
    stored: list[Stored] = []
    extras: list[Extra] = []
    for number, rank in enumerate(run.ranks):
        for chunk, saved in rank.chunks:
            _add((stored, extras), rank, number, chunk, saved)
    if not stored:
        raise MalformedError(f"expected a model in the files of {run.folder}; there is not one tensor in them")
    shapes = {own.slot.key: own.ref.shape for own in stored if run.ranks[own.slot.rank].place.tp == 0}
    family, reasons = choose(shapes, run.arguments.raw, _degrees(run))
    model = LegacyModel(family=family, reasons=reasons, stored=stored, extras=extras)
    keys = dict.fromkeys(own.slot.key for own in stored if not family.ignores(own.slot.key))
    named = {key: _named(family, key) for key in keys}
    numbers = _layer_numbers(run, stored, named)
    for own in stored:
        if own.slot.key in named:
            model.held += _held(own, named[own.slot.key], run, numbers, family)
    model.matches = family.match(dict.fromkeys(own.name for own in model.held))
    model.modules = modules_shown(family, {key: own.canonical for key, own in named.items() if own}, renamed=False)
    return model


def _degrees(run: LegacyRun) -> dict[str, int]:
    grid = run.grid
    return {"tp": grid.tp, "pp": grid.pp, "ep": grid.ep, "etp": grid.etp}


def _add(model: tuple[list[Stored], list[Extra]], rank: SavedRank, number: int, chunk: int, saved: object) -> None:
    """Add what a chunk of one rank holds to `model`: tensors, and what is none."""
    stored, extras = model
    where = f"the model of {rank.path}"
    if not isinstance(saved, dict):
        raise MalformedError(f"expected a dict for {where}; got {described(saved)}")
    strided = []
    for key, value in flattened(saved):
        if key.rpartition(".")[2] == _EXTRA_STATE:
            if not _is_empty(value):
                extras.append(Extra(name=f"extra_state/{rank.name}/{chunk}/{key}", value=value))
        elif isinstance(value, TensorRef):
            stored.append(Stored(slot=Slot(number, chunk, key), ref=value))
            if not value.is_contiguous:
                strided.append(f"{key}: {described(value)}")
        elif value is not None:
            extras.append(Extra(name=f"model/{rank.name}/{chunk}/{key}", value=value))
    if strided:
        raise UnsupportedError(f"{where} holds tensors whose elements are not consecutive:\n{listed(strided)}")


def _is_empty(value: object) -> bool:
    """Whether an extra state says nothing (`None`, or a tensor or buffer without bytes)."""
    return value is None or (isinstance(value, TensorRef) and value.numel == 0) or value in (b"", "")


def _named(family: Family, key: str) -> Named | None:
    """What a key stands for, in one of the styles that files of ranks are written in."""
    for style in (CANONICAL, *(own for own in _STYLES if own in family.styles)):
        found = family.read(key, style)
        if found is not None:
            return found
    return None


def _layer_numbers(run: LegacyRun, stored: list[Stored], named: Mapping[str, Named | None]) -> LayerNumbers:
    chunks = [(pp, vp) for vp in range(run.vpp) for pp in range(run.grid.pp)]
    by_chunk: dict[tuple[int, int], list[str]] = {chunk: [] for chunk in chunks}
    for own in stored:
        name = named.get(own.slot.key)
        if own.slot.key in named:  # layers beyond num_layers have no name, and are to be counted all the same
            read = own.slot.key if name is None else name.canonical
            by_chunk[run.ranks[own.slot.rank].place.pp, own.slot.chunk].append(read)
    return count_layers(by_chunk, num_layers=run.arguments.num_layers)


def _held(own: Stored, named: Named | None, run: LegacyRun, numbers: LayerNumbers, family: Family) -> Iterator[Held]:
    """Parameters in a stored tensor; one without a rule has its key, for `Family.match` to report."""
    if named is None:
        name = _told(own.slot.key, (run.ranks[own.slot.rank].place.pp, own.slot.chunk), numbers)
        yield Held(slot=own.slot, name=name, ref=own.ref, view=plain(own.ref.shape))
        return
    place = run.ranks[own.slot.rank].place
    views = _views(own, named, run, family)
    first = place.ep * _experts_per_rank(run, len(views) if named.stacked else None)
    for number, view in enumerate(views):
        local = Template(named.canonical).filled({"expert": number}) if named.stacked else named.canonical
        name = numbers.renamed(local, (place.pp, own.slot.chunk), first_expert=first)
        name = family.tied_to(name) or name
        yield Held(slot=own.slot, name=name, ref=own.ref, view=view)


def _told(key: str, chunk: Chunk, numbers: LayerNumbers) -> str:
    """A key without a rule, with the number its layer has in the model where that is known: stages have keys alike."""
    firsts = [first for (_, own), first in numbers.firsts.items() if own == chunk]
    if len(firsts) != 1:
        return key
    return _LAYER.sub(lambda found: f"layers.{int(found['number']) + firsts[0]}.", key, count=1)


def _experts_per_rank(run: LegacyRun, found: int | None) -> int:
    """Experts of a layer on one expert-parallel rank."""
    if run.grid.ep == 1:
        return 0
    count = run.arguments.num_experts
    if count is None and found is None:
        raise MalformedError(
            f"expected num_experts in the arguments of {run.ranks[0].path}, where experts lie on {run.grid.ep} ranks"
        )
    return found if count is None else count // run.grid.ep  # type: ignore[return-value]  # one of them is no None


def _views(own: Stored, named: Named, run: LegacyRun, family: Family) -> tuple[View, ...]:
    try:
        if named.stacked or (named.alias is not None and len(named.alias.names) > 1):
            return _packed(own, named, {**_degrees(run), **family.values})
        module = ".".join(own.slot.key.split(".")[:-1]).rpartition(".")[2]
        if run.version < 2.0 and module in _ATTENTION:
            return (_old_rows(own, run, _ATTENTION[module]),)
    except (ValueError, ExpressionError) as error:
        raise MalformedError(f"{own.slot.key} of {own.ref.path}: {error}") from error
    return (plain(own.ref.shape),)


def _packed(own: Stored, named: Named, values: Mapping[str, object]) -> tuple[View, ...]:
    """Views of a tensor that several experts share."""
    alias = named.alias
    if alias is None or named.stacked != ("expert",) or len(alias.names) > 1:
        raise UnsupportedError(
            f"{own.slot.key} of {own.ref.path} is {named.canonical} in a way that files of ranks are not known to have"
        )
    elements = alias.elements(own.ref.shape, values)
    return experts_in_one(elements.shape, elements.strides)


def _old_rows(own: Stored, run: LegacyRun, parts: int) -> View:
    heads = run.arguments.heads
    if heads is None:
        raise ValueError("the order of its rows depends on num_attention_heads, which the arguments do not say")
    return old_attention_rows(own.ref.shape, heads=heads // run.grid.tp, parts=parts, version=run.version)
