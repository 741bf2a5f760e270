"""The use cases: what the command line calls, and what `import ucp` gives.

>>> import ucp
>>> str(ucp.Topology(dp=4, zero=3))
'dp=4,zero=3'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ucp.atom import AtomIndex, Index, StateIndex, check_cover
from ucp.compare import Change, casts_between, checked_bytes, compare, compare_copies, scan_digests, scan_records
from ucp.convert import ConvertReport, carry_out, owners
from ucp.dtypes import DType
from ucp.errors import (
    ChangedError,
    CorruptError,
    CoverError,
    MalformedError,
    MissingFileError,
    UsageError,
    listed,
)
from ucp.gather import Gatherer, Sources
from ucp.prepare import ConvertOptions, Prepared, index_of, prepare
from ucp.protocols import Observer
from ucp.region import Box, RegionPair
from ucp.registry import recognise
from ucp.slice import Locator, Slice, resolve
from ucp.state import NameFilter
from ucp.target import TargetOptions
from ucp.topology import Topology

if TYPE_CHECKING:
    import torch

__all__ = [
    "Atom",
    "Checkpoint",
    "DiffReport",
    "VerifyReport",
    "convert",
    "diff",
    "inspect",
    "make_options",
    "open",
    "plan",
    "verify",
]

type_path = str | PathLike[str]

_DAMAGE = (ChangedError, CorruptError, CoverError, MalformedError, MissingFileError)
"""What keeps a checkpoint from being read that was once whole: a finding of `verify`, not its failure."""


class _Silent:
    """Observer that says nothing."""

    def begin(self, *, title: str, nbytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def end(self) -> None:
        pass


@dataclass(frozen=True, slots=True, repr=False)
class Atom:
    """One parameter of a checkpoint as a whole."""

    index: AtomIndex
    """Where its pieces lie."""

    def __repr__(self) -> str:
        states = ", ".join(f"{name} {state.dtype}" for name, state in self.index.states.items())
        return f"<{self.index.kind} {self.index.name} {list(self.global_shape)}: {states}>"

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Elements per dim."""
        return self.index.global_shape

    @property
    def states(self) -> tuple[str, ...]:
        """Names of its states, `weight` first."""
        return tuple(self.index.states)

    def dtype(self, state: str) -> torch.dtype:
        """Type of a state, as a torch dtype. Raises KeyError."""
        import torch

        found: torch.dtype = getattr(torch, self.index.states[state].dtype.value)
        return found


