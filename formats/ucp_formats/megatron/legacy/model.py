"""The model in the files of all ranks: every stored tensor, the parameters in it, and their rules.

1. Flatten the state_dict of each chunk: older files nest dicts.
2. Translate each key into a canonical name, and local numbers of layers and experts into global ones.
3. Unpack experts that are stored in one tensor.
4. Match every name with its rule.

Every file numbers its layers from 0. Global numbers follow from counting: chunk 0 of all stages comes before chunk 1 of
any stage (transformer_layer.py: get_transformer_layer_offset). Counting works for uneven stages, too.

>>> names = {(0, 0): ["decoder.layers.0.norm.weight"], (1, 0): ["decoder.layers.0.norm.weight"]}
>>> first_layers = count_layers(names, num_layers=2)
>>> to_global_name("decoder.layers.0.norm.weight", (1, 0), first_layers, first_expert=0)
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
from ucp.errors import MalformedError, UnsupportedError, format_count, format_list
from ucp.families.expression import ExpressionError
from ucp.families.family import Family
from ucp.families.match import Match
from ucp.families.naming import CANONICAL, ParsedName
from ucp.families.rule import Elements
from ucp.families.template import Template
from ucp.io.pickle.fields import describe_value, flatten
from ucp_formats.megatron.legacy.files import LegacyRun, SavedRank
from ucp_formats.megatron.mesh import Chunk
from ucp_formats.megatron.modules import find_modules

_STACK_LAYER = re.compile(r"\A(?P<stack>decoder|encoder)\.layers\.(?P<number>\d+)\.")
"""Example: decoder.layers.12."""
_EXPERT = re.compile(r"\.local_experts\.(?P<number>\d+)\.")
"""Example: .local_experts.3."""
_EXTRA_STATE = "_extra_state"
"""Last part of the key of a module's own state (torch.nn.Module.get_extra_state)."""
_STYLES = ("te", "grouped", "legacy")
"""Naming styles of modules, besides the canonical one."""
_FUSED = re.compile(r"\b(query_)?key_value\.(weight|bias)\Z")
"""Example: self_attention.query_key_value.weight."""
_FIRST_VERSION = 2.0
"""First checkpoint version with rows [heads, 3, head_dim] (checkpointing.py: fix_query_key_value_ordering)."""
_LAYER = re.compile(r"\blayers\.(?P<number>\d+)\.")
"""Example: layers.12."""

FirstLayers = Mapping[tuple[str, Chunk], int]
"""Stack ("decoder") and chunk to the global number of its layer 0."""


def to_global_name(name: str, chunk: Chunk, first_layers: FirstLayers, *, first_expert: int) -> str:
    """The canonical name with global numbers. `first_expert`: global number of expert 0 of the file."""
    layer = _STACK_LAYER.match(name)
    if layer is not None:
        number = int(layer["number"]) + first_layers[layer["stack"], chunk]
        name = f"{layer['stack']}.layers.{number}.{name[layer.end() :]}"
    return _EXPERT.sub(lambda expert: f".local_experts.{int(expert['number']) + first_expert}.", name)


def count_layers(names: Mapping[Chunk, Iterable[str]], *, num_layers: int | None) -> FirstLayers:
    """Global number of the first layer of every chunk, from the canonical local names in each.

    `num_layers`: layers of the model, if recorded. Raises MalformedError if a layer is missing between others of a
    chunk, or if the files have another number of layers than recorded.
    """
    numbers_by_stack: dict[str, dict[Chunk, set[int]]] = {}
    for chunk, local_names in names.items():
        for layer in filter(None, map(_STACK_LAYER.match, local_names)):
            numbers_by_stack.setdefault(layer["stack"], {}).setdefault(chunk, set()).add(int(layer["number"]))
    order = sorted(names, key=lambda chunk: (chunk[1], chunk[0]))
    first_layers: dict[tuple[str, Chunk], int] = {}
    for stack, by_chunk in numbers_by_stack.items():
        counts = [1 + max(by_chunk.get(chunk, {-1})) for chunk in order]
        gaps = [
            f"stage {pp}, chunk {vpp}: {stack}.layers.{number}"
            for (pp, vpp), numbers in by_chunk.items()
            for number in range(max(numbers))
            if number not in numbers
        ]
        if gaps:
            raise MalformedError(
                f"expected consecutive layers in every file; {format_count(len(gaps), 'layer has', 'layers have')} no "
                f"parameters:\n{format_list(gaps)}\n"
                "Copy the files again; a model with layers that have no parameters cannot be numbered"
            )
        if len(numbers_by_stack) == 1 and num_layers not in (None, sum(counts)):
            lines = (f"stage {pp}, chunk {vpp}: {n} layers" for (pp, vpp), n in zip(order, counts, strict=True))
            raise MalformedError(
                f"expected {num_layers} layers, as the arguments say; there are {sum(counts)} in {stack}.layers:\n"
                f"{format_list(lines)}\nFiles of this checkpoint are missing, or are from different runs"
            )
        starts = accumulate(counts, initial=0)
        first_layers |= {(stack, chunk): start for chunk, start in zip(order, starts, strict=False)}
    return first_layers


