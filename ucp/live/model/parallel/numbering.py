"""Names in the whole model, for modules of pipeline stages and expert-parallel ranks, which may number from 0.

1. `survey_numbers` lists the layers and experts of a rank's model, by the numbers in its names; ranks share that;
2. `name_globally` finds whether these already are numbers in the whole model, or count from 0 on every stage, and gives
   every tensor its name in the whole model.

If the module of a layer has an attribute `layer_number` (Megatron, from 1), that takes precedence over names. The
layers of chunk c follow those of chunk c - 1 of all stages, as in interleaved pipelines.

>>> _find_offsets({(0, 0): (0, 1), (0, 1): (0, 1, 2)}, None)
{(0, 0): 0, (0, 1): 2}
>>> _find_offsets({(0, 0): (0, 1), (0, 1): (2, 3)}, 4)
{(0, 0): 0, (0, 1): 0}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ucp.errors import LoadError, UsageError, format_count, format_list
from ucp.live.adapters import LiveModel
from ucp.live.model.parallel.experts import ExpertMap
from ucp.live.parts import LiveTensor
from ucp.live.run.mesh import RunMesh

_EXPERT = re.compile(r"(.*?(?:^|\.)(?:local_)?experts\.)((?:[\w.]*(?:weight|bias))?)(\d+)(?=\.|$)")
"""`mlp.experts.3.w1`, `mlp.experts.local_experts.3.linear_fc1`, and `mlp.experts.linear_fc1.weight3`."""
_EXPERT_LISTS = ("experts", "local_experts")

_NumbersByPath: TypeAlias = Mapping[tuple[int, str], tuple[int, ...]]
"""(Chunk, path before a number) to the numbers there."""
_NumbersByPlace: TypeAlias = Mapping[tuple[int, int], tuple[int, ...]]
"""(Chunk, stage or expert-parallel rank) to the numbers there."""
_Renumbering: TypeAlias = Mapping[tuple[int, str], Mapping[int, int]]
"""(Chunk, path before a number) to a map from the number on this rank to that in the whole model."""
_Find: TypeAlias = Callable[[str], tuple[str, int] | None]
"""`find_layer` or `find_expert`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberSurvey:
    """Numbers in the names of a rank's model."""

    layers: _NumbersByPath
    """Layers, by the path in front of the number."""
    declared: _NumbersByPath
    """`layer_number` of the modules of those layers, counted from 0, in the same order."""
    experts: _NumbersByPath
    """Experts, by the path in front of the number, in which layers are numbered as on the rank."""
    shared: tuple[str, ...]
    """Tensors that stages share, as Megatron marks them."""


def survey_numbers(model: LiveModel) -> NumberSurvey:
    """The numbers in the names of this rank's model, for the other ranks."""
    layers: dict[tuple[int, str], set[int]] = {}
    experts: dict[tuple[int, str], set[int]] = {}
    for name in (name for tensor in model.tensors for name in tensor.names):
        chunk, local_name = _split_chunk(name, model.chunks)
        for numbers, match in ((layers, find_layer(local_name)), (experts, find_expert(local_name))):
            if match is not None:
                numbers.setdefault((chunk, match[0]), set()).add(match[1])
    declared: dict[tuple[int, str], tuple[int, ...]] = {}
    for (chunk, path), members in layers.items():
        prefix = f"{chunk}.{path}" if model.chunks > 1 else path
        layer_numbers = [model.layer_numbers.get(f"{prefix}{number}") for number in sorted(members)]
        if None not in layer_numbers:
            declared[chunk, path] = tuple(number - 1 for number in layer_numbers if number is not None)
    shared = (name for name, tensor in model.handles.items() if getattr(tensor, "shared_embedding", False))
    return NumberSurvey(
        layers={key: tuple(sorted(members)) for key, members in layers.items()},
        declared=declared,
        experts={key: tuple(sorted(members)) for key, members in experts.items()},
        shared=tuple(_split_chunk(name, model.chunks)[1] for name in shared),
    )


def name_globally(
    model: LiveModel,
    surveys: Sequence[NumberSurvey],
    *,
    mesh: RunMesh,
    rank: int,
    experts: ExpertMap,
    stored: Collection[str],
    rename: Callable[[str], str] | None,
) -> LiveModel:
    """The model, with the names of its tensors in the whole model. `stored`: names in the checkpoint.

    `rename`: from a name in the whole model to one of `stored`. Raises LoadError if the numbers of stages or
    expert-parallel ranks are not consecutive, UsageError if chunks are not those of the topology.
    """
    topology, chunks = mesh.topology, model.chunks
    vpp, pp = (1, 1) if topology is None else (topology.vpp, topology.pp)
    if (vpp > 1 and chunks != vpp) or (chunks > 1 and pp == 1):
        wanted = f"{vpp} modules, as vpp={vpp} says"
        wanted = "a topology with pp above 1 for a list of modules" if vpp == 1 else wanted
        raise UsageError(f"expected {wanted}; got {format_count(chunks, 'module')} and {topology or 'no topology'}")
    if topology is None or (topology.pp == topology.ep == 1 and not experts.layers):
        return model
    numbering = _Numbering(model, surveys, mesh=mesh, rank=rank, experts=experts, stored=stored, rename=rename)
    layers = numbering.number_layers()
    expert_numbers = numbering.number_experts(layers)
    shared = {name for survey in surveys for name in survey.shared}
    tensors = []
    for tensor in model.tensors:
        keys = [_split_chunk(name, chunks) for name in tensor.names]
        names = tuple(_renumber(chunk, name, layers, expert_numbers) for chunk, name in keys)
        if shared.intersection(names):
            names += tuple(sorted(shared.difference(names)))
        tensors.append(replace(tensor, assigned_names=names))
    return replace(model, tensors=tuple(tensors))


