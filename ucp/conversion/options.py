"""What a user asks for, in the forms that Python and the shell have for it, checked once and kept as one value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict, TypeVar

from ucp.contract.companions import Companions
from ucp.contract.protocols import Engine, ParamOrderLike, SourceOptions
from ucp.contract.registry import engine as engine_named
from ucp.conversion.parts.which import PartLike, part_of
from ucp.conversion.source.new_optimizer import NewOptimizer
from ucp.conversion.source.replica_policy import Drift
from ucp.conversion.source.zero_moments import ZeroMoments
from ucp.core.dtypes import DType
from ucp.core.index import DoubtKind
from ucp.core.names import WEIGHT, NameFilter
from ucp.core.target import TargetOptions
from ucp.core.topology import Topology
from ucp.errors import UsageError
from ucp.transfer.plan.tasks import Share

if TYPE_CHECKING:
    import torch

__all__ = [
    "AcceptName",
    "CompanionsName",
    "ConvertArguments",
    "ConvertOptions",
    "DriftName",
    "DtypeLike",
    "MemoryLike",
    "Naming",
    "OptimizerName",
    "PlanArguments",
    "TopologyLike",
    "ZeroMomentsName",
    "cores",
    "make_options",
    "nbytes_of",
    "policy_of",
    "settings_of",
    "topology_of",
    "type_path",
    "workers_of",
]

P = TypeVar("P", bound=StrEnum)

type_path = str | PathLike[str]
"""A path."""
if TYPE_CHECKING:
    DtypeLike: TypeAlias = str | DType | torch.dtype
else:
    DtypeLike = str | DType | object  # torch is not imported for a type hint
"""A dtype: "bfloat16", "bf16", torch.bfloat16."""
TopologyLike = Topology | str | Mapping[str, int]
"""A run: ucp.Topology(dp=4, zero=3), "dp=4,zero=3", {"dp": 4, "zero": 3}."""
MemoryLike = int | str
"""Memory: bytes, or text like "512M", "1GiB" (powers of 1024), "2GB" (powers of 1000)."""
DriftName = Literal["error", "first", "mean"]
ZeroMomentsName = Literal["error", "keep"]
OptimizerName = Literal["zero"]
CompanionsName = Literal["small", "all", "none"]
AcceptName = Literal["equal-ranks", "missing-layers", "moment-shapes", "config"]

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE)
"""Number, prefix, "iB" or "B". Examples: 512M, 1.5GiB, 2GB, 1073741824."""
_EXPONENTS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What the user asked for."""

    style: str = ""
    """Naming style of model families to write; empty for the target's, or the source's."""
    source: str = ""
    """Style of the source's names, where several have the same names for other tensors; empty for any."""
    rules: Path | None = None
    """TOML file with rules of the user's own."""

    @classmethod
    def of(cls, names: str | None, rename: Path | None) -> Naming:
        """`STYLE` or `FROM:STYLE`, and a file. Raises UsageError.

        >>> Naming.of("nanogpt:huggingface", None).source
        'nanogpt'
        """
        source, colon, style = (names or "").rpartition(":")
        if names is not None and (not style or (colon and not source)):
            raise UsageError(
                f"expected a naming style, as in --names huggingface or nanogpt:huggingface; got {names!r}"
            )
        return cls(style=style, source=source, rules=rename)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What the user asked for."""

    to: str = "ucp"
    """Name of the target."""
    topology: Topology | None = None
    """Layout of the run that will load it; None where the target has no ranks."""
    target: TargetOptions = field(default_factory=TargetOptions)
    """Options of the target."""
    names: NameFilter = field(default_factory=NameFilter)
    """Which parameters and states to take."""
    naming: Naming = field(default_factory=Naming)
    """Under which names to write them."""
    source: SourceOptions = field(default_factory=SourceOptions)
    """What the user says of the source."""
    drift: Drift = Drift.ERROR
    """What to do about copies that should be equal and are not."""
    zero_moments: ZeroMoments = ZeroMoments.ERROR
    """What to do about moments that are all zero although steps were taken."""
    optimizer: NewOptimizer | None = None
    """What to make for a source without optimizer states."""
    accept: frozenset[DoubtKind] = frozenset()
    """Doubts of the source that are to be passed over."""
    engine: Engine | None = None
    """What does the work, with its settings; None: processes of this machine."""
    workers: int = 0
    """Processes; 0 for one per core."""
    memory: int = 1 << 30
    """Bytes of memory for the whole run, beyond the interpreter's own and that of the index."""
    resume: bool = False
    """Continue an unfinished conversion."""
    overwrite: bool = False
    """Replace a destination that ucp wrote."""
    verify: bool = False
    """Read back what was written, and compare it with the source, before it is put in place."""
    companions: Companions = Companions.SMALL
    """Which files beside the checkpoint to carry along."""
    fsync: bool = True
    """Wait until everything is on the disk; else the system brings it there in its own time."""
    part: Share | None = None
    """Which part of the work to do; None for all of it."""
    finalize: bool = False
    """Complete what parts did, and do none of their work."""
    scratch: Path | None = None
    """Folder of a disk in which files grow that are uploaded; None for the one that the environment says."""

    @property
    def own_files(self) -> tuple[Path, ...]:
        """Files of the user's own which decide what is written, beside the source: rules, and shapes."""
        order = self.source.param_order
        paths = (self.naming.rules, self.source.patterns, self.source.shapes_from)
        return (*filter(None, paths), *((order,) if isinstance(order, Path) else ()))