class Slot(NamedTuple):
    """Identifies a stored tensor of the model, for which the optimizer of its rank has states."""

    rank: int
    """Position of the rank in `LegacyRun.ranks`."""
    chunk: int
    """Chunk of the model."""
    key: str
    """Key in the state_dict of the chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParam:
    """A parameter as one rank stores it: a stored tensor, or one of several experts in it."""

    slot: Slot
    """The stored tensor."""
    name: str
    """Canonical name, with global numbers."""
    ref: TensorRef
    """Elements of the stored tensor."""
    elements: Elements
    """Shape and strides of the parameter in the stored tensor."""
    offset: int = 0
    """Element of the stored tensor, row-major, where the parameter starts."""

    def view(self, ref: TensorRef) -> TensorRef:
        """The parameter's elements in `ref`: the stored tensor, or an optimizer state of the same shape."""
        return ref.strided(self.offset, self.elements.shape, self.elements.strides)


@dataclass(slots=True, kw_only=True)
class LegacyModel:
    """The model in the files of all ranks."""

    family: Family
    """The family, bound to this model."""
    reasons: tuple[str, ...]
    """Why this family was chosen."""
    params: list[RankParam] = field(default_factory=list)
    """Every parameter of every tensor, in the order of ranks, chunks and files."""
    matches: dict[str, Match] = field(default_factory=dict)
    """Canonical name to its rule."""
    extras: list[Extra] = field(default_factory=list)
    """Entries of the state_dicts that are not tensors."""
    modules: Mapping[str, object] = field(default_factory=dict)
    """Arguments of Megatron that select the modules of its layers, inferred from the keys."""


def read_model(run: LegacyRun, options: SourceOptions) -> LegacyModel:
    """The model of a run. Raises SourceError, FamilyError, UnknownFamilyError."""
    refs: dict[Slot, TensorRef] = {}
    extras: list[Extra] = []
    for number, rank in enumerate(run.ranks):
        for chunk, state_dict in rank.chunks:
            extras += _collect_tensors(refs, rank, number, chunk, state_dict)
    if not refs:
        raise MalformedError(f"expected a model in the files of {run.folder}; they hold no tensor")
    shapes = {slot.key: ref.shape for slot, ref in refs.items() if run.ranks[slot.rank].place.tp == 0}
    family, reasons = choose_family(
        names=list(shapes), shapes=shapes, arguments=run.arguments.raw, axes=run.grid.degrees, options=options
    )
    model = LegacyModel(family=family, reasons=reasons, extras=extras)
    keys = dict.fromkeys(slot.key for slot in refs if not family.ignores(slot.key))
    if run.version < _FIRST_VERSION and any(_FUSED.search(key) for key in keys):
        raise UnsupportedError(
            f"expected the rows of fused attention in the order of checkpoint version {_FIRST_VERSION} or later; "
            f"{run.folder} has the order of version {run.version:g}, which Megatron-LM wrote up to 2020. Load it with "
            "Megatron-LM and save it again"
        )
    styles = (CANONICAL, *(style for style in _STYLES if style in family.styles))
    named = {key: next(filter(None, (family.read(key, style) for style in styles)), None) for key in keys}
    by_chunk: dict[Chunk, list[str]] = {(pp, vpp): [] for vpp in range(run.vpp) for pp in range(run.grid.pp)}
    for slot in refs:
        if slot.key in named:  # count layers past num_layers, too, although their keys have no canonical name
            name = named[slot.key]
            by_chunk[_chunk(run, slot)].append(slot.key if name is None else name.canonical)
    first_layers = count_layers(by_chunk, num_layers=run.arguments.num_layers)
    for slot, ref in refs.items():
        if slot.key in named:
            params = _find_params(slot, ref, named[slot.key], run, first_layers=first_layers, family=family)
            model.params += params
    model.matches = family.match(dict.fromkeys(param.name for param in model.params))
    model.modules = find_modules(family, {key: name.canonical for key, name in named.items() if name}, renamed=False)
    return model


