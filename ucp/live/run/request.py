"""The arguments of a load, checked once and kept as one value."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeGuard, Unpack

from ucp.contract.protocols import Naming, Observer
from ucp.conversion.arguments import LoadArguments
from ucp.conversion.option import (
    DtypeLike,
    TopologyLike,
    choice_parser,
    parse_dtype,
    parse_topology,
    path_parser,
    switch_parser,
    type_path,
)
from ucp.conversion.options import make_options
from ucp.core.tensor import DType
from ucp.errors import UsageError, format_count
from ucp.io.folder import parse_path
from ucp.live.exchange.carry import CarryOptions
from ucp.live.exchange.stages import Exchange
from ucp.live.match.decide import LoadOptions
from ucp.live.match.names import NameOptions
from ucp.live.model.parallel.experts import PlacementLike
from ucp.live.resume.rank_extras import RankPolicy
from ucp.live.run.mesh import RunMesh, is_device_mesh
from ucp.log import LoggedObserver
from ucp.source.run_state import SCHEDULER

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ENVIRONMENT = "UCP_CHECKPOINT"
"""Environment variable that names the checkpoint when the call does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What the user asked for."""

    path: Path
    """The checkpoint."""
    mesh: RunMesh = field(default_factory=RunMesh)
    """Coordinates of this rank and all others."""
    options: LoadOptions = field(default_factory=LoadOptions)
    """What must fit."""
    names: NameOptions = field(default_factory=NameOptions)
    """Which names the model has."""
    dtype: DType | None = None
    """Dtype of the floating-point weights of the model."""
    rank_extras: RankPolicy = RankPolicy.DROP
    """What to do with the state that each rank saved for itself."""
    carry: CarryOptions = field(default_factory=CarryOptions)
    """How to read and exchange bytes."""
    placement: PlacementLike | None = None
    """Which ranks hold which experts."""
    scheduler: str | None = None
    """Key of the scheduler's state in the checkpoint, if the user chose one."""

    @classmethod
    def parse(
        cls,
        topology: TopologyLike | DeviceMesh | type_path | None,
        checkpoint: type_path | None,
        *,
        rank: int,
        ranks: int,
        strict: bool = True,
        dtype: DtypeLike | None = None,
        rename: Callable[[str], str] | type_path | None = None,
        rank_extras: str = RankPolicy.DROP,
        exchange: str = Exchange.AUTO,
        verify: bool = False,
        progress: object = False,
        placement: PlacementLike | None = None,
        **shared: Unpack[LoadArguments],
    ) -> LoadRequest:
        """The arguments on rank `rank` of `ranks`. `shared`: options that conversions also have. Raises UsageError."""
        import torch

        if torch.is_inference_mode_enabled():
            raise UsageError(
                "expected a call outside torch.inference_mode: an optimizer cannot step states that are made in it"
            )
        mesh, path = _find_checkpoint(topology, checkpoint, rank, ranks)
        function = _checked(rename) if callable(rename) else None
        rules = None if rename is None or callable(rename) else path_parser("rename, or a function")(rename)
        options = make_options(**shared)
        settings = dict(options.settings)
        return cls(
            path=path,
            mesh=mesh,
            scheduler=settings.pop(SCHEDULER, None),
            options=LoadOptions(
                strict=switch_parser("strict")(strict),
                rename=function,
                zero_moments=options.zero_moments,
                accept=options.accept,
            ),
            names=NameOptions(
                naming=Naming.parse(options.names, rules), rename=function, settings=settings, source=options.source
            ),
            dtype=None if dtype is None else _parse_dtype(dtype),
            rank_extras=choice_parser(RankPolicy, "rank_extras")(rank_extras),
            carry=CarryOptions(
                exchange=choice_parser(Exchange, "exchange")(exchange),
                memory=options.memory,
                verify=switch_parser("verify")(verify),
                observer=choose_observer(progress, rank=rank),
            ),
            placement=placement,
        )

    @property
    def agreed(self) -> dict[str, object]:
        """What must be the same on all ranks, by the names of arguments."""
        names, options = self.names, self.options
        return {
            "topology": self.mesh.topology,
            "strict": options.strict,
            "zero_moments": options.zero_moments,
            "accept": sorted(options.accept),
            "names": names.naming,
            "rename": None if options.rename is None else "a function",
            "settings": names.settings,
            "settings: scheduler": self.scheduler,
            "family, patterns, shapes_from, param_order": names.source,
            "dtype": self.dtype,
            "rank_extras": self.rank_extras,
            "exchange": self.carry.exchange,
            "memory": self.carry.memory,
            "verify": self.carry.verify,
            "placement": self.placement,
        }


