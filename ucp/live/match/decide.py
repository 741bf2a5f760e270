"""Decide what this rank loads, before tensors are read: of those only counts and hyper-parameters are read here."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import xxhash

from ucp.contract.optimizer import OptimizerPlan
from ucp.core.gaps import check_doubts
from ucp.core.index import STEP, DoubtKind, Index, Kind, ParamGroup
from ucp.core.tensor import DType, InlineTensor, TensorRef
from ucp.errors import LoadError, format_list
from ucp.io.elements import viewed
from ucp.io.files import open_source
from ucp.live.adapters import LiveRun
from ucp.live.match.groups import LiveGroup, match_groups
from ucp.live.match.items import (
    Findings,
    filter_fitting,
    find_unexpected,
    match_states,
    match_tensors,
    note_rounded,
    plan_weights,
)
from ucp.live.parts import LiveParam, LivePart, LoadItem
from ucp.live.run.ranks import Ranks
from ucp.source.moments import ZeroMoments, check_moments, detect_first_step
from ucp.transfer.probe import Prober

if TYPE_CHECKING:
    import torch

_MOST_CHARACTERS = 1000
"""Characters of an argument that ranks compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What the user asked of a load, the same on every rank."""

    strict: bool = True
    """Whether everything must fit."""
    rename: Callable[[str], str] | None = None
    """From a name in the model to the name in the checkpoint."""
    zero_moments: ZeroMoments = ZeroMoments.ERROR
    """What to do with moments that are all zero."""
    accept: frozenset[DoubtKind] = frozenset()
    """Doubts of the checkpoint that the user accepts."""
    kept: frozenset[str] = frozenset()
    """Atoms that are not loaded: the model and the optimizer keep what they have of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """What of this rank's tensors the checkpoint has."""

    index: Index
    """The checkpoint."""
    run: LiveRun
    """What to load into."""
    present: frozenset[str]
    """Atoms that the model has by name."""
    matched: Mapping[str, str]
    """Tensor of the model to its atom, if they fit."""
    groups: tuple[LiveGroup, ...]
    """Groups of the optimizer, by the names of atoms."""
    findings: Findings
    """What did not fit so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Atoms that some rank loads."""

    present: Collection[str]
    """Those that a model has."""
    optimized: Collection[str]
    """Those that an optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Everything that is to be done on this rank."""

    index: Index
    """The checkpoint."""
    run: LiveRun
    """What to load into."""
    items: tuple[LoadItem, ...]
    """What to load, in the order of the model."""
    without_states: tuple[str, ...] = ()
    """Parameters that get no state."""
    hyper: tuple[Mapping[str, object], ...] = ()
    """Hyper-parameters to set in each group of the optimizer."""
    findings: Findings = field(default_factory=Findings)
    """What did not fit, and what is worth knowing."""
    memories: Sequence[torch.Tensor] = ()
    """Memory for each of `items`."""


def match(run: LiveRun, index: Index, options: LoadOptions, *, dtype: DType | None = None) -> Matching:
    """Match the tensors of this rank with atoms, by names and shapes.

    `dtype`: dtype of floating-point weights, if the user passed it. Raises SourceError for a doubtful checkpoint,
    LoadError for weights of another dtype.
    """
    accepted = options.accept | ({DoubtKind.MOMENT_SHAPES} if run.optimizer is None else frozenset())
    check_doubts(index, accepted)
    if run.optimizer is not None:
        check_moments(detect_first_step(index), options.zero_moments)
    tensors = run.model.tensors
    findings = Findings(
        notes=[
            *run.model.notes,
            *(f"--accept {accepted_doubt.kind}: {accepted_doubt.text}" for accepted_doubt in index.doubts),
        ]
    )
    by_name = match_tensors(tensors, index, rename=options.rename, findings=findings)
    matched = filter_fitting(tensors, by_name, index, findings)
    differing = [
        f"{tensor.name}: {tensor.dtype}"
        for tensor in tensors
        if tensor.name in matched and index.atoms[matched[tensor.name]].kind is not Kind.BUFFER
        if dtype is not None and tensor.dtype.is_floating and tensor.dtype is not dtype
    ]
    if differing:
        raise LoadError(
            f"expected floating-point weights in {dtype}, as dtype= says; got\n{format_list(differing)}\n"
            f"Convert the model before the load (model.to(torch.{dtype})), or leave dtype= out"
        )
    groups = [] if run.optimizer is None else run.optimizer.groups()
    params_of = [tuple(matched[name] for name in group.params if name in matched) for group in groups]
    return Matching(
        index=index,
        run=run,
        present=frozenset(by_name.values()),
        matched=matched,
        groups=tuple(replace(group, params=params) for group, params in zip(groups, params_of, strict=True)),
        findings=findings,
    )