def _collect_tensors(
    refs: dict[Slot, TensorRef], rank: SavedRank, number: int, chunk: int, state_dict: object
) -> Iterator[Extra]:
    """Add the tensors of a chunk of one rank to `refs`; yield its other entries as extras."""
    where = f"the model of {rank.model.path}"
    if not isinstance(state_dict, dict):
        raise MalformedError(f"expected a dict for {where}; got {describe_value(state_dict)}")
    strided = []
    for key, value in flatten(state_dict):
        if key.rpartition(".")[2] == _EXTRA_STATE:
            is_empty = value is None or (isinstance(value, TensorRef) and value.numel == 0) or value in (b"", "")
            if not is_empty:
                yield Extra(name=f"extra_state/{rank.name}/{chunk}/{key}", value=value)
        elif isinstance(value, TensorRef):
            refs[Slot(number, chunk, key)] = value
            if not value.is_contiguous:
                strided.append(f"{key}: {describe_value(value)}")
        elif value is not None:
            yield Extra(name=f"model/{rank.name}/{chunk}/{key}", value=value)
    if strided:
        raise UnsupportedError(f"{where} holds tensors whose elements are not consecutive:\n{format_list(strided)}")


def _chunk(run: LegacyRun, slot: Slot) -> Chunk:
    return run.ranks[slot.rank].place.pp, slot.chunk


def _find_params(
    slot: Slot, ref: TensorRef, named: ParsedName | None, run: LegacyRun, *, first_layers: FirstLayers, family: Family
) -> Iterator[RankParam]:
    """Parameters in a stored tensor; one without a rule keeps its key, which `Family.match` reports."""
    chunk = _chunk(run, slot)
    plain = Elements(ref.shape, contiguous_strides(ref.shape))
    if named is None:
        starts = [start for (_, of_chunk), start in first_layers.items() if of_chunk == chunk]
        key = slot.key
        if len(starts) == 1:  # report the global layer number: all stages have the same keys
            key = _LAYER.sub(lambda layer: f"layers.{int(layer['number']) + starts[0]}.", key, count=1)
        yield RankParam(slot=slot, name=key, ref=ref, elements=plain)
        return
    elements = _stacked_elements(slot.key, ref, named, {**run.grid.degrees, **family.values})
    count = 1 if elements is None else elements.shape[0]
    first_expert = 0
    if run.grid.ep > 1:
        num_experts = run.arguments.num_experts
        if num_experts is None and not named.stacked:
            raise MalformedError(
                f"expected num_experts in the arguments of {run.ranks[0].model.path}, as ep={run.grid.ep}; got none"
            )
        local_experts = count if num_experts is None else num_experts // run.grid.ep
        first_expert = run.ranks[slot.rank].place.ep * local_experts
    for number in range(count):
        local = Template(named.canonical).filled({"expert": number}) if named.stacked else named.canonical
        name = to_global_name(local, chunk, first_layers, first_expert=first_expert)
        name = family.find_tied(name) or name
        if elements is None:
            yield RankParam(slot=slot, name=name, ref=ref, elements=plain)
        else:
            expert = Elements(elements.shape[1:], elements.strides[1:])
            yield RankParam(slot=slot, name=name, ref=ref, elements=expert, offset=number * elements.strides[0])


def _stacked_elements(key: str, ref: TensorRef, named: ParsedName, values: Mapping[str, object]) -> Elements | None:
    """Shape and strides of the experts stacked in a stored tensor; None if the tensor is a single parameter."""
    alias = named.alias
    if not named.stacked and (alias is None or len(alias.names) == 1):
        return None
    if alias is None or named.stacked != ("expert",) or len(alias.names) > 1:
        raise UnsupportedError(
            f"expected {key} in {ref.path} to be all of {named.canonical}, or the stacked experts of a layer; its name "
            "says otherwise"
        )
    try:
        return alias.elements(ref.shape, values)
    except (ValueError, ExpressionError) as error:
        raise MalformedError(f"{key} of {ref.path}: {error}") from error
