"""The model in the files of all ranks: every stored tensor, which parameter it is, and which part of it.

1. Flatten what a file says of a chunk: older files nest dicts, newer ones are flat.
2. Bring every key into the family's own style, then local numbers of layers and experts to global ones.
3. See what is stored otherwise as what it means: old orders of attention rows, experts packed into one tensor.
4. Match every name with its rule; all names without one, or with two, are told together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import choose_family
from ucp.core.index import Extra
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError, listed
from ucp.families.expression import ExpressionError
from ucp.families.family import CANONICAL, Family, Match, Named
from ucp.families.template import Template
from ucp.io.pickle.fields import described, flattened
from ucp_formats.megatron.legacy.files import LegacyRun, SavedRank
from ucp_formats.megatron.legacy.numbers import LayerNumbers, count_layers
from ucp_formats.megatron.legacy.views import View, experts_in_one, old_attention_rows, plain
from ucp_formats.megatron.run.modules import modules_shown
from ucp_formats.megatron.run.stages import Chunk

__all__ = ["Held", "LegacyModel", "Slot", "read_model"]

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
    named = {key: _named(family, key) for key in keys}
    numbers = _layer_numbers(run, stored, named)
    for own in stored.items():
        if own[0].key in named:
            model.held += _held(own, named[own[0].key], run, numbers, family)
    model.matches = family.match(dict.fromkeys(own.name for own in model.held))
    model.modules = modules_shown(family, {key: own.canonical for key, own in named.items() if own}, renamed=False)
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
            if not _is_empty(value):
                yield Extra(name=f"extra_state/{rank.name}/{chunk}/{key}", value=value)
        elif isinstance(value, TensorRef):
            stored[Slot(number, chunk, key)] = value
            if not value.is_contiguous:
                strided.append(f"{key}: {described(value)}")
        elif value is not None:
            yield Extra(name=f"model/{rank.name}/{chunk}/{key}", value=value)
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


def _layer_numbers(run: LegacyRun, stored: Iterable[Slot], named: Mapping[str, Named | None]) -> LayerNumbers:
    by_chunk: dict[Chunk, list[str]] = {(pp, vp): [] for vp in range(run.vpp) for pp in range(run.grid.pp)}
    for slot in stored:
        if slot.key in named:  # layers beyond num_layers have no name, and are to be counted all the same
            name = named[slot.key]
            by_chunk[_chunk(run, slot)].append(slot.key if name is None else name.canonical)
    return count_layers(by_chunk, num_layers=run.arguments.num_layers)


def _chunk(run: LegacyRun, slot: Slot) -> Chunk:
    return run.ranks[slot.rank].place.pp, slot.chunk


def _held(
    stored: tuple[Slot, TensorRef], named: Named | None, run: LegacyRun, numbers: LayerNumbers, family: Family
) -> Iterator[Held]:
    """Parameters in a stored tensor; one without a rule has its key, for `Family.match` to report."""
    slot, ref = stored
    chunk = _chunk(run, slot)
    if named is None:
        yield Held(slot=slot, name=_told(slot.key, chunk, numbers), ref=ref, view=plain(ref.shape))
        return
    views = _views(slot.key, ref, named, run, family)
    first = run.ranks[slot.rank].place.ep * _experts_per_rank(run, len(views) if named.stacked else None)
    for number, view in enumerate(views):
        local = Template(named.canonical).filled({"expert": number}) if named.stacked else named.canonical
        name = numbers.renamed(local, chunk, first_expert=first)
        yield Held(slot=slot, name=family.tied_to(name) or name, ref=ref, view=view)


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


def _views(key: str, ref: TensorRef, named: Named, run: LegacyRun, family: Family) -> tuple[View, ...]:
    try:
        if named.stacked or (named.alias is not None and len(named.alias.names) > 1):
            return _packed(key, ref, named, {**_degrees(run), **family.values})
        module = key.rpartition(".")[0].rpartition(".")[2]
        if run.version < 2.0 and module in _ATTENTION:
            if run.arguments.heads is None:
                raise ValueError("the order of its rows depends on num_attention_heads, which the arguments do not say")
            heads = run.arguments.heads // run.grid.tp
            return (old_attention_rows(ref.shape, heads=heads, parts=_ATTENTION[module], version=run.version),)
    except (ValueError, ExpressionError) as error:
        raise MalformedError(f"{key} of {ref.path}: {error}") from error
    return (plain(ref.shape),)


def _packed(key: str, ref: TensorRef, named: Named, values: Mapping[str, object]) -> tuple[View, ...]:
    """Views of a tensor that several experts share."""
    alias = named.alias
    if alias is None or named.stacked != ("expert",) or len(alias.names) > 1:
        raise UnsupportedError(
            f"{key} of {ref.path} is {named.canonical} in a way that files of ranks are not known to have"
        )
    elements = alias.elements(ref.shape, values)
    return experts_in_one(elements.shape, elements.strides)
