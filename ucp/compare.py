"""Compare checkpoints with their recorded checksums, with themselves, and with one another; block by block.

Everything is streamed: memory is `LANE` bytes per thread, whatever the size of a tensor.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isnan

import xxhash

from ucp.atom import Index, StateIndex
from ucp.checksums import mismatches
from ucp.errors import CorruptError, SourceError, counted
from ucp.gather import Gatherer, Sources, Span
from ucp.numeric import differing, viewed, widened, without_payloads
from ucp.plan import BLOCK, fit_workers
from ucp.protocols import Observer
from ucp.slice import Locator, Slice, resolve, whole_slice
from ucp.tensor import Record, TensorRef
from ucp.tiles import blocks, is_crosswise
from ucp.union import drift

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
    """Parameter, or "" for what belongs to none."""
    state: str
    """State, or "" for the parameter as a whole."""
    what: str
    """"missing", "shape", "dtype", "kind", "alias", "group" or "values"."""
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


def compare(a: Index, b: Index, observer: Observer, *, cast: bool = False, threads: int = THREADS) -> list[Change]:
    """Every difference between two checkpoints; empty when their atoms are equal bit for bit.

    `cast`: where the dtype differs, compare what `a` holds after a cast to `b`'s dtype.
    """
    changes = list(_structure(a, b, cast=cast))
    shared = [
        (atom.name, name, state, b.atoms[atom.name].states[name])
        for atom, name, state in a.states()
        if atom.name in b.atoms and name in b.atoms[atom.name].states
    ]
    shared = [item for item in shared if item[2].global_shape == item[3].global_shape]
    pairs = [(name, state, _Pair(own, other, cast=cast)) for name, state, own, other in shared]
    jobs = [(name, state, pair, *parts) for name, state, pair in pairs for parts in pair.blocks()]
    observer.begin(title="compare", nbytes=sum(_most(own, other) for *_, own, other in jobs))
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}

    def one(job: tuple[str, str, _Pair, Slice, Slice]) -> None:
        name, state, pair, own, other = job
        result = pair.differing(own, other)
        if result is not None:
            found.setdefault((name, state), []).append(result)
        observer.advance(_most(own, other))

    try:
        _each(jobs, one, threads)
    finally:
        observer.end()
    for (name, state), parts in sorted(found.items()):
        numel = sum(count for count, _ in parts)
        total = a.atoms[name].states[state].numel
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
    held = [(atom.name, name, Locator(state)) for atom, name, state in index.states()]
    jobs = [
        (part, locator)
        for param, name, locator in held
        if locator.replicas
        for part in blocks(whole_slice(param, name, locator.state), locator.state, nbytes=BLOCK)
    ]
    found: dict[tuple[str, str], list[str]] = {}
    observer.begin(title="copies", nbytes=sum(own.nbytes for own, _ in jobs))

    def one(job: tuple[Slice, Locator]) -> None:
        own, locator = job
        lines = list(drift(own, locator, _read(own, locator), _gatherer()))
        if lines:
            found.setdefault((own.param, own.state), []).extend(lines)
        observer.advance(own.nbytes)

    try:
        _each(jobs, one, threads)
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
    jobs = [
        (record.path, low, min(BLOCK, record.offset + record.nbytes - low))
        for record in _undigested(index)
        for low in range(record.offset, record.offset + record.nbytes, BLOCK)
    ]
    spans: list[Span] = []
    observer.begin(title="checksums", nbytes=sum(nbytes for _, _, nbytes in jobs))

    def one(job: tuple[str, int, int]) -> None:
        gatherer = Gatherer(sources=_gatherer().sources, tracked=frozenset((job[0],)))
        gatherer.scan(*job)
        spans.extend(gatherer.spans)
        observer.advance(job[2])

    try:
        _each(jobs, one, threads)
    finally:
        observer.end()
    return mismatches(_undigested(index), spans)


def scan_digests(index: Index, observer: Observer, *, threads: int = THREADS) -> list[str]:
    """States whose bytes are not those that were digested, one line each."""
    jobs = [
        (whole_slice(atom.name, name, state), Locator(state), number, digest)
        for atom, name, state in index.states()
        for number, digest in enumerate(state.digests)
    ]
    wrong: list[str] = []
    observer.begin(title="digests", nbytes=sum(own.nbytes for own, _, number, _ in jobs if number == 0))

    def one(job: tuple[Slice, Locator, int, str]) -> None:
        own, locator, number, digest = job
        step = locator.state.digest_nbytes // own.dtype.itemsize
        low, high = number * step, min((number + 1) * step, own.stop)
        label = f"{own.param}/{own.state}, elements {low}:{high}"
        try:
            data = _read(replace(own, start=low, stop=high), locator)
        except (CorruptError, SourceError) as error:
            wrong.append(f"{label}: {error}")
            return
        if xxhash.xxh3_64_hexdigest(data) != digest:
            wrong.append(f"{label}, in {locator.state.fragments[0].path}")
        observer.advance(data.nbytes)

    try:
        _each(jobs, one, threads)
    finally:
        observer.end()
    return sorted(wrong)


class _Pair:
    """One state of two checkpoints."""

    def __init__(self, a: StateIndex, b: StateIndex, *, cast: bool) -> None:
        same = a.dtype is b.dtype or (cast and a.dtype.is_floating and b.dtype.is_floating)
        self._own = whole_slice("", "", a, dtype=b.dtype if same else None)
        self._other = whole_slice("", "", b)
        self._a, self._b = Locator(a), Locator(b)
        self._is_cast = a.dtype is not b.dtype
        itemsize = max(self._own.dtype.itemsize, self._other.dtype.itemsize)
        self._step = BLOCK // (itemsize if same else _WIDEST)

    def blocks(self) -> Iterator[tuple[Slice, Slice]]:
        """The same elements of both, a block at a time, such that either is read once."""
        lead, state = self._own, self._a.state
        if is_crosswise(self._other, self._b.state, nbytes=BLOCK):
            lead, state = self._other, self._b.state
        for part in blocks(lead, state, nbytes=self._step * lead.dtype.itemsize):
            yield replace(part, dtype=self._own.dtype), replace(part, dtype=self._other.dtype)

    def differing(self, own: Slice, other: Slice) -> tuple[int, float] | None:
        """How many elements of a block differ, and by how much; None when none does."""
        left = viewed(_read(own, self._a), own.dtype)
        right = viewed(_read(other, self._b), other.dtype)
        if left.dtype != right.dtype:
            wide = "complex128" if "c" in (left.dtype.kind, right.dtype.kind) else "float64"
            left, right = widened(left, wide), widened(right, wide)
        found = differing(left, right)
        if found and self._is_cast:  # casts need not agree in the payload of a NaN
            found = differing(without_payloads(left, right), right)
        return (found.numel, found.largest) if found else None


_local = threading.local()


def _gatherer() -> Gatherer:
    """This thread's own; made by `_each`, which closes its files."""
    own: Gatherer = _local.gatherer
    return own