def _checked(function: Callable[[str], str]) -> Callable[[str], str]:
    """The user's function from name to name; any error in it, or a result that is not a name, becomes a UsageError."""

    def rename(name: str) -> str:
        try:
            renamed = function(name)
        except Exception as error:
            raise UsageError(f"rename({name!r}) failed: {type(error).__name__}: {error}") from error
        if not isinstance(renamed, str):
            raise UsageError(f"expected rename({name!r}) to return a name; got {renamed!r}")
        return renamed

    return rename


def _find_checkpoint(
    topology: TopologyLike | DeviceMesh | type_path | None, checkpoint: type_path | None, rank: int, ranks: int
) -> tuple[RunMesh, Path]:
    """The mesh and the path, which may be passed in place of the topology. Raises UsageError."""
    if _is_path(topology):
        if checkpoint is not None:
            raise UsageError(
                f"expected topology= to be like dp=8, a dict or a DeviceMesh, if checkpoint= is passed too; got "
                f"topology={str(topology)!r}, which is a path, and checkpoint={str(checkpoint)!r}"
            )
        topology, checkpoint = None, topology
    mesh = parse_mesh(None if isinstance(topology, PathLike) else topology, rank, ranks)
    path = checkpoint if checkpoint is not None else os.environ.get(ENVIRONMENT)
    if path is None or not str(path):
        raise UsageError(f"expected a checkpoint: pass checkpoint=PATH, or set {ENVIRONMENT}")
    return mesh, path_parser("checkpoint", parse_path)(path)


def parse_mesh(topology: TopologyLike | DeviceMesh | None, rank: int, ranks: int) -> RunMesh:
    """The mesh of a run of `ranks` ranks. Raises UsageError if the topology is of another number of ranks."""
    if is_device_mesh(topology):
        return RunMesh.from_device_mesh(topology, rank=rank, count=ranks)
    layout = None if topology is None else parse_topology(topology)
    if layout is not None and layout.ranks != ranks:
        remedy = "Initialise torch.distributed first" if ranks == 1 else "Correct it"
        raise UsageError(
            f"expected a topology of {format_count(ranks, 'rank')}, as this run has (dp x tp x pp x cp; ep ranks "
            f"are among these); got {layout}, which has {layout.ranks}. {remedy}, or leave it out"
        )
    return RunMesh.from_topology(layout, rank=rank)


def _is_path(topology: object) -> TypeGuard[type_path]:
    """Whether what was passed as a topology is a path."""
    is_text = isinstance(topology, str) and "=" not in topology.partition("/")[0]
    return isinstance(topology, PathLike) or is_text or (isinstance(topology, str) and os.path.exists(topology))


def _parse_dtype(name: DtypeLike) -> DType:
    dtype = parse_dtype(name)
    if dtype is None:
        known = ", ".join(member.value for member in DType if member.is_floating)
        raise UsageError(f"expected dtype to be one of {known}; got {name!r}")
    return dtype


_SECONDS = 2.0
"""Seconds between two lines of progress."""


def choose_observer(progress: object, *, rank: int) -> Observer | None:
    """The observer of this rank, which logs on rank 0; None if there is nothing to do. Raises UsageError."""
    observer = Lines(sys.stderr) if progress is True and rank == 0 else progress
    if not isinstance(observer, bool | Observer):
        raise UsageError(f"expected progress as True, False or an observer (begin, advance, end); got {progress!r}")
    chosen = None if isinstance(observer, bool) else observer
    return LoggedObserver(chosen) if rank == 0 else chosen


class Lines:
    """An observer that writes a line every few seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def begin(self, *, title: str, nbytes: int) -> None:
        """A stage starts."""
        self._title, self._total, self._done = title, nbytes, 0
        self._began = self._written = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """`nbytes` more bytes are done."""
        self._done += nbytes
        if time.monotonic() - self._written >= _SECONDS:
            self.end()

    def end(self) -> None:
        """Write how much is done, and how fast."""
        self._written = time.monotonic()
        percent = 100 * self._done / self._total if self._total else 100
        rate = self._done / max(self._written - self._began, 1e-6) / 1e6
        self._out.write(f"{self._title}: {percent:.0f} % of {self._total:,} bytes, {rate:,.0f} MB/s\n")
        self._out.flush()
