"""Format `moevement`: a whole sparse window, read beside the dense checkpoint that it was saved with.

1. Read every rank's file. The files name operators by stage, layer and local number, so the dense checkpoint beside
   the folder says which modules these are.
2. A rank has a range of each flattened master (ZeRO-1): ranges of the ranks that share a partition follow one another.
3. Every parameter is taken at its *slot*, the iteration in which it is active: it then has master and moments, and no
   step (MoEvement saves none). Parameters are of different iterations (`AtomIndex.iteration`).

   Read at the first iteration of the window (`--at`), it gives that iteration's weights: masters of what is active
   then, and the rest as the model computes with it. Nothing else of one iteration is in a window.

What a window promises is checked, as its file has no checksum:

* Saved after its last step, it holds later bytes under earlier labels (buffers are reused while they are saved).
* With data parallelism, it may hold the peer's bytes for the same reason. A range that is nearer to the peer's place
  in the dense checkpoint than to its own tells.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations
from math import prod
from pathlib import Path
from typing import NamedTuple

from ucp.contract.locating import Evidence
from ucp.contract.plugins import pattern_factory
from ucp.contract.protocols import Format, SourceOptions
from ucp.contract.registry import recognise
from ucp.core.index import WEIGHT, AtomIndex, Extra, Index, Kind
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box, RegionPair
from ucp.core.tensor import DType, TensorRef
from ucp.core.union import ShardedTensor, ShardSet, StoredShard, Union
from ucp.errors import (
    MalformedError,
    MissingFileError,
    SourceError,
    UnsupportedError,
    UsageError,
    format_count,
    format_list,
)
from ucp.io.folder import names_in, to_absolute
from ucp.io.provenance import source_file
from ucp.transfer.probe import Prober
from ucp_formats.moevement.names import OperatorNames, parse_operator
from ucp_formats.moevement.window import RankWindow, StoredTensor, engine_steps, rank_of, read_window

_MASTERS, _MOMENTS, _COMPUTE = "params.", "optimizer.", "compute_weights."
"""What a key begins with."""
_RNG = "__moe_rng_state__"
_SAMPLED = 256
"""Elements of a range that are compared with the dense checkpoint, at most."""


@dataclass(frozen=True, slots=True)
class MoEvementFormat(Format):
    """Reads sparse windows."""

    options: SourceOptions = field(default_factory=SourceOptions)
    """Which iteration is wanted."""

    name = "moevement"
    takes_time = True

    def detect(self, path: Path) -> Evidence | None:
        """Detect a folder with a window's files, or one of them."""
        root = path.parent if rank_of(path.name) is not None and path.is_file() else path
        ranks = [name for name in names_in(root) if rank_of(name) is not None]
        return Evidence(root, (f"window_rank*.pt of {format_count(len(ranks), 'rank')}",)) if ranks else None

    def configured(self, options: SourceOptions) -> MoEvementFormat:
        """The same format at an iteration."""
        if options.without_family() != SourceOptions(at=options.at) or options.family or options.patterns:
            return super().configured(options)  # type: ignore[return-value]  # it raises
        return MoEvementFormat(options)

    def read(self, path: Path) -> Index:
        """Index of the window. Raises SourceError."""
        root = path if path.is_dir() else path.parent
        windows = _read_ranks(root)
        first, last = _check_iterations(windows)
        notes = _check_boundary(windows)
        at = self.options.at
        if at not in (None, first):
            raise UsageError(
                f"expected --at {first}, the first iteration of the window {root}, or no --at; got {at}. A window "
                f"holds the weights of its first iteration; of {first} to {last}, some parameters each"
            )
        dense = _read_dense(root)
        names = OperatorNames.of(dense, windows)
        reader = _WindowReader(windows, names, dense)
        of_peers = list(reader.check_peers())
        if of_peers:
            raise MalformedError(
                f"expected every rank's ranges in {root}; by the dense checkpoint beside it, these are of a "
                f"data-parallel peer:\n{format_list(of_peers)}\nMoEvement copied the peer's bytes into buffers that "
                "were still to be saved. Convert the dense checkpoint"
            )
        atoms = reader.read_first(first) if at is not None else reader.read_slots()
        _check_complete(dense, atoms, root)
        return replace(
            dense,
            path=to_absolute(root),
            format=self.name,
            evidence=(f"window_rank*.pt of {format_count(len(windows), 'rank')}", f"iterations {first} to {last}"),
            step=first if at is not None else last,
            atoms={name: atoms[name] for name in dense.atoms if name in atoms},
            groups=() if at is not None else dense.groups,
            extras=tuple(reader.list_extras(first if at is not None else last)),
            files=tuple(source_file(window.path, f"sparse window of rank {window.rank}") for window in windows),
            records=(),
            notes=(*notes, *_describe(first, last, is_first=at is not None)),
            dropped=(),
            lost={},
            doubts=(),
            keys=None,
        )


