"""Looks at what the ranks of a checkpoint hold, and proposes rules for the names that no family knows.

1. Tensors by rank from a format that can tell them; else the pieces of an index, where they record boxes of wholes.
2. Parts of one tensor are compared: all of it when it is small, else windows that are spread over it.
3. What is seen goes to `ucp.families.infer`, which decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucp.checks.explain import recorded_arguments
from ucp.contract.protocols import LocalTensor
from ucp.contract.registry import families, family, recognise
from ucp.core.dtypes import DType
from ucp.core.index import AtomIndex, Index
from ucp.core.names import WEIGHT
from ucp.core.tensor import Tensor
from ucp.errors import MalformedError
from ucp.families.family import Family
from ucp.families.infer import Compared, Observed, Proposal, as_toml, proposed, template_of
from ucp.io.elements import numpy_dtype
from ucp.transfer.probe import Prober

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Proposed", "propose"]

_WINDOW = 1 << 10
"""Elements of one window."""

_WINDOWS = 8
"""Windows of one tensor; a tensor of no more elements than these have is compared as a whole."""

_CLOSE = 0.9
"""Correlation of parts that are copies which drifted apart; parts that were cut have one near 0."""

_SHARD = re.compile(r"(?:shard|chunk)\(dim=(\d+)(?:, blocks=\[([^\]]*)\])?")
"""Name of a pattern that a checkpoint is read by. Examples: shard(dim=0), shard(dim=0, blocks=[96, 96])."""

_PLAIN = ("replicate", "partial")
"""Names of such patterns that a rules file has as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """Rules proposed for a checkpoint."""

    extends: tuple[str, ...]
    """Family whose rules hold for the other names; none when no family knows most of them."""
    proposals: tuple[Proposal, ...]
    """One per template that has no rule."""
    toml: str
    """The rules file; empty where nothing is cut."""


def propose(path: Path, *, everything: bool = False) -> Proposed:
    """Rules for the checkpoint at `path`; `everything`: also for names that a family knows. Raises SourceError.

    No rules, and no file, for a checkpoint of one tensor-parallel rank, where nothing is cut.
    """
    fmt, _ = recognise(path)
    local = fmt.local_tensors(path)
    if local is not None:
        arguments = local.arguments
        seen = _observed_parts(local.tensors)
        parts = 1 + max((own.coords.get("tp", 0) for own in local.tensors), default=0)
    else:
        index = fmt.read(path)
        arguments = recorded_arguments(index)
        seen = [_observed_pieces(atom, index) for atom in index.atoms.values()]
        parts = max(index.topology.tp, index.topology.expert_tp)
    if not seen:
        raise MalformedError(f"expected a model in {path}; there is not one tensor in it")
    if parts == 1:
        return Proposed(extends=(), proposals=(), toml="")
    known = None if everything else _nearest([own.name for own in seen])
    proposals = _proposals([own for own in seen if known is None or not _knows(known, own.name)], seen, arguments)
    extends = () if known is None else (known.name,)
    return Proposed(
        extends=extends,
        proposals=tuple(proposals),
        toml=as_toml("my-model", proposals, source=str(path), extends=extends),
    )


def _knows(known: Family, name: str) -> bool:
    return known.ignores(name) or bool(known.rules_of(name))


def _nearest(names: Iterable[str]) -> Family | None:
    """The family that knows most names, when it knows half of them; of several the one with the fewest rules."""
    kinds = list({template_of(name): name for name in names}.values())
    counted = [(sum(_knows(own, name) for name in kinds), -len(own.rules), own) for own in map(family, families())]
    count, _, best = max(counted, key=lambda item: item[:2])
    return best if 2 * count >= len(kinds) else None


def _proposals(wanted: Sequence[Observed], seen: Sequence[Observed], arguments: Mapping[str, object]) -> list[Proposal]:
    by_template: dict[str, list[Observed]] = {}
    for own in wanted:
        by_template.setdefault(template_of(own.name), []).append(own)
    modules: dict[str, list[Observed]] = {}
    for own in seen:
        modules.setdefault(_module(own.name), []).append(own)
    return [
        proposed(members, arguments, [own for own in modules[_module(members[0].name)] if own is not members[0]])
        for members in by_template.values()
    ]