def strip_chunks(model: LiveModel) -> list[LiveTensor]:
    """The tensors of the model, by their names in their chunk."""
    chunks = model.chunks
    return [
        replace(tensor, names=tuple(_split_chunk(name, chunks)[1] for name in tensor.names)) for tensor in model.tensors
    ]


def find_layer(name: str) -> tuple[str, int] | None:
    """The path in front of the first number that is not that of an expert, and the number.

    >>> find_layer("decoder.layers.3.mlp.experts.5.w1"), find_layer("embed.weight")
    (('decoder.layers.', 3), None)
    """
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isascii() and part.isdigit() and (position == 0 or parts[position - 1] not in _EXPERT_LISTS):
            return "".join(f"{component}." for component in parts[:position]), int(part)
    return None


def find_expert(name: str) -> tuple[str, int] | None:
    """The path in front of the number of an expert, and the number.

    >>> find_expert("mlp.experts.local_experts.5.w1"), find_expert("mlp.experts.w1")
    (('mlp.experts.local_experts.', 5), None)
    """
    match = _EXPERT.match(name)
    return (match[1], int(match[3])) if match else None


def _split_chunk(name: str, chunks: int) -> tuple[int, str]:
    if chunks == 1:
        return 0, name
    chunk, _, local_name = name.partition(".")
    return int(chunk), local_name


class _Numbering:
    """The numbers of this rank's layers and experts in the whole model, from the surveys of all ranks."""

    def __init__(
        self,
        model: LiveModel,
        surveys: Sequence[NumberSurvey],
        *,
        mesh: RunMesh,
        rank: int,
        experts: ExpertMap,
        stored: Collection[str],
        rename: Callable[[str], str] | None,
    ) -> None:
        self._chunks, self._surveys, self._survey = model.chunks, surveys, surveys[rank]
        self._mesh, self._experts, self._rename = mesh, experts, rename or str
        self._samples: dict[str, str] = {}
        """Path in front of numbers, as this rank has it, to a name that begins with it."""
        self._stored: dict[_Find, dict[str, set[int]]] = {find_layer: {}, find_expert: {}}
        """Path in front of numbers, in the checkpoint, to these numbers."""
        for find, numbers in self._stored.items():
            for name in (name for tensor in strip_chunks(model) for name in tensor.names):
                if match := find(name):
                    self._samples.setdefault(match[0], name)
            for path, number in filter(None, map(find, stored)):
                numbers.setdefault(path, set()).add(number)

    def number_layers(self) -> _Renumbering:
        """The numbers of this rank's layers in the whole model."""
        layers: dict[tuple[int, str], Mapping[int, int]] = {}
        errors: dict[str, None] = {}
        ranks = range(len(self._surveys))
        for (chunk, path), numbers in self._survey.layers.items():
            try:
                places = self._collect("pp", lambda survey: survey.layers, path, ranks)
                declared = self._collect("pp", lambda survey: survey.declared, path, ranks)
            except ValueError as error:
                errors[f"{path}N: {error}"] = None
                continue
            are_final = declared.keys() == places.keys()
            places, count = declared if are_final else places, self._count(find_layer, path, path)
            offsets = _find_offsets(places, count, are_final=are_final)
            if offsets is None:
                description = _describe("stage", places)
                errors[f"{path}N: {description}; the checkpoint has {count or 'none of that name'}"] = None
                continue
            place = chunk, self._mesh.coords["pp"]
            shifted = (number + offsets[place] for number in places[place])
            layers[chunk, path] = dict(zip(numbers, shifted, strict=True))
        if errors:
            raise LoadError(
                "expected stages to number layers consecutively through all stages, or each from 0; got\n"
                f"{format_list(list(errors))}\nSet layer_number on the module of each layer, as Megatron does (from 1; "
                "the same on stages that hold the same layer)"
            )
        return layers

    def number_experts(self, layers: _Renumbering) -> _Renumbering:
        """The numbers of this rank's experts in the whole model."""
        experts: dict[tuple[int, str], Mapping[int, int]] = {}
        errors: dict[str, None] = {}
        for (chunk, path), numbers in self._survey.experts.items():
            global_path = _renumber(chunk, path, layers, {})
            try:
                global_numbers = self._number_experts_of(chunk, path, global_path)
                experts[chunk, path] = dict(zip(numbers, global_numbers, strict=True))
            except ValueError as error:
                errors[f"{global_path}N: {error}"] = None
        if errors:
            raise LoadError(
                "expected expert-parallel ranks to number experts consecutively through all ranks, or each from 0; "
                f"got\n{format_list(list(errors))}\nIf experts are assigned otherwise, pass placement={{expert: ranks}}"
            )
        return experts

    def _number_experts_of(self, chunk: int, path: str, global_path: str) -> Sequence[int]:
        """Numbers in the whole model of the experts under a path. Raises ValueError if they do not fit together."""
        coords = self._mesh.coords
        peers = [r for r in range(len(self._surveys)) if self._mesh.coords_of(r)["pp"] == coords["pp"]]
        collected = self._collect("ep", lambda survey: survey.experts, path, peers)
        places = {place: numbers for place, numbers in collected.items() if place[0] == chunk}
        place, layer = (chunk, coords["ep"]), find_layer(global_path)
        order = self._experts.find_order(layer=layer[1] if layer else None, ep=place[1])
        numbers = places[place]
        if order is None:
            count = self._count(find_expert, path, global_path)
            offsets = _find_offsets(places, count)
            if offsets is None:
                raise ValueError(f"{_describe('ep rank', places)}; the checkpoint has {count or 'none of that name'}")
            return [number + offsets[place] for number in numbers]
        if len(order) == len(numbers) and _are_local(places):
            return order
        if set(order) == set(numbers):
            return numbers
        raise ValueError(
            f"{_describe('ep rank', places)}; placement= assigns {_format_numbers(order)} to ep rank {place[1]}"
        )

    def _collect(
        self, axis: str, select: Callable[[NumberSurvey], _NumbersByPath], path: str, ranks: Iterable[int]
    ) -> _NumbersByPlace:
        """Numbers under a path by chunk and coordinate. Raises ValueError if ranks of one coordinate differ."""
        places: dict[tuple[int, int], tuple[int, ...]] = {}
        for rank in ranks:
            by_path, coord = select(self._surveys[rank]), self._mesh.coords_of(rank)[axis]
            for chunk in (chunk for chunk in range(self._chunks) if (chunk, path) in by_path):
                numbers = by_path[chunk, path]
                other = places.setdefault((chunk, coord), numbers)
                if other != numbers:
                    raise ValueError(
                        f"rank {rank} has {_format_numbers(numbers)}, and another rank with {axis}={coord} has "
                        f"{_format_numbers(other)}"
                    )
        return dict(sorted(places.items()))

    def _count(self, find: _Find, path: str, global_path: str) -> int | None:
        """How many numbers the checkpoint has under `path` (`global_path` in the whole model); None if it has none."""
        match = find(self._rename(global_path + self._samples[path].removeprefix(path)))
        return len(self._stored[find].get(match[0], ())) or None if match else None


