"""Compare checkpoints with their recorded checksums, with themselves, and with one another; block by block.

Everything is streamed: memory is `LANE` bytes per thread, whatever the size of a tensor.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import isnan
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import xxhash

from ucp.contract.protocols import Observer
from ucp.contract.rank_extras import Checksums
from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Index, StateIndex
from ucp.core.region import Box
from ucp.core.slices import GAP, Locator, Slice, block_ranges, resolve, whole_slice
from ucp.core.tensor import Record, Tensor, TensorRef
from ucp.errors import CorruptError, SourceError, counted
from ucp.io.elements import Difference, differing, viewed, widened, without_payloads
from ucp.io.pickle.fields import shown
from ucp.transfer.checksums import mismatches
from ucp.transfer.drift import drifts
from ucp.transfer.gather import Gatherer, Sources, Span
from ucp.transfer.tasks import BLOCK, bundle, fit_workers
from ucp.transfer.tiles import blocks, is_crosswise
from ucp.transfer.value_diff import Apart, differing_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

__all__ = [
    "LANE",
    "THREADS",
    "Change",
    "casts_between",
    "checked_bytes",
    "compare",
    "compare_copies",
    "drifting",
    "fit_threads",
    "keeps_extras",
    "scan_digests",
    "scan_records",
]

THREADS = 4
"""Threads where nobody says how many."""

LANE = 5 * BLOCK
"""Bytes that one thread may need: a block of each side, one that is decoded or cast, an encoded one, and the rest."""

_WIDEST = 16
"""Bytes of an element as which two types are compared that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One way in which two checkpoints differ."""

    param: str
    """Parameter, extra (as "extra/NAME"), or "" for what belongs to none."""
    state: str
    """State, hyper-parameter or place in the extra; "" for the whole."""
    what: str
    """"missing", "shape", "dtype", "kind", "alias", "group", "extra" or "values"."""
    a: str
    """What the first has."""
    b: str
    """What the second has."""
    numel: int = 0
    """Elements that differ."""
    largest: float = 0.0
    """Largest absolute difference."""

    def __str__(self) -> str:
        whose = "/".join(filter(None, [self.param, self.state]))
        both = self.a if self.a == self.b else f"{self.a} and {self.b}"
        most = f" differ, by {self.largest:g} at most" if self.numel else ""
        return f"{whose}{': ' if whose else ''}{self.what}: {both}{most}"


def fit_threads(memory: int, *, asked: int = 0) -> int:
    """Threads that fit `memory` bytes: at most `asked` (0: `THREADS`). Raises MemoryBudgetError when not one does."""
    return fit_workers(memory, workers=asked or THREADS, threads=1, lane=LANE)[0]


def keeps_extras(a: Index, b: Index) -> bool:
    """Whether `b` should have all extras of `a` as they are: atoms of the same run, in the layout that saved it."""
    return bool(b.origin) and (b.origin, b.topology) == (a.origin or a.format, a.topology)


def compare(
    a: Index, b: Index, observer: Observer, *, cast: bool = False, extras: bool = False, threads: int = THREADS
) -> list[Change]:
    """Every difference between two checkpoints; empty when their atoms are equal bit for bit.

    `cast`: where the dtype differs, compare what `a` holds after a cast to `b`'s dtype. `extras`: compare these too.
    """
    changes = list(_structure(a, b, cast=cast))
    shared = [
        (atom.name, name, state, b.atoms[atom.name].states[name])
        for atom, name, state in a.states()
        if atom.name in b.atoms and name in b.atoms[atom.name].states
    ]
    shared = [item for item in shared if item[2].global_shape == item[3].global_shape]
    if extras:
        found = list(_extras(a, b))
        changes += [item for item in found if isinstance(item, Change)]
        shared += [item for item in found if not isinstance(item, Change)]
    observer.begin(title="compare", nbytes=sum(_width(own, other, cast) * own.numel for *_, own, other in shared))
    apart: dict[tuple[str, str, int], list[tuple[int, float]]] = {}

    def some(jobs: Sequence[_Compared]) -> None:
        for job, result in _differing(jobs):
            apart.setdefault((job.own.param, job.own.state, job.left.locator.state.numel), []).append(result)
        observer.advance(sum(job.nbytes for job in jobs))

    jobs = (job for item in shared for job in _compared(*item, cast=cast))
    try:
        _each(bundle(jobs, limit=BLOCK), some, threads)
    finally:
        observer.end()
    for (name, state, total), parts in sorted(apart.items()):
        numel = sum(count for count, _ in parts)
        largest = max((part for _, part in parts), key=lambda value: (isnan(value), value))
        text = f"{numel:,} of {counted(total, 'element')}"
        changes.append(Change(param=name, state=state, what="values", a=text, b=text, numel=numel, largest=largest))
    return changes


def casts_between(a: Index, b: Index) -> tuple[str, ...]:
    """Changes of dtype from `a` to `b`, a line per state and change, with the number of parameters."""
    changed = Counter(
        f"{name}: {state.dtype} -> {b.atoms[atom.name].states[name].dtype}"
        for atom, name, state in a.states()
        if atom.name in b.atoms
        and name in b.atoms[atom.name].states
        and b.atoms[atom.name].states[name].dtype is not state.dtype
    )
    return tuple(f"{change} in {counted(count, 'parameter')}" for change, count in changed.items())


def compare_copies(index: Index, observer: Observer, *, threads: int = THREADS) -> list[str]:
    """Copies in the source (replicas, the model's own low-precision weights) that differ from what is taken."""
    return sorted(line for lines in drifting(index, observer, threads=threads).values() for line in lines)


def drifting(index: Index, observer: Observer, *, threads: int = THREADS) -> dict[tuple[str, str], list[str]]:
    """States whose copies differ from what is taken, by parameter and state, with a line for each difference."""
    held = [own for own in index.states() if any(fragment.replica for fragment in own[2].fragments)]
    found: dict[tuple[str, str], list[str]] = {}
    observer.begin(title="copies", nbytes=sum(state.nbytes for _, _, state in held))

    def some(parts: Sequence[_Part]) -> None:
        taken = [(own, locator, data) for (own, locator), data in zip(parts, _read(parts), strict=True)]
        for own, lines in drifts(taken, _gatherer()):
            found.setdefault((own.param, own.state), []).extend(lines)
        observer.advance(sum(part.nbytes for part in parts))

    parts = (
        _Part(part, locator)
        for atom, name, state in held
        for locator in (Locator(state),)
        for part in blocks(whole_slice(atom.name, name, state), state, nbytes=BLOCK)
    )
    try:
        _each(bundle(parts, limit=BLOCK), some, threads)
    finally:
        observer.end()
    return found


def checked_bytes(index: Index) -> int:
    """Bytes that `scan_records` and `scan_digests` between them look at."""
    digested = sum(state.nbytes for _, _, state in index.states() if state.digests)
    return digested + sum(record.nbytes for record in _undigested(index))


def _undigested(index: Index) -> list[Record]:
    """Records whose bytes no digest of a state covers: what is digested need not be summed as well."""
    covered = {
        (fragment.ref.path, fragment.ref.offset, fragment.ref.nbytes)
        for _, _, state in index.states()
        if state.digests
        for fragment in state.fragments
        if isinstance(fragment.ref, TensorRef)
    }
    return [record for record in index.records if (record.path, record.offset, record.nbytes) not in covered]


def scan_records(index: Index, observer: Observer, *, threads: int = THREADS) -> list[Record]:
    """Stretches whose bytes are not those that the writer summed; without those that `scan_digests` covers."""
    records = sorted(_undigested(index), key=lambda record: (record.path, record.offset))
    spans: list[Span] = []
    observer.begin(title="checksums", nbytes=sum(record.nbytes for record in records))

    def some(job: tuple[str, list[tuple[int, int]]]) -> None:
        gatherer = Gatherer(sources=_gatherer().sources)
        gatherer.scan_many(*job)
        spans.extend(gatherer.spans)
        observer.advance(sum(nbytes for _, nbytes in job[1]))

    try:
        _each(_near(records), some, threads)
    finally:
        observer.end()
    return mismatches(records, spans)


def _near(records: Iterable[Record]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """What is read at once of records in increasing offset: stretches of a file that are near, a block at most."""
    path, own, stop = "", list[tuple[int, int]](), 0
    for record in records:
        for low in range(record.offset, record.offset + record.nbytes, BLOCK):
            nbytes = min(BLOCK, record.offset + record.nbytes - low)
            if own and (record.path != path or low - stop >= GAP or low + nbytes - own[0][0] > BLOCK):
                yield path, own
                own = []
            own.append((low, nbytes))
            path, stop = record.path, low + nbytes
    if own:
        yield path, own


def scan_digests(index: Index, observer: Observer, *, threads: int = THREADS) -> list[str]:
    """States whose bytes are not those that were digested, one line each."""
    held = [own for own in index.states() if own[2].digests]
    wrong: list[str] = []
    observer.begin(title="digests", nbytes=sum(state.nbytes for _, _, state in held))

    def some(parts: Sequence[_Part]) -> None:
        wrong.extend(_undigestible(parts))
        observer.advance(sum(part.nbytes for part in parts))

    try:
        _each(bundle((part for own in held for part in _digested(*own)), limit=BLOCK), some, threads)
    finally:
        observer.end()
    return sorted(wrong)


def _digested(atom: AtomIndex, name: str, state: StateIndex) -> Iterator[_Part]:
    """The stretches of a state that have a digest each."""
    own, locator = whole_slice(atom.name, name, state), Locator(state)
    for low, high in block_ranges(0, own.stop, state.digest_nbytes // own.dtype.itemsize):
        yield _Part(replace(own, start=low, stop=high), locator)


def _undigestible(parts: Sequence[_Part]) -> Iterator[str]:
    """A line for each of some stretches whose bytes are not those that were digested, or cannot be read."""
    try:
        read = _read(parts)
    except (CorruptError, SourceError) as error:
        if len(parts) > 1:  # which of them it is, is seen when each is read alone
            yield from chain.from_iterable(_undigestible([part]) for part in parts)
        else:
            yield f"{parts[0].label}: {error}"
        return
    for part, data in zip(parts, read, strict=True):
        state = part.locator.state
        number = part.own.start * part.own.dtype.itemsize // state.digest_nbytes
        if xxhash.xxh3_64_hexdigest(data) != state.digests[number]:
            yield f"{part.label}, in {state.fragments[0].path}"


class _Part(NamedTuple):
    """A part of a state that is read at once."""

    own: Slice
    """Which."""
    locator: Locator
    """Where its pieces are found."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.own.nbytes

    @property
    def label(self) -> str:
        """Its name, for messages."""
        return f"{self.own.param}/{self.own.state}, elements {self.own.start}:{self.own.stop}"


class _Compared(NamedTuple):
    """The same elements of two checkpoints, which are compared at once."""

    left: _Part
    """Of the first; cast, where that was asked for."""
    right: _Part
    """Of the second."""

    @property
    def own(self) -> Slice:
        """Which they are."""
        return self.left.own

    @property
    def nbytes(self) -> int:
        """Bytes of them, in the wider type."""
        return max(self.left.nbytes, self.right.nbytes)


def _is_alike(a: StateIndex, b: StateIndex, cast: bool) -> bool:  # noqa: FBT001
    """Whether the bits of two states are compared, those of the first after a cast to the type of the second."""
    return a.dtype is b.dtype or (cast and a.dtype.is_floating and b.dtype.is_floating)


def _width(a: StateIndex, b: StateIndex, cast: bool) -> int:  # noqa: FBT001
    """Bytes of an element, in the wider type."""
    return b.dtype.itemsize if _is_alike(a, b, cast) else max(a.dtype.itemsize, b.dtype.itemsize)


def _compared(param: str, name: str, a: StateIndex, b: StateIndex, *, cast: bool) -> Iterator[_Compared]:
    """All elements of both, a block at a time, such that either is read once."""
    alike = _is_alike(a, b, cast)
    left, right = whole_slice(param, name, a, dtype=b.dtype if alike else None), whole_slice(param, name, b)
    lead, state = (right, b) if is_crosswise(right, b, nbytes=BLOCK) else (left, a)
    nbytes = BLOCK // (_width(a, b, cast) if alike else _WIDEST) * lead.dtype.itemsize
    first, second = Locator(a), Locator(b)
    for part in blocks(lead, state, nbytes=nbytes):
        yield _Compared(_Part(_typed(part, left.dtype), first), _Part(_typed(part, right.dtype), second))


def _typed(own: Slice, dtype: DType) -> Slice:
    return own if own.dtype is dtype else replace(own, dtype=dtype)


def _differing(jobs: Sequence[_Compared]) -> Iterator[tuple[_Compared, tuple[int, float]]]:
    """Those of some elements that differ, with how many do, and by how much."""
    lefts, rights = _read([job.left for job in jobs]), _read([job.right for job in jobs])
    if lefts[0].obj == rights[0].obj and all(job.left.own.dtype is job.right.own.dtype for job in jobs):
        return
    for job, left, right in zip(jobs, lefts, rights, strict=True):
        result = _difference(viewed(left, job.left.own.dtype), viewed(right, job.right.own.dtype), job)
        if result is not None:
            yield job, (result.numel, result.largest)


def _difference(left: NDArray[Any], right: NDArray[Any], job: _Compared) -> Difference | None:
    if left.dtype != right.dtype:
        wide = "complex128" if "c" in (left.dtype.kind, right.dtype.kind) else "float64"
        left, right = widened(left, wide), widened(right, wide)
    found = differing(left, right)
    if found and job.left.locator.state.dtype is not job.right.locator.state.dtype:
        return differing(without_payloads(left, right), right)  # casts need not agree in the payload of a NaN
    return found


_local = threading.local()


def _gatherer() -> Gatherer:
    """This thread's own; made by `_each`, which closes its files."""
    own: Gatherer = _local.gatherer
    return own


def _read(parts: Sequence[_Part]) -> list[memoryview]:
    """The bytes of parts in one buffer; they are read together where they are neighbours in a file."""
    data = memoryview(bytearray(sum(part.nbytes for part in parts)))
    views, wanted, at = [], [], 0
    for own, locator in parts:
        views.append(data[at : at + own.nbytes])
        wanted.append((views[-1], own.dtype, resolve(own, locator, own.start, own.stop)))
        at += own.nbytes
    _gatherer().fill_many(wanted)
    return views


def _each(jobs: Iterable[T], some: Callable[[T], None], threads: int) -> None:
    """`some(job)` for every job, on so many threads, never more in flight than there are threads."""
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

    queue = iter(jobs)
    opened: list[Sources] = []

    def start() -> None:
        opened.append(Sources())
        _local.gatherer = Gatherer(sources=opened[-1])

    try:
        with ThreadPoolExecutor(threads, initializer=start) as pool:
            running = {pool.submit(some, job) for job in islice(queue, threads)}
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                running |= {pool.submit(some, job) for job in islice(queue, len(finished))}
    finally:
        for sources in opened:
            sources.close()


def _structure(a: Index, b: Index, *, cast: bool) -> Iterator[Change]:
    for name in dict.fromkeys((*a.atoms, *b.atoms)):
        if name not in b.atoms or name not in a.atoms:
            yield _missing(name, "", in_a=name in a.atoms)
            continue
        own, other = a.atoms[name], b.atoms[name]
        if own.kind is not other.kind and 0 not in own.global_shape:  # nothing to train is frozen or not, as one likes
            yield Change(param=name, state="", what="kind", a=own.kind, b=other.kind)
        for state in dict.fromkeys((*own.states, *other.states)):
            if state not in own.states or state not in other.states:
                yield _missing(name, state, in_a=state in own.states)
            else:
                yield from _state(name, state, own.states[state], other.states[state], cast=cast)
    for alias in dict.fromkeys((*a.aliases, *b.aliases)):
        left, right = a.aliases.get(alias, "-"), b.aliases.get(alias, "-")
        if left != right:
            yield Change(param=alias, state="", what="alias", a=left, b=right)
    yield from _groups(a, b)


def _extras(a: Index, b: Index) -> Iterator[Change | tuple[str, str, StateIndex, StateIndex]]:
    """Differences between extras of one name and rank, and tensors of theirs whose elements are to be compared."""
    left, right = ({(extra.name, extra.rank): extra.value for extra in index.extras} for index in (a, b))
    for key in dict.fromkeys((*left, *right)):
        name, rank = key
        label = f"extra/{name}" if rank is None else f"extra/{name}@rank{rank}"
        if key not in left or key not in right:
            yield _missing(label, "", in_a=key in left)
            continue
        for item in differing_values(left[key], right[key]):
            if isinstance(item, Apart):
                yield Change(param=label, state=item.place, what="extra", a=item.a, b=item.b)
            else:
                yield label, item.place, _state_of(item.a), _state_of(item.b)


def _state_of(tensor: Tensor) -> StateIndex:
    """A tensor of an extra, as if it were the state of a parameter."""
    whole = Fragment(box=Box.whole(tensor.shape), ref=tensor)
    return StateIndex(dtype=tensor.dtype, global_shape=tensor.shape, fragments=(whole,))


def _missing(name: str, state: str, *, in_a: bool) -> Change:
    return Change(
        param=name, state=state, what="missing", a="present" if in_a else "missing", b="missing" if in_a else "present"
    )


def _state(name: str, label: str, own: StateIndex, other: StateIndex, *, cast: bool) -> Iterator[Change]:
    if own.global_shape != other.global_shape:
        yield Change(
            param=name, state=label, what="shape", a=str(list(own.global_shape)), b=str(list(other.global_shape))
        )
    elif own.dtype is not other.dtype and not cast:
        yield Change(param=name, state=label, what="dtype", a=own.dtype, b=other.dtype)


def _groups(a: Index, b: Index) -> Iterator[Change]:
    """Hyper-parameters of what both have; the order of groups and of parameters in them is a matter of layout.

    A parameter that one of them has no group for has its hyper-parameters on one side; where none has, it is said once.
    """
    left, right = _hyper(a), _hyper(b)
    if bool(left) is not bool(right):
        yield Change(param="", state="", what="group", a=_grouped(left), b=_grouped(right))
        return
    for name in sorted(set(left) ^ set(right)):
        if name in a.atoms and name in b.atoms and 0 not in a.atoms[name].global_shape:  # as with its kind
            yield Change(param=name, state="", what="group", a=_place(left, name), b=_place(right, name))
    checksums = Checksums((*a.records, *b.records))
    found: dict[tuple[int, int], list[tuple[str, str, str]]] = {}
    for name in sorted(set(left) & set(right)):
        pair = left[name], right[name]
        both = id(pair[0]), id(pair[1])
        if both not in found:
            found[both] = list(_settings(*pair, checksums))
        for key, own, other in found[both]:
            yield Change(param=name, state=key, what="group", a=own, b=other)


def _grouped(hyper: Mapping[str, object]) -> str:
    return f"{counted(len(hyper), 'parameter')} in groups" if hyper else "-"


def _place(hyper: Mapping[str, object], name: str) -> str:
    return "in a group" if name in hyper else "-"


def _settings(a: Mapping[str, object], b: Mapping[str, object], checksums: Checksums) -> Iterator[tuple[str, str, str]]:
    """Hyper-parameters that differ: name, and both values in words."""
    for key in sorted(set(a) | set(b)):
        sides = [[side[key]] if key in side else _IMPLIED.get(key, []) for side in (a, b)]
        if not checksums.same(*sides):
            own, other = (shown(side[0]) if side else "-" for side in sides)
            yield key, own, other


_IMPLIED: Mapping[str, list[object]] = {"bias_correction": [True]}
"""Hyper-parameters that mean the same where they are not there: an Adam without this one always corrects."""


def _hyper(index: Index) -> dict[str, Mapping[str, object]]:
    return {name: group.hyper for group in index.groups for name in group.params}