def _read_ranks(root: Path) -> list[RankWindow]:
    """The windows of all ranks, in order. Raises MissingFileError where a rank's is not there."""
    ranks = {rank: name for name in names_in(root) if (rank := rank_of(name)) is not None}
    absent = [f"window_rank{rank}.pt" for rank in range(max(ranks) + 1) if rank not in ranks]
    if absent:
        raise MissingFileError(f"expected the window of every rank in {root}; missing:\n{format_list(absent)}")
    return [read_window(root / ranks[rank]) for rank in sorted(ranks)]


def _check_iterations(windows: Sequence[RankWindow]) -> tuple[int, int]:
    """First and last iteration. Raises MalformedError where ranks differ, UnsupportedError where there is none yet."""
    iterations = {tuple(stored.iteration for stored in window.document.iterations): window for window in windows}
    if len(iterations) > 1:
        lines = (f"{window.path}: {list(steps)}" for steps, window in iterations.items())
        raise MalformedError(f"expected windows of the same iterations of all ranks; got\n{format_list(lines)}")
    ((steps, window),) = iterations.items()
    if not steps:
        raise UnsupportedError(
            f"{window.path} holds no iteration yet: the first window is saved two windows after the start of a run. "
            "Convert the dense checkpoint beside it"
        )
    return steps[0], steps[-1]


def _check_boundary(windows: Sequence[RankWindow]) -> list[str]:
    """Raise MalformedError for windows that were saved when their buffers held later bytes; what cannot be told."""
    unknown = []
    for window in windows:
        steps, boundary = engine_steps(window)
        if steps is None or boundary is None:
            unknown.append(window.path)
        elif steps != boundary:
            raise MalformedError(
                f"expected {window.path} to be saved after step {boundary}, the last of a window; it was saved after "
                f"{steps}. MoEvement uses the buffers of a window again while it is saved, so that it holds the bytes "
                "of later iterations under earlier names. Convert the dense checkpoint beside it"
            )
    if not unknown:
        return []
    files = format_count(len(unknown), "file")
    return [f"{files} of the window do not say when they were saved: whether they hold later bytes cannot be told"]


def _read_dense(root: Path) -> Index:
    """The dense checkpoint beside the folder of a window, which names its modules. Raises MissingFileError."""
    folder = root.absolute().parent
    try:
        fmt, _ = recognise(folder)
        return fmt.read(folder)
    except SourceError as error:
        raise MissingFileError(
            f"expected the dense checkpoint that {root} was saved with in {folder}, as it alone says which modules "
            f"have experts: {error}"
        ) from error


def _check_complete(dense: Index, atoms: Mapping[str, AtomIndex], root: Path) -> None:
    """Raise MalformedError where the window lacks a parameter, or has one in another shape."""
    wrong = [
        f"{name}: {'missing' if name not in atoms else list(atoms[name].global_shape)}, expected "
        f"{list(atom.global_shape)}"
        for name, atom in dense.atoms.items()
        if name not in atoms or atoms[name].global_shape != atom.global_shape
    ]
    wrong += [f"{name}: unknown to the dense checkpoint" for name in atoms if name not in dense.atoms]
    if wrong:
        raise MalformedError(
            f"expected every parameter of {dense.path} in the window {root}; got\n{format_list(wrong)}"
        )


def _describe(first: int, last: int, *, is_first: bool) -> Iterator[str]:
    if is_first:
        yield (
            f"weights of iteration {first}: masters in float32 of what was active then, the rest in the type in which "
            "the model computes (--dtype weight=... makes them alike); no optimizer states of that iteration are saved"
        )
        return
    yield (
        f"parameters are of iterations {first} to {last}, each of the one in which it was active. A dense state needs "
        "a replay of these iterations"
    )
    yield "the optimizer's step counts are not saved (MoEvement keeps none); a run that resumes starts them at 0"


class _Range(NamedTuple):
    """What a rank has of a flattened state."""

    rank: int
    """Global rank."""
    operator: str
    """Name of the operator."""
    tensor: StoredTensor
    """As stored."""
    ref: TensorRef
    """Where it lies."""