def _are_local(places: _NumbersByPlace) -> bool:
    """Whether the numbers of every place begin at 0."""
    return all(numbers == tuple(range(len(numbers))) for numbers in places.values())


def _find_offsets(
    places: _NumbersByPlace, count: int | None, *, are_final: bool = False
) -> dict[tuple[int, int], int] | None:
    """What to add to the numbers of each place; None if they are not consecutive. `count`: numbers in the checkpoint.

    `are_final`: whether they already are numbers in the whole model.
    """
    numbers = sorted(number for members in places.values() for number in members)
    has_all = are_final and count is not None and all(members == tuple(range(count)) for members in places.values())
    if numbers == [*range(len(numbers))] or has_all or (len(places) == 1 and not are_final):
        return dict.fromkeys(places, 0)
    if are_final or not _are_local(places) or count not in (None, len(numbers)):
        return None
    offsets, total = {}, 0
    for place in sorted(places):
        offsets[place] = total
        total += len(places[place])
    return offsets


def _renumber(chunk: int, name: str, layers: _Renumbering, experts: _Renumbering) -> str:
    """A name with its numbers in the whole model."""
    match, layer = _EXPERT.match(name), find_layer(name)
    renumbered = name
    if match and (chunk, match[1]) in experts:
        number = experts[chunk, match[1]][int(match[3])]
        renumbered = f"{match[1]}{match[2]}{number}{name[match.end() :]}"
    if layer is not None and (chunk, layer[0]) in layers:
        path, number = layer
        renumbered = f"{path}{layers[chunk, path][number]}{renumbered[len(path) + len(str(number)) :]}"
    return renumbered


def _describe(what: str, places: _NumbersByPlace) -> str:
    has_chunks = len({chunk for chunk, _ in places}) > 1
    return ", ".join(
        f"{what} {coord}{f' chunk {chunk}' if has_chunks else ''} {_format_numbers(numbers)}"
        for (chunk, coord), numbers in places.items()
    )


def _format_numbers(numbers: Sequence[int]) -> str:
    if numbers and numbers[-1] - numbers[0] > 1 and [*numbers] == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{numbers[0]}..{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