def _read(own: Slice, locator: Locator) -> memoryview:
    data = memoryview(bytearray(own.nbytes))
    _gatherer().fill(data, own.dtype, resolve(own, locator, own.start, own.stop))
    return data


def _most(own: Slice, other: Slice) -> int:
    """Bytes of what is compared, in the wider type."""
    return max(own.nbytes, other.nbytes)


def _each(jobs: Sequence[object], one: Callable[..., None], threads: int) -> None:
    """`one(job)` for every job, on so many threads, never more in flight than there are threads."""
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

    queue = iter(jobs)
    opened: list[Sources] = []

    def start() -> None:
        opened.append(Sources())
        _local.gatherer = Gatherer(sources=opened[-1])

    try:
        with ThreadPoolExecutor(threads, initializer=start) as pool:
            running = {pool.submit(one, job) for job in islice(queue, threads)}
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                running |= {pool.submit(one, job) for job in islice(queue, len(finished))}
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


def _missing(name: str, state: str, *, in_a: bool) -> Change:
    return Change(param=name, state=state, what="missing", a="there" if in_a else "-", b="-" if in_a else "there")


def _state(name: str, label: str, own: StateIndex, other: StateIndex, *, cast: bool) -> Iterator[Change]:
    if own.global_shape != other.global_shape:
        yield Change(
            param=name, state=label, what="shape", a=str(list(own.global_shape)), b=str(list(other.global_shape))
        )
    elif own.dtype is not other.dtype and not cast:
        yield Change(param=name, state=label, what="dtype", a=own.dtype, b=other.dtype)


def _groups(a: Index, b: Index) -> Iterator[Change]:
    """Hyper-parameters, where both have them; the order of groups and of parameters in them is a matter of layout."""
    if not a.groups or not b.groups:
        return
    left, right = _hyper(a), _hyper(b)
    for name in sorted(set(left) & set(right)):
        for key in sorted(set(left[name]) | set(right[name])):
            own, other = (side[name].get(key, _IMPLIED.get(key, "-")) for side in (left, right))
            if own != other:
                yield Change(param=name, state=key, what="group", a=own, b=other)


_IMPLIED = {"bias_correction": "True"}
"""Hyper-parameters that mean the same where they are not there: an Adam without this one always corrects."""


def _hyper(index: Index) -> dict[str, dict[str, str]]:
    return {name: {k: repr(v) for k, v in group.hyper.items()} for group in index.groups for name in group.params}