class _Atoms(Mapping[str, Atom]):
    def __init__(self, index: Index) -> None:
        self._index = index

    def __getitem__(self, name: str) -> Atom:
        return Atom(self._index.atoms[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.atoms)

    def __len__(self) -> int:
        return len(self._index.atoms)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of any format, seen as atoms. Opening reads indexes only."""

    index: Index
    """Everything that is known of it."""

    @property
    def format(self) -> str:
        """Name of its format."""
        return self.index.format

    @property
    def topology(self) -> Topology:
        """Layout of the run that wrote it."""
        return self.index.topology

    @property
    def step(self) -> int | None:
        """Training step, where recorded."""
        return self.index.step

    @property
    def extras(self) -> Mapping[str, object]:
        """Name to value of what is not a tensor of a parameter, as far as it is the same on all ranks.

        Plain values are themselves; objects are inert `ucp.inert.Stub`s, tensors `ucp.tensor.TensorRef`s.
        """
        return {extra.name: extra.value for extra in self.index.extras if extra.rank is None}

    @property
    def atoms(self) -> Mapping[str, Atom]:
        """Name to atom, in the order of the model."""
        return _Atoms(self.index)

    def read(self, name: str, state: str, region: Box | None = None) -> torch.Tensor:
        """Elements of a state as a tensor of its own shape, or of the shape of `region`.

        `name` may be a tied name. `region`: half-open box of the whole, elements. Raises KeyError for a name or state
        that is not there, ValueError for a region outside.
        """
        import torch

        source = self._state(name, state)
        box = region or Box.whole(source.global_shape)
        whole = Box.whole(source.global_shape)
        if len(box.sizes) != len(whole.sizes) or any(a > b for a, b in zip(box.stops, whole.stops, strict=True)):
            raise ValueError(f"region {box} does not lie in {name}/{state} of shape {list(source.global_shape)}")
        own = Slice(
            param=name,
            state=state,
            dtype=source.dtype,
            pairs=(RegionPair(box, Box.whole(box.sizes)),),
            local_shape=box.sizes,
            start=0,
            stop=box.numel,
        )
        tensor = torch.empty(box.sizes, dtype=getattr(torch, source.dtype.value))
        if box.numel:
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            gatherer = Gatherer(sources=Sources())
            gatherer.fill(data, source.dtype, resolve(own, Locator(source), 0, box.numel))
            gatherer.sources.close()
        return tensor

    def _state(self, name: str, state: str) -> StateIndex:
        """Raises KeyError with what there is instead."""
        stored = self.index.aliases.get(name, name)
        if stored not in self.index.atoms:
            near = get_close_matches(name, (*self.index.atoms, *self.index.aliases), 3)
            raise KeyError(f"no parameter {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
        states = self.index.atoms[stored].states
        if state not in states:
            raise KeyError(f"{name} has no state {state!r}; it has {', '.join(states)}")
        return states[state]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found."""

    path: str
    """What was verified."""
    against: str | None
    """What it was compared with, bit for bit."""
    checked_bytes: int
    """Bytes that recorded checksums or digests cover."""
    problems: tuple[str, ...]
    """Damage: bytes that are not what they should be, copies that drifted."""
    changes: tuple[Change, ...]
    """Differences from `against`."""
    casts: tuple[str, ...] = ()
    """Changes of dtype after which states of `against` were compared; empty when it was bit for bit."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and not self.changes


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """How two checkpoints differ."""

    a: str
    """The first."""
    b: str
    """The second."""
    compared: int
    """States that both have."""
    nbytes: int
    """Bytes of them in the first."""
    changes: tuple[Change, ...]
    """Differences; empty when equal bit for bit."""

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not self.changes


def open(path: type_path) -> Checkpoint:  # noqa: A001  # ucp.open is the name users look for
    """The checkpoint at `path`, of whatever format. Raises SourceError, CoverError."""
    return Checkpoint(index_of(Path(path)))


def inspect(path: type_path) -> Index:
    """Index of the checkpoint at `path`; its cover is not proved, so that a broken one can be looked at."""
    fmt, _ = recognise(Path(path))
    return fmt.read(Path(path))


def plan(src: type_path, *, options: ConvertOptions | None = None) -> Prepared:
    """What a conversion would do; writes nothing."""
    return prepare(Path(src), options or ConvertOptions())


def convert(
    src: type_path,
    dst: type_path,
    *,
    to: str = "ucp",
    topology: Topology | str | None = None,
    layout: str = "",
    virtual: bool = False,
    compress: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    dtypes: Mapping[str, str] | None = None,
    workers: int = 0,
    memory: int = 1 << 30,
    resume: bool = False,
    overwrite: bool = False,
    verify: bool = False,
    observer: Observer | None = None,
) -> ConvertReport:
    """Convert the checkpoint at `src` to `dst`.

    Parameters
    ----------
    to
        Target: "ucp" (atoms), "deepspeed", "deepspeed-universal", ...
    topology
        Layout of the run that will load it, where the target has ranks.
    layout
        Variant of the target's layout: "packed" or "per-parameter" for atoms.
    virtual
        Write references into `src` only (atoms).
    compress
        Compress atoms with zstd.
    include, exclude
        Globs over parameter names, or name/state.
    dtypes
        State to dtype, e.g. {"weight": "bfloat16"}.
    workers
        Processes; 0 for one per core.
    memory
        Bytes for the whole run, beyond the interpreter's own.
    resume, overwrite
        Continue an unfinished conversion; replace a destination that ucp wrote.
    verify
        Afterwards read everything back and compare it with `src`, bit for bit.

    Raises
    ------
    UcpError
        `dst` is then as it was.
    """
    options = make_options(
        to=to,
        topology=topology,
        layout=layout,
        virtual=virtual,
        compress=compress,
        include=include,
        exclude=exclude,
        dtypes=dtypes,
        workers=workers,
        memory=memory,
        resume=resume,
        overwrite=overwrite,
    )
    watch = observer or _Silent()
    prove = partial(_prove, Path(src), options=options, observer=watch) if verify else None
    return carry_out(Path(src), Path(dst), options, watch, prove=prove)


def make_options(
    *,
    to: str = "ucp",
    topology: Topology | str | None = None,
    layout: str = "",
    virtual: bool = False,
    compress: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    dtypes: Mapping[str, str] | None = None,
    workers: int = 0,
    memory: int = 1 << 30,
    resume: bool = False,
    overwrite: bool = False,
) -> ConvertOptions:
    """Options as users give them, checked. Raises UsageError. See `convert`."""
    if virtual and (to != "ucp" or layout not in ("", "virtual")):
        other = f"--layout {layout}" if to == "ucp" else f"--to {to}"
        raise UsageError(f"--virtual makes a store of atoms that are references: it does not go with {other}")
    for state, name in (dtypes or {}).items():
        if name not in {member.value for member in DType} or not DType(name).is_floating:
            known = ", ".join(member.value for member in DType if member.is_floating)
            raise UsageError(f"expected STATE=DTYPE with a dtype of {known}; got {state}={name}")
    if not isinstance(workers, int) or workers < 0:
        raise UsageError(f"expected a number of workers, or 0 for one per core; got {workers!r}")
    if not isinstance(memory, int) or memory <= 0:
        raise UsageError(f"expected memory in bytes, a whole number above 0; got {memory!r}")
    return ConvertOptions(
        to=to,
        topology=Topology.parse(topology) if isinstance(topology, str) else topology,
        target=TargetOptions(dtypes=dict(dtypes or {}), layout="virtual" if virtual else layout, compress=compress),
        names=NameFilter(include=_globs(include), exclude=_globs(exclude)),
        workers=workers,
        memory=memory,
        resume=resume,
        overwrite=overwrite,
    )


def _globs(asked: Iterable[str]) -> tuple[str, ...]:
    """Several globs, or one."""
    return (asked,) if isinstance(asked, str) else tuple(asked)


def verify(path: type_path, *, against: type_path | None = None, observer: Observer | None = None) -> VerifyReport:
    """Prove that the checkpoint at `path` is whole, undamaged and, if asked, equal to `against` bit for bit.

    Reads every byte that has a recorded checksum, compares copies that should be equal, and proves that pieces tile
    every tensor. Against another checkpoint a state of another dtype is compared after the cast.
    """
    watch = observer or _Silent()
    fmt, _ = recognise(Path(path))
    other = None if against is None else index_of(Path(against))
    changes: list[Change] = []
    casts: tuple[str, ...] = ()
    checked = 0
    try:
        index = fmt.read(Path(path))
        check_cover(index)
        problems = _damage(index, watch)
        checked = checked_bytes(index)
        if other is not None and not problems:
            changes = compare(other, index, watch, cast=True)
            casts = casts_between(other, index)
    except _DAMAGE as error:
        problems = [str(error)]
    return VerifyReport(
        path=str(path),
        against=None if against is None else str(against),
        checked_bytes=checked,
        problems=tuple(problems),
        changes=tuple(changes),
        casts=casts,
    )


def diff(a: type_path, b: type_path, *, observer: Observer | None = None) -> DiffReport:
    """Every difference between two checkpoints of any formats, streamed."""
    left, right = index_of(Path(a)), index_of(Path(b))
    shared = [(s, right.atoms[atom.name].states) for atom, s, _ in left.states() if atom.name in right.atoms]
    return DiffReport(
        a=str(a),
        b=str(b),
        compared=sum(state in states for state, states in shared),
        nbytes=left.nbytes,
        changes=tuple(compare(left, right, observer or _Silent())),
    )


def _prove(src: Path, written: Path, *, options: ConvertOptions, observer: Observer) -> None:
    """Read back what was written, before it is put in place, and compare it with the source. Raises CorruptError."""
    index = index_of(written, unfinished=True)
    changes = compare(index_of(src, options.names), index, observer, cast=True)
    lines = [
        *_damage(index, observer),
        *(f"{c.param}/{c.state} {c.what}: {c.a} in the source, {c.b} written" for c in changes),
    ]
    if lines:
        raise CorruptError(f"what was written does not read back as the source; it is removed:\n{listed(lines)}")


def _damage(index: Index, observer: Observer) -> list[str]:
    """A line for everything in a checkpoint that is not as it was recorded, or not the same in all copies."""
    return [
        *(f"CRC-32 differs: {r.path}: {r.name}{owners(index, r)}" for r in scan_records(index, observer)),
        *(f"digest differs: {line}" for line in scan_digests(index, observer)),
        *(f"copies differ: {line}" for line in compare_copies(index, observer)),
    ]