def _module(name: str) -> str:
    """The module that the layers beside a parameter's layer are in."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _observed_parts(tensors: Sequence[LocalTensor]) -> list[Observed]:
    """Every tensor with its parts: those of one stage, chunk and, for experts, expert rank."""
    parts: dict[tuple[object, ...], dict[int, Tensor]] = {}
    for own in tensors:
        axis = "etp" if "{expert}" in template_of(own.name) else "tp"
        where = [(key, at) for key, at in sorted(own.coords.items()) if key != "tp" and (key != "ep" or axis == "etp")]
        parts.setdefault((own.name, axis, *where), {}).setdefault(own.coords.get("tp", 0), own.ref)
    with Prober() as prober:
        return [
            Observed(
                name=str(key[0]),
                axis=str(key[1]),
                shapes=tuple(own[at].shape for at in sorted(own)),
                compared=_compared([own[at] for at in sorted(own)], prober),
            )
            for key, own in parts.items()
        ]


def _compared(refs: Sequence[Tensor], prober: Prober) -> Compared:
    if len(refs) == 1:
        return Compared.ALONE
    windows = [_windows(ref, prober) for ref in refs]
    values = [_values(window, ref.dtype) for window, ref in zip(windows, refs, strict=True)]
    if all(own.size and (own == values[0].flat[0]).all() for own in values):
        return Compared.CONSTANT
    if len({ref.shape for ref in refs}) > 1:
        return Compared.DIFFERENT
    if all(window == windows[0] for window in windows):
        return Compared.EQUAL
    return Compared.CLOSE if all(_correlation(values[0], own) > _CLOSE for own in values[1:]) else Compared.DIFFERENT


def _windows(ref: Tensor, prober: Prober) -> bytes:
    if ref.numel <= _WINDOW * _WINDOWS:
        return prober.window(ref, 0, ref.numel)
    starts = [at * (ref.numel - _WINDOW) // (_WINDOWS - 1) for at in range(_WINDOWS)]
    return b"".join(prober.window(ref, start, start + _WINDOW) for start in starts)


def _values(data: bytes, dtype: DType) -> NDArray[Any]:
    import numpy as np

    return np.frombuffer(data, dtype=numpy_dtype(dtype)).astype(np.float64)


def _correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    import numpy as np

    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def _observed_pieces(atom: AtomIndex, index: Index) -> Observed:
    """A parameter as an index records it: the pieces of its weight, or the pattern that the format told."""
    axis = "etp" if "{expert}" in template_of(atom.name) else "tp"
    parts = index.topology.expert_tp if axis == "etp" else index.topology.tp
    pattern = atom.patterns.get(axis, "") if parts > 1 else ""
    shard = _SHARD.match(pattern)
    recorded = _as_rule(shard) if shard is not None else f'"{pattern}"' if pattern in _PLAIN else ""
    cut = None if recorded or parts == 1 else _cut_of(atom, parts)
    dim = int(shard[1]) if shard is not None else cut[0] if cut is not None and cut[1] else None
    whole = atom.global_shape
    divides = dim is None or whole[dim] % parts == 0
    shape = whole if dim is None or not divides else (*whole[:dim], whole[dim] // parts, *whole[dim + 1 :])
    return Observed(
        name=atom.name,
        axis=axis,
        shapes=(shape,),
        compared=Compared.ALONE,
        cut=cut,
        recorded=recorded,
        is_whole=not divides,
    )


def _as_rule(shard: re.Match[str]) -> str:
    """A recorded cut as a rules file has it: equal blocks as a share of the dim, others by their lengths."""
    lengths = shard[2].split(", ") if shard[2] else []
    if len(lengths) < 2:
        return f'{{ pattern = "shard", dim = {shard[1]} }}'
    share = f'"dim / {len(lengths)}"'
    blocks = ", ".join(own if len(set(lengths)) > 1 else share for own in lengths)
    return f'{{ pattern = "shard", dim = {shard[1]}, blocks = [{blocks}] }}'


def _cut_of(atom: AtomIndex, parts: int) -> tuple[int, int] | None:
    """Dim and blocks of a weight stored in boxes; None when they are no such cut."""
    if WEIGHT not in atom.states:
        return None
    boxes = {own.box for own in atom.states[WEIGHT].fragments if own.replica == 0}
    shape = atom.global_shape
    dims = {dim for box in boxes for dim, length in enumerate(box.sizes) if length != shape[dim]}
    if not dims:
        return 0, 0
    if len(dims) > 1 or len(boxes) % parts:
        return None
    return dims.pop(), len(boxes) // parts
