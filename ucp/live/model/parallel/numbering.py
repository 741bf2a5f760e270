"""Names in the whole model of what stages, their chunks and expert-parallel ranks number from 0.

1. `survey` says which layers and experts a rank's model has, by the numbers in its names; ranks share that;
2. `Numbering.named` finds whether those are numbers of the whole model already, or count from 0 on every stage, and
   gives every tensor its name in the whole model.

A layer's module may say its number itself (Megatron's `layer_number`, from 1); that goes before what names say. Chunk c
of stage s comes after chunk c - 1 of all stages, as pipelines interleave.

>>> _added({(0, 0): (0, 1), (0, 1): (0, 1, 2)}, None)
{(0, 0): 0, (0, 1): 2}
>>> _added({(0, 0): (0, 1), (0, 1): (2, 3)}, 4)
{(0, 0): 0, (0, 1): 0}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from ucp.errors import LoadError, UsageError, listed
from ucp.live.adapters import LiveModel
from ucp.live.model.parallel.experts import ExpertMap
from ucp.live.parts import LiveTensor
from ucp.live.run.mesh import RunMesh

_EXPERT = re.compile(r"(.*?(?:^|\.)(?:local_)?experts\.)((?:[\w.]*(?:weight|bias))?)(\d+)(?=\.|$)")
"""`mlp.experts.3.w1`, `mlp.experts.local_experts.3.linear_fc1`, and `mlp.experts.linear_fc1.weight3`."""
_MODULE_LISTS = ("experts", "local_experts")

Place: TypeAlias = tuple[int, int]
"""Chunk and stage, or chunk and expert-parallel rank."""
Held: TypeAlias = Mapping[tuple[int, str], tuple[int, ...]]
"""Chunk, and path that numbers follow, to the numbers that follow it."""
Places: TypeAlias = Mapping[Place, tuple[int, ...]]
"""Numbers at each place."""
Numbers: TypeAlias = Mapping[tuple[int, str], Mapping[int, int]]
"""Chunk and path to what number in the whole model each number is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Numbers in the names of a rank's model."""

    layers: Held
    """Layers, by the path in front of the number."""
    said: Held
    """Numbers from 0 that the modules of those layers say themselves, in the same order."""
    experts: Held
    """Experts, by the path in front of the number, layers numbered as the rank does."""
    shared: tuple[str, ...]
    """Tensors that stages share, as Megatron marks them."""


