"""Join the ranges of all ranks into atoms; check against the dense weights that no rank saved the ranges of a peer."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations
from math import prod
from typing import NamedTuple

from ucp.contract.plugins import pattern_factory
from ucp.core.index import STEP, WEIGHT, AtomIndex, Extra, Index, Kind
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box, RegionPair
from ucp.core.tensor import DType, TensorRef
from ucp.core.union import ShardedTensor, ShardSet, StateSource, StoredShard, Union, state_from_number
from ucp.errors import MalformedError, format_count, format_list
from ucp.transfer.probe import Prober
from ucp_formats.moevement.names import OperatorNames, parse_operator
from ucp_formats.moevement.window import RankWindow, StoredTensor, may_skip_steps

_MASTERS, _MOMENTS, _COMPUTE = "params.", "optimizer.", "compute_weights."
"""Prefixes of keys: masters, optimizer states, weights in the dtype of the model."""
_RNG = "__moe_rng_state__"
SAMPLED = 256
"""Elements of a range that are compared with the dense checkpoint, at most."""


class _Range(NamedTuple):
    """The range of a flattened state that a rank saved."""

    rank: int
    """Global rank."""
    operator: str
    """Name of the operator."""
    tensor: StoredTensor
    """As stored."""
    ref: TensorRef
    """Where its elements are stored."""


class _Sample(NamedTuple):
    """The first elements of a range that a rank saved."""

    numel: int
    """Elements of the whole range."""
    saved: array[float]
    """What the rank saved."""
    dense: array[float]
    """The same elements of the dense checkpoint."""


class WindowReader:
    """Joins the tensors of all ranks into atoms."""

    def __init__(self, windows: Sequence[RankWindow], names: OperatorNames, dense: Index) -> None:
        self._windows = windows
        self._dense = dense
        self._union = Union()
        self.is_counted = not any(may_skip_steps(window) for window in windows)
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
                    raise MalformedError(
                        f"expected {_MASTERS}* and {_MOMENTS}* of an active operator, {_COMPUTE}* of any other; got "
                        f"{tensor.key!r} of {operator_name}, iteration {iteration}, in {window.path}"
                    )
                inner, state = tensor.key.removeprefix(kind), WEIGHT
                if kind == _MOMENTS:
                    inner, _, state = inner.rpartition(".")
                param = names.param(operator, inner, window.rank)
                if param is None:
                    raise MalformedError(
                        f"{window.path} has {operator_name}; {dense.path} has no such layer on that stage: they are "
                        "from different runs"
                    )
                if kind == _COMPUTE:
                    self._frozen.setdefault((param, iteration), []).append(ref)
                    continue
                self._slots.setdefault(param, set()).add(iteration)
                self._sharing[param] = names.sharing_ranks(operator, window.rank)
                self._ranges.setdefault((param, state), []).append(_Range(window.rank, operator_name, tensor, ref))
        bare = [param for param in self._slots if (param, WEIGHT) not in self._ranges]
        if bare:
            raise MalformedError(
                f"expected weights of every active parameter in the windows of {dense.path}; there are none of "
                f"{', '.join(bare)}"
            )
        twice = [f"{name}: {sorted(steps)}" for name, steps in self._slots.items() if len(steps) > 1]
        if twice:
            raise MalformedError(
                f"expected every parameter to be active in exactly one iteration of a window; got\n{format_list(twice)}"
            )

    def read_links(self) -> dict[int, dict[str, AtomIndex]]:
        """Iteration to the parameters that the window has of it: all states of those that are active, else a weight."""
        states: dict[str, dict[str, StateSource]] = {}
        for (param, state), ranges in self._ranges.items():
            states.setdefault(param, {})[state] = self._join(param, state, ranges)
        self._check_states(states)
        links: dict[int, dict[str, AtomIndex]] = {}
        for (param, iteration), refs in self._frozen.items():
            atom = self._make_atom(param, {WEIGHT: ShardedTensor.unsharded(*refs)})
            links.setdefault(iteration, {})[param] = replace(atom, is_cast=True)
        for param, of_param in states.items():
            iteration = min(self._slots[param])
            if self.is_counted:
                of_param[STEP] = state_from_number(float(iteration))
            links.setdefault(iteration, {})[param] = self._make_atom(param, of_param)
        return links

    def _check_states(self, states: Mapping[str, Mapping[str, StateSource]]) -> None:
        """Raise MalformedError for other states, or other shapes, than the dense checkpoint has of a parameter."""
        for param, of_param in states.items():
            dense = self._dense.atoms.get(param)
            expected = {} if dense is None else {name: dense.states[name].global_shape for name in dense.states}
            got = {name: state.shape for name, state in of_param.items() if isinstance(state, ShardedTensor)}
            wrong = {name for name in {*expected, *got} - {STEP} if expected.get(name) != got.get(name)}
            if wrong and len(expected) > 1:
                lines = [f"{name}: expected {expected.get(name)}, got {got.get(name)}" for name in sorted(wrong)]
                raise MalformedError(
                    f"expected the states of {param} that the dense checkpoint {self._dense.path} has, in their "
                    f"shapes; the window has others:\n{format_list(lines)}"
                )

    def _make_atom(self, param: str, states: Mapping[str, StateSource]) -> AtomIndex:
        dense = self._dense.atoms.get(param)
        return self._union.build_atom(
            param,
            kind=Kind.PARAMETER if dense is None else dense.kind,
            layout=weight.layout if isinstance(weight := states[WEIGHT], ShardedTensor) else Layout(),
            states=states,
            model_dtype=None if dense is None else dense.model_dtype or dense.states[WEIGHT].dtype,
        )

    def _join(self, param: str, state: str, ranges: Sequence[_Range]) -> ShardedTensor:
        """A state, joined from the ranges of the ranks that share it. Without ZeRO every rank has a full copy."""
        flat = sorted((part for part in ranges if part.tensor.fragment_numel is not None), key=lambda part: part.rank)
        if not flat:
            return ShardedTensor.unsharded(*(part.ref for part in ranges))
        dense = self._dense.atoms.get(param)
        shape = flat[0].tensor.full_shape or (dense.global_shape if dense is not None else None)
        if shape is None or any(part.tensor.full_shape != flat[0].tensor.full_shape for part in flat):
            raise MalformedError(
                f"expected the same full shape of {param}/{state} in the windows of all ranks of {self._dense.path}"
            )
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
        """Raise MalformedError if a range has another length than that of the same rank in the dense checkpoint."""
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
                    f"expected {expected} elements of {param} in {self._file_of(part.rank)}, as rank {part.rank} has "
                    f"in the dense checkpoint; got {part.ref.numel}: they are a peer's, or from another run"
                )

    @staticmethod
    def _starts(flat: Sequence[_Range]) -> dict[int, int]:
        """Rank to the first element of its range in the flattened parameter; ranges follow one another."""
        stops = accumulate(part.ref.numel for part in flat)
        return {part.rank: stop - part.ref.numel for part, stop in zip(flat, stops, strict=True)}

    def check_peers(self) -> Iterator[str]:
        """A line for each pair of operators of two ranks whose ranges were exchanged, judged by the dense weights.

        Experts may start with equal weights, so a single range proves little. So two operators are judged together:
        their ranges are nearer to the dense weights either as they are, or exchanged.
        """
        samples: dict[tuple[int, str], dict[str, _Sample]] = {}
        with Prober() as prober:
            for (param, state), ranges in self._ranges.items():
                if state != WEIGHT or param not in self._dense.atoms:
                    continue
                weight = self._dense.atoms[param].states[WEIGHT]
                flat = sorted((part for part in ranges if part.tensor.fragment_numel is not None), key=lambda p: p.rank)
                starts = self._starts(flat)
                for part in flat or ranges:
                    start = min(starts.get(part.rank, 0), weight.numel)  # a range of another run may be too long
                    count = min(part.ref.numel, SAMPLED, weight.numel - start)
                    saved = _floats(prober.window(part.ref, 0, count, dtype=DType.FLOAT32))
                    dense = _floats(prober.state_window(weight, start, start + count, dtype=DType.FLOAT32))
                    sample = _Sample(part.ref.numel, saved, dense)
                    samples.setdefault((part.rank, part.operator), {})[part.tensor.key] = sample
        for one, other in combinations(samples, 2):
            if one[0] != other[0] and _are_exchanged(samples[one], samples[other]):
                yield f"{one[1]} of {self._file_of(one[0])}, {other[1]} of {self._file_of(other[0])}"

    def _file_of(self, rank: int) -> str:
        return next(os.path.basename(window.path) for window in self._windows if window.rank == rank)

    def list_extras(self, iteration: int) -> Iterator[Extra]:
        """RNG states after an iteration, and the metadata that the run recorded when it saved."""
        for window in self._windows:
            states = {
                tensor.key: ref for step, name, _, tensor, ref in window.tensors() if (step, name) == (iteration, _RNG)
            }
            if states:
                yield Extra(name="moevement/rng_state", value=states, rank=window.rank)
            yield Extra(name="moevement/metadata", value=dict(window.document.metadata), rank=window.rank)


def _are_exchanged(one: Mapping[str, _Sample], other: Mapping[str, _Sample]) -> bool:
    """Whether the ranges of two operators are nearer to the dense weights if their places are exchanged."""
    keys = [key for key in one.keys() & other.keys() if one[key].numel == other[key].numel]

    def distance(ranges: Mapping[str, _Sample], at: Mapping[str, _Sample]) -> float:
        pairs = (pair for key in keys for pair in zip(ranges[key].saved, at[key].dense, strict=False))
        return sum((a - b) ** 2 for a, b in pairs)

    return distance(one, other) + distance(other, one) < distance(one, one) + distance(other, other)


def _flat_pair(start: int, numel: int) -> RegionPair:
    return RegionPair(Box((start,), (numel,)), Box((0,), (numel,)))


def _floats(data: bytes) -> array[float]:
    values = array("f")
    values.frombytes(data)
    return values