def find_used_atoms(matching: Matching, ranks: Ranks) -> Used:
    """Atoms that any rank loads. Collective: a bit for every atom is shared."""
    numbers = {name: number for number, name in enumerate(matching.index.atoms)}
    nbytes = len(numbers) // 8 + 1

    def to_bits(names: Collection[str]) -> bytes:
        bits = bytearray(nbytes)
        for name in names:
            bits[numbers[name] // 8] |= 1 << numbers[name] % 8
        return bytes(bits)

    optimized = {name for group in matching.groups for name in group.params}
    used = []
    for bits_of_ranks in zip(*ranks.share((to_bits(matching.present), to_bits(optimized))), strict=True):
        union = reduce(or_, (int.from_bytes(bits, "little") for bits in bits_of_ranks)).to_bytes(nbytes, "little")
        used.append(frozenset(name for name, number in numbers.items() if union[number // 8] >> number % 8 & 1))
    return Used(present=used[0], optimized=used[1])


def decide(matching: Matching, used: Used, options: LoadOptions) -> Decision:
    """What this rank loads. Writes nothing.

    Raises LoadError with everything that does not fit, UnsupportedError for a step count that float32 cannot hold.
    """
    index, run, matched, findings = matching.index, matching.run, matching.matched, matching.findings
    tensors = run.model.tensors
    find_unexpected(tensors, used.present, index, findings)
    loaded = [tensor for tensor in tensors if tensor.name not in run.model.derived]
    items = plan_weights(loaded, matched, index, findings=findings)
    without_states: list[str] = []
    hyper: list[dict[str, object]] = []
    if run.optimizer is not None:
        hyper = match_groups(matching.groups, _plain_groups(index), findings=findings)
        parts = {tensor.name: tensor.part for tensor in tensors}
        params = [globalize(param, parts, run) for param in run.optimizer.params(hyper)]
        states, without_states = match_states(
            params, parts, matched, index, optimized=used.optimized, findings=findings
        )
        note_rounded(items, params, findings)
        _check_steps(states, params, index)
        items += states
    if options.strict:
        findings.check(index.path)
    if not matched and tensors:
        raise findings.make_no_match_error(index.path)
    return Decision(
        index=index,
        run=run,
        items=tuple(item for item in items if item.slice.param not in options.kept),
        without_states=tuple(name for name in without_states if matched[name] not in options.kept),
        hyper=tuple(hyper) if index.atoms.keys() - options.kept else (),
        findings=findings,
    )


def globalize(param: LiveParam, parts: Mapping[str, LivePart], run: LiveRun) -> LiveParam:
    """`param` with parts of global tensors, if the optimizer steps local tensors, or ranges of them (ZeRO)."""
    if run.has_global_parts or param.name not in parts:
        return param
    part = parts[param.name]
    parts_by_state = {state: part.narrow_to(state_part) for state, state_part in param.apart.items()}
    return replace(param, part=param.part and part.narrow_to(param.part), apart=parts_by_state)


def _check_steps(states: Sequence[LoadItem], params: Sequence[LiveParam], index: Index) -> None:
    """Raise UnsupportedError for step counts that the optimizer would round, as it keeps them in float32."""
    in_float32 = {param.name for param in params if (param.keeps or {}).get(STEP) is DType.FLOAT32}
    steps = [item for item in states if item.state == STEP and item.name in in_float32]
    names = [item.slice.param for item in steps if item.source.dtype is not DType.FLOAT32]
    if names:
        with Prober() as prober:
            counts = OptimizerPlan(replace(index, atoms={name: index.atoms[name] for name in names}), prober)
        for name in names:
            counts.check_float32(name, STEP, remedy="Load without optimizer=")


def check_agreement(ranks: Ranks, index: Index, arguments: Mapping[str, object]) -> None:
    """Raise LoadError, on all ranks, if their checkpoints or arguments differ."""
    files = [(os.path.relpath(file.path, index.path), file.nbytes) for file in index.files]
    identity = f"{index.path}, step {index.step}, files {xxhash.xxh3_64_hexdigest(repr(files).encode())}"
    texts = {name: repr(value)[:_MOST_CHARACTERS] for name, value in arguments.items()}
    of_ranks = ranks.share({"checkpoint": identity, **texts})
    differing = [
        f"{name} of rank {rank}: {texts[name]}, of rank 0: {of_ranks[0][name]}"
        for name in of_ranks[0]
        for rank, texts in enumerate(of_ranks)
        if texts[name] != of_ranks[0][name]
    ]
    if differing:
        raise LoadError(
            f"expected the same checkpoint and arguments on every rank; these differ:\n{format_list(differing)}"
        )


def _plain_groups(index: Index) -> Sequence[ParamGroup]:
    """Param groups in which hyper-parameters that were stored as tensors are numbers."""

    def to_plain(value: object) -> object:
        if not isinstance(value, InlineTensor | TensorRef) or value.numel != 1:
            return value
        if isinstance(value, InlineTensor):
            return viewed(memoryview(value.data), value.dtype)[0].item()
        with open_source(value.path) as file:
            return viewed(memoryview(file.read(value.offset, value.nbytes)), value.dtype)[0].item()

    return [
        replace(group, hyper={key: to_plain(value) for key, value in group.hyper.items()}) for group in index.groups
    ]