class _WindowReader:
    """Makes atoms of the tensors of all ranks."""

    def __init__(self, windows: Sequence[RankWindow], names: OperatorNames, dense: Index) -> None:
        self._windows = windows
        self._dense = dense
        self._union = Union()
        self._slots: dict[str, set[int]] = {}
        self._ranges: dict[tuple[str, str], list[_Range]] = {}
        self._frozen: dict[tuple[str, int], list[TensorRef]] = {}
        self._sharing: dict[str, tuple[int, ...]] = {}
        for window in windows:
            for iteration, operator_name, stored, tensor, ref in window.tensors():
                operator = parse_operator(operator_name)
                if operator is None:
                    continue
                kind = next(
                    (prefix for prefix in (_MASTERS, _MOMENTS, _COMPUTE) if tensor.key.startswith(prefix)), None
                )
                if kind is None or stored.is_active is (kind == _COMPUTE):
                    raise MalformedError(f"{window.path}: {operator_name} has {tensor.key!r} in iteration {iteration}")
                inner, state = tensor.key.removeprefix(kind), WEIGHT
                if kind == _MOMENTS:
                    inner, _, state = inner.rpartition(".")
                param = names.param(operator, inner, window.rank)
                if param is None:
                    raise MalformedError(
                        f"{window.path} has {operator_name}; {dense.path} has no such layer on that stage: they are of "
                        "different runs"
                    )
                if kind == _COMPUTE:
                    self._frozen.setdefault((param, iteration), []).append(ref)
                    continue
                self._slots.setdefault(param, set()).add(iteration)
                self._sharing[param] = names.sharing_ranks(operator, window.rank)
                self._ranges.setdefault((param, state), []).append(_Range(window.rank, operator_name, tensor, ref))
        twice = [f"{name}: {sorted(steps)}" for name, steps in self._slots.items() if len(steps) > 1]
        if twice:
            raise MalformedError(
                f"expected every parameter to be active in one iteration of a window; got\n{format_list(twice)}"
            )

    def read_slots(self) -> dict[str, AtomIndex]:
        """Every parameter, with all states, in the iteration in which it is active."""
        states: dict[str, dict[str, ShardedTensor]] = {}
        for (param, state), ranges in self._ranges.items():
            states.setdefault(param, {})[state] = self._join(param, state, ranges)
        return {param: self._make_atom(param, of_param, min(self._slots[param])) for param, of_param in states.items()}

    def read_first(self, first: int) -> dict[str, AtomIndex]:
        """The weight of every parameter in the first iteration."""
        weights = {
            param: ShardedTensor.unsharded(*refs) for (param, step), refs in self._frozen.items() if step == first
        }
        for param, steps in self._slots.items():
            if first in steps:
                weights[param] = self._join(param, WEIGHT, self._ranges[param, WEIGHT])
        return {param: self._make_atom(param, {WEIGHT: weight}, first) for param, weight in weights.items()}

    def _make_atom(self, param: str, states: Mapping[str, ShardedTensor], iteration: int) -> AtomIndex:
        dense = self._dense.atoms.get(param)
        atom = self._union.build_atom(
            param,
            kind=Kind.PARAMETER if dense is None else dense.kind,
            layout=states[WEIGHT].layout,
            states=states,
            model_dtype=None if dense is None else dense.model_dtype or dense.states[WEIGHT].dtype,
        )
        return replace(atom, iteration=iteration)

    def _join(self, param: str, state: str, ranges: Sequence[_Range]) -> ShardedTensor:
        """A state, of the ranges of all ranks that share it; of whole copies where the run had no ZeRO."""
        flat = sorted((part for part in ranges if part.tensor.fragment_numel is not None), key=lambda part: part.rank)
        if not flat:
            return ShardedTensor.unsharded(*(part.ref for part in ranges))
        shape = flat[0].tensor.full_shape
        if shape is None or any(part.tensor.full_shape != shape for part in flat):
            raise MalformedError(f"expected one full shape of {param}/{state} in all windows of {self._dense.path}")
        sharing = self._sharing[param]
        start_of = self._starts(flat)
        pairs = {part.rank: _flat_pair(start_of[part.rank], part.ref.numel) for part in flat}
        if sum(part.ref.numel for part in flat) != prod(shape):
            lengths = ", ".join(f"rank {part.rank}: {part.ref.numel}" for part in flat)
            raise MalformedError(
                f"expected {prod(shape)} elements of {param}/{state} in the windows of "
                f"{format_count(len(sharing), 'rank')} that share it; got {lengths}"
            )
        self._check_lengths(param, flat, sharing)
        held = tuple((pairs[rank],) if rank in pairs else () for rank in sharing)
        pattern = pattern_factory("pieces")(held=held)
        axis = AxisLayout("dp", len(sharing), pattern, known_from="lengths of ranges in window_rank*.pt")
        shards = tuple(StoredShard({"dp": sharing.index(part.rank)}, part.ref) for part in flat)
        return ShardedTensor(dtype=flat[0].ref.dtype, shape=shape, shard_sets=(ShardSet(Layout(flat=(axis,)), shards),))

    def _check_lengths(self, param: str, flat: Sequence[_Range], sharing: Sequence[int]) -> None:
        """Raise MalformedError for ranges that are not as long as those of the same ranks in the dense checkpoint."""
        atom = self._dense.atoms.get(param)
        axis = (
            next((axis for axis in atom.layout.flat if axis.parts == len(sharing)), None) if atom is not None else None
        )
        if atom is None or axis is None:
            return
        for part in flat:
            regions = axis.pattern.regions((prod(atom.global_shape),), axis.parts, sharing.index(part.rank))
            expected = sum(region.global_box.numel for region in regions)
            if part.ref.numel != expected:
                raise MalformedError(
                    f"expected {expected} elements of {param} in {self._path_of(part.rank)}, as rank {part.rank} has "
                    f"in the dense checkpoint; got {part.ref.numel}: they are a peer's, or of another run"
                )

    @staticmethod
    def _starts(flat: Sequence[_Range]) -> dict[int, int]:
        """Rank to the element of the flattened parameter where its range starts: ranges follow one another."""
        stops = accumulate(part.ref.numel for part in flat)
        return {part.rank: stop - part.ref.numel for part, stop in zip(flat, stops, strict=True)}

    def check_peers(self) -> Iterator[str]:
        """A line for every two operators of different ranks that hold one another's ranges, as the dense weights tell.

        Experts of a model may start alike, so that one range tells little: those of two operators are nearer to the
        dense weights of their own places together, or of the other's.
        """
        places: dict[tuple[int, str], dict[str, tuple[str, int, TensorRef]]] = {}
        for (param, state), ranges in self._ranges.items():
            if state != WEIGHT or param not in self._dense.atoms:
                continue
            flat = sorted((part for part in ranges if part.tensor.fragment_numel is not None), key=lambda p: p.rank)
            starts = self._starts(flat)
            for part in flat:
                place = (param, starts[part.rank], part.ref)
                places.setdefault((part.rank, part.operator), {})[part.tensor.key] = place
        alike: dict[object, list[tuple[int, str]]] = {}
        for operator, tensors in places.items():
            lengths = sorted((key, ref.numel) for key, (_, _, ref) in tensors.items())
            alike.setdefault(tuple(lengths), []).append(operator)
        with Prober() as prober:
            for operators in alike.values():
                for one, other in combinations(operators, 2):
                    if one[0] != other[0] and self._are_exchanged(prober, places[one], places[other]):
                        yield f"{one[1]} of {self._path_of(one[0])}, {other[1]} of {self._path_of(other[0])}"

    def _are_exchanged(
        self,
        prober: Prober,
        one: Mapping[str, tuple[str, int, TensorRef]],
        other: Mapping[str, tuple[str, int, TensorRef]],
    ) -> bool:
        """Whether the ranges of two operators are nearer to the dense weights at one another's places."""

        def distance(
            ranges: Mapping[str, tuple[str, int, TensorRef]], at: Mapping[str, tuple[str, int, TensorRef]]
        ) -> float:
            total = 0.0
            for key, (_, _, ref) in ranges.items():
                param, start, _ = at[key]
                count = min(ref.numel, _SAMPLED)
                state = self._dense.atoms[param].states[WEIGHT]
                values = _floats(prober.window(ref, 0, count, dtype=DType.FLOAT32))
                dense = _floats(prober.state_window(state, start, start + count, dtype=DType.FLOAT32))
                total += sum((a - b) ** 2 for a, b in zip(values, dense, strict=True))
            return total

        return distance(one, other) + distance(other, one) < distance(one, one) + distance(other, other)

    def _path_of(self, rank: int) -> str:
        return next(window.path for window in self._windows if window.rank == rank)

    def list_extras(self, iteration: int) -> Iterator[Extra]:
        """States of random generators after an iteration, and what the run recorded when it saved."""
        for window in self._windows:
            states = {
                tensor.key: ref for step, name, _, tensor, ref in window.tensors() if (step, name) == (iteration, _RNG)
            }
            if states:
                yield Extra(name="moevement/rng_state", value=states, rank=window.rank)
            yield Extra(name="moevement/metadata", value=dict(window.document.metadata), rank=window.rank)


def _flat_pair(start: int, numel: int) -> RegionPair:
    return RegionPair(Box((start,), (numel,)), Box((0,), (numel,)))


def _floats(data: bytes) -> array[float]:
    values = array("f")
    values.frombytes(data)
    return values