class PlanArguments(TypedDict, total=False):
    """What `ucp.plan` and `ucp.convert` are asked: see `ucp.convert`, and `make_options` for the defaults."""

    to: str
    topology: TopologyLike | None
    layout: str
    virtual: bool
    compress: bool
    include: Iterable[str]
    exclude: Iterable[str]
    dtypes: Mapping[str, DtypeLike] | None
    settings: Mapping[str, str | int | float] | None
    names: str | None
    rename: type_path | None
    family: str | None
    patterns: type_path | None
    shapes_from: type_path | None
    param_order: ParamOrderLike | None
    drift: DriftName
    zero_moments: ZeroMomentsName
    optimizer: OptimizerName | None
    accept: Iterable[AcceptName]
    tag: str | None
    companions: CompanionsName
    engine: str | None
    workers: int | None
    memory: MemoryLike
    scratch: type_path | None


class ConvertArguments(PlanArguments, total=False):
    """What `ucp.convert` alone is asked."""

    resume: bool
    overwrite: bool
    fsync: bool
    verify: bool
    part: PartLike | None
    finalize: bool


def make_options(
    *,
    to: str = "ucp",
    topology: TopologyLike | None = None,
    layout: str = "",
    virtual: bool = False,
    compress: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    dtypes: Mapping[str, DtypeLike] | None = None,
    settings: Mapping[str, str | int | float] | None = None,
    names: str | None = None,
    rename: type_path | None = None,
    family: str | None = None,
    patterns: type_path | None = None,
    shapes_from: type_path | None = None,
    param_order: ParamOrderLike | None = None,
    drift: DriftName = "error",
    zero_moments: ZeroMomentsName = "error",
    optimizer: OptimizerName | None = None,
    accept: Iterable[AcceptName] = (),
    tag: str | None = None,
    companions: CompanionsName = "small",
    engine: str | None = None,
    workers: int | None = None,
    memory: MemoryLike = 1 << 30,
    scratch: type_path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    fsync: bool = True,
    verify: bool = False,
    part: PartLike | None = None,
    finalize: bool = False,
) -> ConvertOptions:
    """Options as users give them, checked. Raises UsageError. See `ucp.convert`."""
    if virtual and (to != "ucp" or layout not in ("", "virtual")):
        other = f"--layout {layout}" if to == "ucp" else f"--to {to}"
        raise UsageError(f"--virtual makes a store of atoms that are references: it does not go with {other}")
    for argument, text in {"to": to, "layout": layout}.items():
        if not isinstance(text, str):
            raise UsageError(f"expected {argument} as text; got {text!r}")
    if tag is not None and not (isinstance(tag, str) and tag):
        raise UsageError(f"expected a tag such as global_step100; got {tag!r}")
    if part is not None and (finalize or verify):
        raise UsageError(f"{'--finalize' if finalize else '--verify'} is for when all parts are done: drop --part")
    chosen, asked = _engine(engine, settings_of(settings or {}))
    return ConvertOptions(
        to=to,
        topology=None if topology is None else topology_of(topology),
        target=TargetOptions(
            dtypes=_dtypes(dtypes or {}),
            layout="virtual" if virtual else layout,
            compress=compress,
            settings=asked,
            tag=tag or "",
        ),
        names=filter_of(include, exclude),
        naming=Naming.of(names, None if rename is None else Path(rename)),
        source=SourceOptions.of(family, patterns, shapes_from, param_order),
        drift=policy_of(drift, Drift, "a policy for copies that differ"),
        zero_moments=policy_of(zero_moments, ZeroMoments, "a policy for moments that are zero"),
        optimizer=None if optimizer is None else policy_of(optimizer, NewOptimizer, "an optimizer to make"),
        accept=DoubtKind.accepted(accept),
        companions=policy_of(companions, Companions, "which files beside the checkpoint to carry along,"),
        engine=chosen,
        workers=workers_of(workers),
        memory=nbytes_of(memory),
        scratch=None if scratch is None else Path(scratch),
        resume=resume,
        overwrite=overwrite,
        fsync=fsync,
        verify=verify,
        part=None if part is None else part_of(part),
        finalize=finalize,
    )


