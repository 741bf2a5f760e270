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

from ucp.atom import AtomIndex, Index, StateIndex
from ucp.compare import fit_threads
from ucp.convert import ConvertReport, carry_out
from ucp.dtypes import DType
from ucp.errors import (
    UsageError,
)
from ucp.gather import Gatherer, Sources
from ucp.prepare import ConvertOptions, Prepared, Silent, Survey, index_of, prepare, survey
from ucp.proof import DiffReport, VerifyReport, differences, prove, prove_written
from ucp.protocols import Observer, SourceOptions
from ucp.region import Box, RegionPair
from ucp.registry import recognise
from ucp.settle import Drift
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
    "Survey",
    "VerifyReport",
    "convert",
    "diff",
    "inspect",
    "make_options",
    "open",
    "plan",
    "source_options",
    "survey",
    "verify",
]

type_path = str | PathLike[str]


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


def open(  # noqa: A001  # ucp.open is the name users look for
    path: type_path, *, family: str | None = None, patterns: type_path | None = None
) -> Checkpoint:
    """The checkpoint at `path`, of whatever format. Raises SourceError, CoverError.

    `family`, `patterns`: see `convert`.
    """
    return Checkpoint(index_of(Path(path), source=source_options(family, patterns)))


def inspect(path: type_path, *, family: str | None = None, patterns: type_path | None = None) -> Index:
    """Index of the checkpoint at `path`; its cover is not proved, so that a broken one can be looked at.

    `family`, `patterns`: see `convert`. Raises SourceError; what can be told then is in `survey(path)`.
    """
    fmt, _ = recognise(Path(path), options=source_options(family, patterns))
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
    settings: Mapping[str, str] | None = None,
    family: str | None = None,
    patterns: type_path | None = None,
    drift: str = Drift.ERROR,
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
        Variant of the target's layout: "packed" or "per-parameter" for atoms, "torch_dist" or "torch" for megatron.
    virtual
        Write references into `src` only (atoms).
    compress
        Compress atoms with zstd.
    include, exclude
        Globs over parameter names, or name/state.
    dtypes
        State to dtype, e.g. {"weight": "bfloat16"}.
    settings
        What the source does not record and the target needs, e.g. {"num_attention_heads": "32"} for megatron.
    family
        Model family whose rules say how `src` is sharded, instead of the one chosen by evidence.
    patterns
        TOML file with a family of your own.
    drift
        Copies that should be equal and are not: "error", "first" (take the first rank's) or "mean".
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
        settings=settings,
        family=family,
        patterns=patterns,
        drift=drift,
        workers=workers,
        memory=memory,
        resume=resume,
        overwrite=overwrite,
    )
    watch = observer or Silent()
    prove = partial(prove_written, observer=watch, threads=fit_threads(memory)) if verify else None
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
    settings: Mapping[str, str] | None = None,
    family: str | None = None,
    patterns: type_path | None = None,
    drift: str = Drift.ERROR,
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
    if not isinstance(topology, Topology | str | None):
        raise UsageError(f"expected a topology as ucp.Topology or as text like dp=4,zero=3; got {topology!r}")
    if drift not in set(Drift):
        raise UsageError(f"expected a policy for copies that differ of {', '.join(Drift)}; got {drift!r}")
    _check_means(workers, memory)
    return ConvertOptions(
        to=to,
        topology=Topology.parse(topology) if isinstance(topology, str) else topology,
        target=TargetOptions(
            dtypes=dict(dtypes or {}),
            layout="virtual" if virtual else layout,
            compress=compress,
            settings=dict(settings or {}),
        ),
        names=NameFilter(include=_globs(include), exclude=_globs(exclude)),
        source=source_options(family, patterns),
        drift=Drift(drift),
        workers=workers,
        memory=memory,
        resume=resume,
        overwrite=overwrite,
    )


def source_options(family: str | None, patterns: type_path | None) -> SourceOptions:
    """What a user says of a source. Raises UsageError for a family by name and by file at once."""
    if family is not None and patterns is not None:
        raise UsageError("expected a family by name (--family) or by file (--patterns); got both")
    return SourceOptions(family, None if patterns is None else Path(patterns))


def _check_means(workers: int, memory: int) -> None:
    if not isinstance(workers, int) or workers < 0:
        raise UsageError(f"expected a number of workers, or 0 for the default; got {workers!r}")
    if not isinstance(memory, int) or memory <= 0:
        raise UsageError(f"expected memory in bytes, a whole number above 0; got {memory!r}")


def _threads(workers: int, memory: int) -> int:
    """Threads that compare. Raises UsageError, MemoryBudgetError."""
    _check_means(workers, memory)
    return fit_threads(memory, asked=workers)


def _globs(asked: Iterable[str]) -> tuple[str, ...]:
    """Several globs, or one."""
    return (asked,) if isinstance(asked, str) else tuple(asked)


def verify(
    path: type_path,
    *,
    against: type_path | None = None,
    family: str | None = None,
    patterns: type_path | None = None,
    workers: int = 0,
    memory: int = 1 << 30,
    observer: Observer | None = None,
) -> VerifyReport:
    """Prove that the checkpoint at `path` is whole, undamaged and, if asked, equal to `against` bit for bit.

    Reads every byte that has a recorded checksum, compares copies that should be equal, and proves that pieces tile
    every tensor. Against another checkpoint a state of another dtype is compared after the cast. `family`, `patterns`:
    see `convert`; they are about `against` where it is given, else about `path`. `workers`: threads, 0 for four;
    `memory`: bytes for all of them, beyond the interpreter's own.
    """
    return prove(
        Path(path),
        against=None if against is None else Path(against),
        source=source_options(family, patterns),
        threads=_threads(workers, memory),
        observer=observer or Silent(),
    )


def diff(
    a: type_path, b: type_path, *, workers: int = 0, memory: int = 1 << 30, observer: Observer | None = None
) -> DiffReport:
    """Every difference between two checkpoints of any formats, streamed. `workers`, `memory`: see `verify`."""
    return differences(Path(a), Path(b), threads=_threads(workers, memory), observer=observer or Silent())