def survey_numbers(model: LiveModel) -> Survey:
    """What a rank tells the others."""
    layers: dict[tuple[int, str], set[int]] = {}
    experts: dict[tuple[int, str], set[int]] = {}
    for name in (name for own in model.tensors for name in own.names):
        chunk, path = _of_chunk(name, model.chunks)
        if (layer := layer_in(path)) is not None:
            layers.setdefault((chunk, layer[0]), set()).add(layer[1])
        if (expert := expert_in(path)) is not None:
            experts.setdefault((chunk, expert[0]), set()).add(expert[1])
    said: dict[tuple[int, str], tuple[int, ...]] = {}
    for (chunk, path), numbers in layers.items():
        prefix = f"{chunk}." if model.chunks > 1 else ""
        own = [model.layer_numbers.get(f"{prefix}{path}{number}") for number in sorted(numbers)]
        said[chunk, path] = tuple(number - 1 for number in own if number is not None)
    return Survey(
        layers={key: tuple(sorted(numbers)) for key, numbers in layers.items()},
        said={key: own for key, own in said.items() if len(own) == len(layers[key])},
        experts={key: tuple(sorted(numbers)) for key, numbers in experts.items()},
        shared=tuple(
            _of_chunk(name, model.chunks)[1]
            for name, own in model.handles.items()
            if getattr(own, "shared_embedding", False)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """What is known of the numbers of all ranks."""

    surveys: Sequence[Survey]
    """What each has."""
    mesh: RunMesh
    """Where each is."""
    rank: int
    """This one."""
    experts: ExpertMap
    """Who holds which experts, where the user says."""
    chunks: int = 1
    """Modules of every rank."""

    def name_globally(self, model: LiveModel, stored: Iterable[str], rename: Callable[[str], str] | None) -> LiveModel:
        """The model under the names of the whole one. `stored`: names in the checkpoint.

        `rename`: from a name in the whole model to one of `stored`. Raises LoadError where the numbers of stages or
        expert-parallel ranks make no row, UsageError where chunks are not those of the topology.
        """
        topology, chunks = self.mesh.topology, model.chunks
        vpp, pp = (1, 1) if topology is None else (topology.vpp, topology.pp)
        if (vpp > 1 and chunks != vpp) or (chunks > 1 and pp == 1):
            wanted = f"{vpp} modules, as vpp={vpp} says"
            wanted = "a topology with pp above 1 for a list of modules" if vpp == 1 else wanted
            raise UsageError(f"expected {wanted}; got {chunks} and {topology or 'no topology'}")
        if topology is None or (topology.pp == topology.ep == 1 and not self.experts.layers):
            return model
        counts = _Counts(stored, rename or str, model)
        layers = _layers(self, counts)
        global_name = partial(_renumbered, layers=layers, experts=_experts(self, counts, layers))
        shared = {name for own in self.surveys for name in own.shared}

        def named(own: LiveTensor) -> LiveTensor:
            called = tuple(global_name(*_of_chunk(name, model.chunks)) for name in own.names)
            if shared.intersection(called):
                called += tuple(sorted(shared.difference(called)))
            return replace(own, assigned_names=called)

        return replace(model, tensors=tuple(map(named, model.tensors)))

    def held(self, axis: str, of: Callable[[Survey], Held], path: str, ranks: Iterable[int]) -> Places:
        """Numbers under a path by chunk and place on an axis. Raises ValueError where ranks of one place differ."""
        held: dict[Place, tuple[int, ...]] = {}
        for rank in ranks:
            own, at = of(self.surveys[rank]), self.mesh.coords_of(rank)[axis]
            for chunk in (chunk for chunk in range(self.chunks) if (chunk, path) in own):
                place, numbers = (chunk, at), own[chunk, path]
                if held.setdefault(place, numbers) != numbers:
                    raise ValueError(
                        f"rank {rank} has {_row(numbers)}, and another of {axis} rank {place[1]} has "
                        f"{_row(held[place])}"
                    )
        return dict(sorted(held.items()))


def strip_chunks(model: LiveModel) -> list[LiveTensor]:
    """Its tensors by their names in their own chunk."""
    return [replace(own, names=tuple(_of_chunk(name, model.chunks)[1] for name in own.names)) for own in model.tensors]


def layer_in(path: str) -> tuple[str, int] | None:
    """The first number in a name that counts no experts, and the path in front of it.

    >>> layer_in("decoder.layers.3.mlp.experts.5.w1"), layer_in("embed.weight")
    (('decoder.layers.', 3), None)
    """
    parts = path.split(".")
    for at, part in enumerate(parts):
        if part.isascii() and part.isdigit() and (at == 0 or parts[at - 1] not in _MODULE_LISTS):
            return "".join(f"{own}." for own in parts[:at]), int(part)
    return None


def expert_in(path: str) -> tuple[str, int] | None:
    """The number of an expert in a name, and the path in front of it.

    >>> expert_in("mlp.experts.local_experts.5.w1"), expert_in("mlp.experts.w1")
    (('mlp.experts.local_experts.', 5), None)
    """
    found = _EXPERT.match(path)
    return (found[1], int(found[3])) if found else None


def _of_chunk(name: str, chunks: int) -> tuple[int, str]:
    if chunks == 1:
        return 0, name
    chunk, _, path = name.partition(".")
    return int(chunk), path


class _Counts:
    """How many layers or experts a checkpoint has, where its names tell."""

    def __init__(self, stored: Iterable[str], rename: Callable[[str], str], model: LiveModel) -> None:
        self._rename = rename
        self._layers = _numbers(stored, layer_in)
        self._experts = _numbers(stored, expert_in)
        self._named: dict[str, str] = {}
        """Path that numbers follow, as ranks call it, to a name under it."""
        for path in (_of_chunk(name, model.chunks)[1] for own in model.tensors for name in own.names):
            for found in filter(None, (layer_in(path), expert_in(path))):
                self._named.setdefault(found[0], path)

    def layers(self, path: str) -> int | None:
        """Layers under a path; None where the checkpoint has none of that name."""
        own = layer_in(self._rename(self._named[path])) if path in self._named else None
        return len(self._layers.get(own[0], ())) or None if own else None

    def experts(self, path: str, whole: str) -> int | None:
        """Experts under a path, `whole` in the whole model; None where the checkpoint has none of that name."""
        name = whole + self._named[path].removeprefix(path) if path in self._named else whole
        own = expert_in(self._rename(name))
        return len(self._experts.get(own[0], ())) or None if own else None


def _numbers(names: Iterable[str], number_in: Callable[[str], tuple[str, int] | None]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for own in filter(None, map(number_in, names)):
        found.setdefault(own[0], set()).add(own[1])
    return found


def _layers(run: Numbering, counts: _Counts) -> Numbers:
    """The numbers of this rank's layers in the whole model."""
    layers: dict[tuple[int, str], Mapping[int, int]] = {}
    wrong: dict[str, None] = {}
    every = range(len(run.surveys))
    for (chunk, path), numbers in run.surveys[run.rank].layers.items():
        try:
            local = run.held("pp", lambda own: own.layers, path, every)
            said = run.held("pp", lambda own: own.said, path, every)
        except ValueError as error:
            wrong[f"{path}N: {error}"] = None
            continue
        place, known, is_said = (chunk, run.mesh.coords["pp"]), counts.layers(path), said.keys() == local.keys()
        places = said if is_said else local
        added = _added(places, known, is_final=is_said)
        if added is None:
            wrong[f"{path}N: {_listing('stage', places)}; the checkpoint has {known or 'none of that name'}"] = None
        else:
            layers[chunk, path] = {
                number: own + added[place] for number, own in zip(numbers, places[place], strict=True)
            }
    if wrong:
        raise LoadError(
            "expected layers that stages number through from 0 to the last, or each from 0; got\n"
            f"{listed(list(wrong))}\nsay the number of each layer's module as Megatron does (layer_number, from 1), "
            "the same on stages that hold the same layers"
        )
    return layers


def _experts(run: Numbering, counts: _Counts, layers: Numbers) -> Numbers:
    """The numbers of this rank's experts in the whole model."""
    found: dict[tuple[int, str], Mapping[int, int]] = {}
    wrong: dict[str, None] = {}
    for (chunk, path), numbers in run.surveys[run.rank].experts.items():
        whole = _renumbered(chunk, path, layers=layers)
        try:
            found[chunk, path] = dict(zip(numbers, _expert_numbers(run, counts, chunk, path, whole), strict=True))
        except ValueError as error:
            wrong[f"{whole}N: {error}"] = None
    if wrong:
        raise LoadError(
            "expected experts that expert-parallel ranks number through from 0 to the last, or each from 0; got\n"
            f"{listed(list(wrong))}\nwhere they are dealt out otherwise, pass experts={{expert: ranks}}"
        )
    return found


def _expert_numbers(run: Numbering, counts: _Counts, chunk: int, path: str, whole: str) -> Sequence[int]:
    """Numbers in the whole model of the experts under a path; `whole`: that path in the whole model."""
    stage = run.mesh.coords["pp"]
    peers = [rank for rank in range(len(run.surveys)) if run.mesh.coords_of(rank)["pp"] == stage]
    held = {at: own for at, own in run.held("ep", lambda own: own.experts, path, peers).items() if at[0] == chunk}
    place, layer = (chunk, run.mesh.coords["ep"]), layer_in(whole)
    order = run.experts.order(layer=layer[1] if layer else None, ep=place[1])
    numbers, listing = held[place], _listing("ep rank", held)
    if order is None:
        known = counts.experts(path, whole)
        added = _added(held, known)
        if added is None:
            raise ValueError(f"{listing}; the checkpoint has {known or 'none of that name'}")
        return [number + added[place] for number in numbers]
    if len(order) == len(numbers) and all(own == tuple(range(len(own))) for own in held.values()):
        return order
    if set(order) == set(numbers):
        return numbers
    raise ValueError(f"{listing}; `experts` deals {_row(order)} to ep rank {place[1]}")


def _added(held: Places, known: int | None, *, is_final: bool = False) -> dict[Place, int] | None:
    """What to add to the numbers of each place; None where they make no row. `known`: how long the row is.

    `is_final`: they are numbers of the whole model.
    """
    every = sorted(number for numbers in held.values() for number in numbers)
    alike = is_final and known is not None and all(numbers == tuple(range(known)) for numbers in held.values())
    if every == [*range(len(every))] or alike or (len(held) == 1 and not is_final):
        return dict.fromkeys(held, 0)
    is_local = all(numbers == tuple(range(len(numbers))) for numbers in held.values())
    if is_final or not is_local or known not in (None, len(every)):
        return None
    added, total = {}, 0
    for place in sorted(held):
        added[place] = total
        total += len(held[place])
    return added


def _renumbered(chunk: int, path: str, *, layers: Numbers, experts: Numbers | None = None) -> str:
    """A name with its numbers in the whole model."""
    expert = _EXPERT.match(path)
    whole = path
    if expert and experts is not None and (chunk, expert[1]) in experts:
        number = experts[chunk, expert[1]][int(expert[3])]
        whole = f"{expert[1]}{expert[2]}{number}{path[expert.end() :]}"
    layer = layer_in(path)
    if layer is not None and (chunk, layer[0]) in layers:
        start, number = layer
        whole = f"{start}{layers[chunk, start][number]}{whole[len(start) + len(str(number)) :]}"
    return whole


def _listing(what: str, held: Places) -> str:
    several = len({chunk for chunk, _ in held}) > 1
    return ", ".join(
        f"{what} {at}{f' chunk {chunk}' if several else ''} {_row(numbers)}" for (chunk, at), numbers in held.items()
    )


def _row(numbers: Sequence[int]) -> str:
    if numbers and numbers[-1] - numbers[0] > 1 and [*numbers] == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{numbers[0]}..{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
