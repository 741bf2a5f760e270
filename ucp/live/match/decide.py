"""Decide a load: match what is live on this rank with a checkpoint. No tensor is read or written."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_

import xxhash

from ucp.core.gaps import check_doubts
from ucp.core.index import DoubtKind, Index, Kind, ParamGroup
from ucp.core.tensor import DType, InlineTensor, TensorRef
from ucp.errors import LoadError, listed
from ucp.io.elements import viewed
from ucp.io.files import open_source
from ucp.live.adapters import LiveRun
from ucp.live.match.findings import Findings
from ucp.live.match.groups import LiveGroup, match_groups
from ucp.live.match.states import match_states, note_rounded
from ucp.live.match.tensors import filter_fitting, find_unexpected, match_tensors, plan_weights
from ucp.live.parts import LiveParam, LivePart, LoadItem
from ucp.live.run.ranks import Ranks
from ucp.source.moments import ZeroMoments, before_first_step, check_moments

_LONG = 1000
"""Characters of an argument that ranks tell each other."""


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
    """Doubts of the checkpoint to be passed over."""


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
    """Tensor of the model to its atom, where that fits."""
    groups: tuple[LiveGroup, ...]
    """Groups of the optimizer, by the names of atoms."""
    findings: Findings
    """What did not fit so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Atoms that some rank loads."""

    present: Collection[str]
    """Those that a model has."""
    stepped: Collection[str]
    """Those that an optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Everything that is to be done on this rank."""

    index: Index
    """The checkpoint."""
    run: LiveRun
    """What to load into."""
    wants: tuple[LoadItem, ...]
    """What to bring, in the order of the model."""
    fresh: tuple[str, ...] = ()
    """Parameters to be left without a state."""
    hyper: tuple[Mapping[str, object], ...] = ()
    """Hyper-parameters to set in each group of the optimizer."""
    findings: Findings = field(default_factory=Findings)
    """What did not fit, and what is worth knowing."""


def match(run: LiveRun, index: Index, options: LoadOptions, *, dtype: DType | None = None) -> Matching:
    """The tensors of this rank by names and shapes.

    `dtype`: type of the floating weights, where it was said. Raises SourceError for a doubtful checkpoint, LoadError
    for weights of another type.
    """
    accepted = options.accept | ({DoubtKind.MOMENT_SHAPES} if run.optimizer is None else frozenset())
    check_doubts(index, accepted)
    if run.optimizer is not None:
        check_moments(before_first_step(index), options.zero_moments)
    findings = Findings(notes=[*run.model.notes, *(f"--accept {doubt.kind}: {doubt.text}" for doubt in index.doubts)])
    named = match_tensors(run.model.tensors, index, rename=options.rename, findings=findings)
    matched = filter_fitting(run.model.tensors, named, index, findings)
    other = [
        f"{own.name}: {own.dtype}"
        for own in run.model.tensors
        if own.name in matched and index.atoms[matched[own.name]].kind is not Kind.BUFFER
        if dtype is not None and own.dtype.is_floating and own.dtype is not dtype
    ]
    if other:
        raise LoadError(
            f"expected floating weights of {dtype}, as dtype says; got\n{listed(other)}\n"
            f"bring the model to it before (model.to(torch.{dtype})), or leave dtype out"
        )
    groups = () if run.optimizer is None else run.optimizer.groups()
    own_groups = (replace(own, params=tuple(matched[name] for name in own.params if name in matched)) for own in groups)
    present = frozenset(named.values())
    return Matching(index=index, run=run, present=present, matched=matched, groups=tuple(own_groups), findings=findings)


def used_anywhere(matching: Matching, ranks: Ranks) -> Used:
    """Atoms that any rank loads. Collective: a bit for every atom is shared."""
    number = {name: at for at, name in enumerate(matching.index.atoms)}
    stepped = {name for group in matching.groups for name in group.params}
    used = []
    for of_ranks in zip(*ranks.share((_bits(matching.present, number), _bits(stepped, number))), strict=True):
        every = reduce(or_, (int.from_bytes(own, "little") for own in of_ranks)).to_bytes(
            len(number) // 8 + 1, "little"
        )
        used.append(frozenset(name for name, at in number.items() if every[at // 8] >> at % 8 & 1))
    return Used(present=used[0], stepped=used[1])


def _bits(names: Collection[str], number: Mapping[str, int]) -> bytes:
    bits = bytearray(len(number) // 8 + 1)
    for name in names:
        bits[number[name] // 8] |= 1 << number[name] % 8
    return bytes(bits)


def decide(matching: Matching, used: Used, options: LoadOptions) -> Decision:
    """What this rank loads. Writes nothing. Raises LoadError with everything that does not fit."""
    index, run, matched, findings = matching.index, matching.run, matching.matched, matching.findings
    tensors = run.model.tensors
    find_unexpected(tensors, used.present, index, findings)
    brought = [own for own in tensors if own.name not in run.model.derived]
    wants = plan_weights(brought, matched, index, findings=findings)
    fresh: list[str] = []
    hyper: list[dict[str, object]] = []
    if run.optimizer is not None:
        hyper = match_groups(matching.groups, _plain_groups(index), findings=findings)
        parts = {own.name: own.part for own in tensors}
        params = [_placed(own, parts, run) for own in run.optimizer.params(hyper)]
        states, fresh = match_states(params, parts, matched, index, stepped=used.stepped, findings=findings)
        note_rounded(wants, params, findings)
        wants += states
    if options.strict:
        findings.check(index.path)
    if not matched and tensors:
        raise findings.make_no_match_error(index.path)
    return Decision(
        index=index,
        run=run,
        wants=tuple(wants),
        fresh=tuple(fresh),
        hyper=tuple(hyper),
        findings=findings,
    )


def _placed(param: LiveParam, parts: Mapping[str, LivePart], run: LiveRun) -> LiveParam:
    """What an optimizer of local tensors, or of ranges of them as ZeRO cuts them, steps of the whole model."""
    if run.has_global_parts or param.name not in parts:
        return param
    held = parts[param.name]
    apart = {state: held.narrow_to(own) for state, own in param.apart.items()}
    return replace(param, part=param.part and held.narrow_to(param.part), apart=apart)


def check_agreement(ranks: Ranks, index: Index, asked: Mapping[str, object]) -> None:
    """Raise LoadError, on all ranks, when they read other checkpoints or were called with other arguments."""
    files = [(os.path.relpath(file.path, index.path), file.nbytes) for file in index.files]
    read = f"{index.path}, step {index.step}, files {xxhash.xxh3_64_hexdigest(repr(files).encode())}"
    told = ranks.share({"checkpoint": read, **{name: repr(value)[:_LONG] for name, value in asked.items()}})
    differing = [
        f"{name} of rank {rank}: {own[name]}, of rank 0: {told[0][name]}"
        for name in told[0]
        for rank, own in enumerate(told)
        if own[name] != told[0][name]
    ]
    if differing:
        raise LoadError(f"expected the same on every rank; these are not those of rank 0:\n{listed(differing)}")


def _plain_groups(index: Index) -> Sequence[ParamGroup]:
    """Parameter groups in which hyper-parameters that were stored as tensors are numbers."""

    def plain(value: object) -> object:
        if not isinstance(value, InlineTensor | TensorRef) or value.numel != 1:
            return value
        if isinstance(value, InlineTensor):
            return viewed(memoryview(value.data), value.dtype)[0].item()
        with open_source(value.path) as file:
            return viewed(memoryview(file.read(value.offset, value.nbytes)), value.dtype)[0].item()

    return [replace(group, hyper={key: plain(value) for key, value in group.hyper.items()}) for group in index.groups]
