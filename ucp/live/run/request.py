"""What a user asks of a load, in the forms that Python has for it, checked once and kept as one value."""

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
from ucp.conversion.options import make_options
from ucp.conversion.values import (
    DtypeLike,
    TopologyLike,
    choice_of,
    dtype_of,
    path_of,
    switch_of,
    topology_of,
    type_path,
)
from ucp.core.tensor import DType
from ucp.errors import UsageError, counted
from ucp.io.folder import given
from ucp.live.exchange.carry import CarryOptions
from ucp.live.exchange.stages import Exchange
from ucp.live.match.decide import LoadOptions
from ucp.live.match.names import NameOptions
from ucp.live.model.parallel.experts import Experts
from ucp.live.resume.rank_extras import RankPolicy
from ucp.live.run.mesh import RunMesh, is_device_mesh
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
    """Where this rank stands in the layout of the run."""
    options: LoadOptions = field(default_factory=LoadOptions)
    """What has to fit."""
    names: NameOptions = field(default_factory=NameOptions)
    """Under which names."""
    dtype: DType | None = None
    """Type of the floating weights of the model."""
    rank_extras: RankPolicy = RankPolicy.DROP
    """What to do with what each rank of the saved run kept for itself."""
    carry: CarryOptions = field(default_factory=CarryOptions)
    """How to bring the bytes."""
    experts: Experts | None = None
    """Who holds which experts."""
    scheduler: str | None = None
    """Key of the scheduler's state in the checkpoint, where the user chose one."""

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
        experts: Experts | None = None,
        **shared: Unpack[LoadArguments],
    ) -> LoadRequest:
        """What a rank of a run of so many is asked; `shared`: as for a conversion. Raises UsageError."""
        import torch

        if torch.is_inference_mode_enabled():
            raise UsageError(
                "expected a call outside torch.inference_mode: states that are made in it cannot be stepped"
            )
        mesh, path = _find_checkpoint(topology, checkpoint, rank, ranks)
        function = _Rename(rename) if callable(rename) else None
        rules = None if rename is None or callable(rename) else path_of("rename, or a function")(rename)
        options = make_options(**shared)
        settings = dict(options.settings)
        return cls(
            path=path,
            mesh=mesh,
            scheduler=settings.pop(SCHEDULER, None),
            options=LoadOptions(
                strict=switch_of("strict")(strict),
                rename=function,
                zero_moments=options.zero_moments,
                accept=options.accept,
            ),
            names=NameOptions(
                naming=Naming.parse(options.names, rules), rename=function, settings=settings, source=options.source
            ),
            dtype=None if dtype is None else _dtype(dtype),
            rank_extras=choice_of(RankPolicy, "rank_extras as one")(rank_extras),
            carry=CarryOptions(
                exchange=choice_of(Exchange, "exchange as one")(exchange),
                memory=options.memory,
                verify=switch_of("verify")(verify),
                observer=choose_observer(progress, rank=rank),
            ),
            experts=experts,
        )

    @property
    def agreed(self) -> dict[str, object]:
        """What has to be the same on all ranks, by the names of arguments."""
        known, options = self.names, self.options
        return {
            "topology": self.mesh.topology,
            "strict": options.strict,
            "zero_moments": options.zero_moments,
            "accept": sorted(options.accept),
            "names": known.naming,
            "rename": None if options.rename is None else "a function",
            "settings": known.settings,
            "settings: scheduler": self.scheduler,
            "family, patterns, shapes_from, param_order": known.source,
            "dtype": self.dtype,
            "rank_extras": self.rank_extras,
            "exchange": self.carry.exchange,
            "memory": self.carry.memory,
            "verify": self.carry.verify,
            "experts": self.experts,
        }


@dataclass(frozen=True, slots=True)
class _Rename:
    """The user's function from name to name, whose failures are told as such."""

    function: Callable[[str], str]
    """It."""

    def __call__(self, name: str) -> str:
        try:
            renamed = self.function(name)
        except Exception as error:
            raise UsageError(f"rename({name!r}) failed: {type(error).__name__}: {error}") from error
        if not isinstance(renamed, str):
            raise UsageError(f"expected rename({name!r}) to give a name; got {renamed!r}")
        return renamed


def _find_checkpoint(
    topology: TopologyLike | DeviceMesh | type_path | None, checkpoint: type_path | None, rank: int, ranks: int
) -> tuple[RunMesh, Path]:
    """The mesh and the path, which may stand in its place. Raises UsageError."""
    if _is_path(topology):
        if checkpoint is not None:
            raise UsageError(
                f"expected a topology such as dp=8, a dict or a DeviceMesh in second place; got {str(topology)!r} and "
                f"checkpoint={str(checkpoint)!r}, both of which are taken for checkpoints"
            )
        topology, checkpoint = None, topology
    if is_device_mesh(topology):
        mesh = RunMesh.from_device_mesh(topology, rank=rank, count=ranks)
    else:
        wanted = None if topology is None or isinstance(topology, PathLike) else topology_of(topology)
        if wanted is not None and wanted.ranks != ranks:
            raise UsageError(
                f"expected a topology of {counted(ranks, 'rank')}, as this run has (dp x tp x pp x cp; those along ep "
                f"are among them); got {wanted}, of {wanted.ranks}. "
                + ("Initialise torch.distributed first, or leave it out" if ranks == 1 else "Mend it, or leave it out")
            )
        mesh = RunMesh.from_topology(wanted, rank=rank)
    path = checkpoint if checkpoint is not None else os.environ.get(ENVIRONMENT)
    if path is None or not str(path):
        raise UsageError(f"expected a checkpoint: pass checkpoint=PATH, or set {ENVIRONMENT}")
    return mesh, path_of("checkpoint", given)(path)


def _is_path(topology: object) -> TypeGuard[type_path]:
    """Whether what stands for a topology is a path."""
    is_text = isinstance(topology, str) and "=" not in topology.partition("/")[0]
    return isinstance(topology, PathLike) or is_text or (isinstance(topology, str) and os.path.exists(topology))


def _dtype(asked: DtypeLike) -> DType:
    dtype = dtype_of(asked)
    if dtype is None:
        known = ", ".join(member.value for member in DType if member.is_floating)
        raise UsageError(f"expected dtype of {known}; got {asked!r}")
    return dtype


_SECONDS = 2.0
"""Between two lines."""


def choose_observer(progress: object, *, rank: int) -> Observer | None:
    """Who is told of the progress on this rank. Raises UsageError for what cannot be told."""
    if isinstance(progress, bool):
        return Lines(sys.stderr) if progress and rank == 0 else None
    if not isinstance(progress, Observer):
        raise UsageError(f"expected progress as True, False or an observer (begin, advance, end); got {progress!r}")
    return progress


class Lines:
    """An observer that writes a line now and then."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._title = ""
        self._total = self._done = 0
        self._began = self._told = time.monotonic()

    def begin(self, *, title: str, nbytes: int) -> None:
        """A stage starts."""
        self._title, self._total, self._done = title, nbytes, 0
        self._began = self._told = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done."""
        self._done += nbytes
        now = time.monotonic()
        if now - self._told >= _SECONDS:
            self._told = now
            self._tell(now)

    def end(self) -> None:
        """The stage is over."""
        self._tell(time.monotonic())

    def _tell(self, now: float) -> None:
        seconds = max(now - self._began, 1e-6)
        share = 100 * self._done / self._total if self._total else 100
        rate = self._done / seconds / 1e6
        self._out.write(f"{self._title}: {share:.0f} % of {self._total:,} bytes, {rate:,.0f} MB/s\n")
        self._out.flush()