def nbytes_of(memory: MemoryLike) -> int:
    """Bytes of an amount of memory. Raises UsageError.

    >>> nbytes_of("1.5G"), nbytes_of("2GB"), nbytes_of(4096)
    (1610612736, 2000000000, 4096)
    """
    match = _MEMORY.fullmatch(memory.strip()) if isinstance(memory, str) else None
    if match is not None:
        number, prefix, unit = match.groups()
        base = 1000 if unit in {"B", "b"} else 1024
        memory = int(float(number) * base ** _EXPONENTS[prefix.upper()])
    if not isinstance(memory, int) or isinstance(memory, bool) or memory <= 0:
        raise UsageError(f"expected an amount of memory such as 512M or 2GiB, or bytes, above 0; got {memory!r}")
    return memory


def workers_of(workers: int | None) -> int:
    """A number of workers; 0 for the default. Raises UsageError."""
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise UsageError(f"expected a number of workers, 1 or more, or None for the default; got {workers!r}")
    return workers or 0


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def topology_of(asked: object) -> Topology:
    """A topology. Raises UsageError for what is none."""
    if isinstance(asked, Topology):
        return asked
    if isinstance(asked, Mapping):
        return Topology.parse(",".join(f"{axis}={degree}" for axis, degree in asked.items()))
    if not isinstance(asked, str):
        raise UsageError(f"expected a topology as ucp.Topology, a dict, or text like dp=4,zero=3; got {asked!r}")
    return Topology.parse(asked)


def policy_of(asked: str, choices: type[P], what: str) -> P:
    """The member of `choices` that was asked for; `what`: what it is, for the message. Raises UsageError."""
    if asked not in set(choices):
        raise UsageError(f"expected {what} of {', '.join(choices)}; got {asked!r}")
    return choices(asked)


def _dtypes(asked: Mapping[str, DtypeLike]) -> dict[str, str]:
    """State to dtype. Raises UsageError."""
    if not isinstance(asked, Mapping):
        raise UsageError(f"expected dtypes by state, as in {{'weight': 'bfloat16'}}; got {asked!r}")
    found = {}
    for state, dtype in asked.items():
        own = DType.named(str(dtype))
        if own is None or not own.is_floating:
            known = ", ".join(member.value for member in DType if member.is_floating)
            raise UsageError(f"expected STATE=DTYPE with a dtype of {known}; got {state}={dtype}")
        found[state] = own.value
    return found


def settings_of(asked: Mapping[str, str | int | float]) -> dict[str, str]:
    """Name to value as text, as the command line has it. Raises UsageError."""
    if not isinstance(asked, Mapping) or not all(isinstance(value, str | int | float) for value in asked.values()):
        raise UsageError(
            f"expected settings by name, as in {{'num_attention_heads': 32}}, each a text or a number; got {asked!r}"
        )
    return {name: str(value) for name, value in asked.items()}


def _engine(name: str | None, settings: dict[str, str]) -> tuple[Engine | None, dict[str, str]]:
    """The engine of that name with those of `settings` that are its own, and the others. Raises UsageError."""
    if name is None:
        return None, settings
    chosen = engine_named(name)
    own = {setting: value for setting, value in settings.items() if setting in chosen.settings}
    return chosen.configured(own), {setting: value for setting, value in settings.items() if setting not in own}


def filter_of(include: Iterable[str], exclude: Iterable[str], *, weights: bool = False) -> NameFilter:
    """The parameters and states that globs choose; with `weights`, weights alone. Raises UsageError.

    >>> filter_of((), "lm_head.*", weights=True)
    NameFilter(include=('*/weight',), exclude=('lm_head.*',))
    """
    names = NameFilter(include=_globs(include), exclude=_globs(exclude))
    if weights and names.include:
        raise UsageError(f"expected --weights or --include; got both. Say --include '{names.include[0]}/{WEIGHT}'")
    return replace(names, include=(f"*/{WEIGHT}",)) if weights else names


def _globs(asked: Iterable[str]) -> tuple[str, ...]:
    """Several globs, or one. Raises UsageError."""
    if isinstance(asked, str):
        return (asked,)
    globs = tuple(asked) if isinstance(asked, Iterable) else (asked,)
    if not all(isinstance(own, str) for own in globs):
        raise UsageError(f"expected globs over names as text, as in ['*/weight']; got {asked!r}")
    return globs
