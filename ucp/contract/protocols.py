"""The extension contract, on one page.

A *format* says where the bytes of a checkpoint lie (`detect`, `read`). A *target* says what files a checkpoint
consists of (`plan`, `seal`). An *engine* carries out tasks. An *observer* receives progress. They are independent of
one another, and only the engine reads tensors. Formats, targets and engines are found by entry point (groups
`ucp.formats`, `ucp.targets`, `ucp.engines`). Each derives from its protocol. Members with a default are capabilities:
a class overrides those that differ.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ucp.contract.locating import Evidence
from ucp.contract.model import parse_values, recorded_arguments
from ucp.contract.run_extras import RunExtras
from ucp.core.index import Index
from ucp.core.target import OutputFile, Receipts, TargetOptions, TargetPlan
from ucp.core.topology import Topology
from ucp.errors import IdleOptionError, UsageError

if TYPE_CHECKING:
    from ucp.transfer.plan.job import Job
    from ucp.transfer.plan.tasks import Task
    from ucp.transfer.worker import Done, Step

WAITING = "waiting for"
"""Prefix of the title of a stage that waits for another process."""


ParamOrder = tuple[tuple[str, ...], ...]
"""Names of parameters: a tuple for each group of an optimizer, or one for all."""
ParamOrderLike = str | PathLike[str] | Sequence[str] | Sequence[Sequence[str]]
"""Path of a JSON file with names, or the names: a list for each group, or one list for all groups."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Facts about a source that its files do not record, given by the user."""

    family: str | None = None
    """Name of the model family to use, instead of detecting it."""
    patterns: Path | None = None
    """TOML file with a family of the user's own."""
    shapes_from: Path | None = None
    """Checkpoint, or JSON file of name to shape, with the shapes of parameters that the source stores flat."""
    param_order: Path | ParamOrder | None = None
    """Names of the parameters that an optimizer numbers, in its order; or the path of a JSON file with them."""

    at: int | None = None
    """Iteration at which a chain of checkpoints is read; None for the newest."""
    exact: bool = False
    """Whether parameters that are older than the rest are refused."""
    max_plt: float | None = None
    """Proportion of tokens that experts may have lost, 0 to 1; None for any."""

    def without_family(self) -> SourceOptions:
        """The options without the family, which may be meant for the target alone."""
        return replace(self, family=None, patterns=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Names of the tensors to write."""

    style: str = ""
    """Naming style of model families to write; empty for the target's, or the source's."""
    source: str = ""
    """Style of the source's names, if several styles use these names for different tensors; empty for any."""
    rules: Path | None = None
    """TOML file with rules of the user's own."""

    @classmethod
    def parse(cls, names: str | None, rename: Path | None) -> Naming:
        """`STYLE` or `FROM:STYLE`, and a file. Raises UsageError.

        >>> Naming.parse("nanogpt:huggingface", None).source
        'nanogpt'
        """
        source, colon, style = (names or "").rpartition(":")
        if names is not None and (not style or (colon and not source)):
            raise UsageError(
                f"expected a naming style, as in --names huggingface or nanogpt:huggingface; got {names!r}"
            )
        return cls(style=style, source=source, rules=rename)


class Format(Protocol):
    """Reads the indexes of one kind of checkpoint."""

    name: str
    """Name on the command line, e.g. "deepspeed"."""
    pickles: Collection[str] = ()
    """Classes ("module.name") that its framework pickles; they are not reported as unusual."""
    takes_shapes: bool = False
    """Whether it uses `SourceOptions.shapes_from`."""
    takes_order: bool = False
    """Whether it uses `SourceOptions.param_order`."""
    run: RunExtras = RunExtras()
    """Which of its extras a run resumes from, and where they are."""
    takes_time: bool = False
    """Whether its checkpoints hold several iterations, so that it uses `SourceOptions.at`."""
    names: str = ""
    """Naming style of model families that its checkpoints are in; empty for any."""

    def detect(self, path: Path) -> Evidence | None:
        """Why `path` is such a checkpoint, judged by names alone; None if it is not."""

    def read(self, path: Path) -> Index:
        """Index of the checkpoint at `path` (as given by the user). Raises SourceError; reads no tensor."""

    def owns(self, name: str) -> bool:
        """Whether only checkpoints of this format have a file of that name: other formats then leave it alone."""
        del name
        return False

    def configured(self, options: SourceOptions) -> Format:
        """The same format, reading with these options. Raises IdleOptionError if it has no use for them."""
        raise IdleOptionError(f"{self.name} checkpoints are read without a model family: drop --family and --patterns")


class Target(Protocol):
    """Lays a checkpoint out as files of one kind."""

    name: str
    """Name on the command line, e.g. "deepspeed-universal"."""
    also_called: Collection[str] = ()
    """What users may call it instead, in lower case: a message that refuses such a name suggests this target."""
    settings: Mapping[str, str] = MappingProxyType({})
    """What `--set NAME=VALUE` takes: name to meaning, in a few words."""
    layouts: Collection[str] = ()
    """Variants of its file layout that `--layout` names, the default first; empty if there is only one."""
    names: str | None = None
    """Naming style (of model families) that it writes; None if it writes any."""
    takes_parts: bool = False
    """Whether a part of a model is a useful output, so that no warning is given."""
    takes_optimizer: bool = True
    """Whether it writes states of an optimizer; False where it writes weights alone."""

    resumes: bool = False
    """Whether a run resumes from what it writes, at the step that the source was saved at."""
    scheduler: str | None = None
    """Extra from which it writes the state of any framework's learning rate scheduler; None if its files have no place
    for one, or only for a scheduler of its own framework."""
    keeps_extras_of: Collection[str] = ()
    """Formats whose extras it writes under unchanged keys."""
    takes_replicas: bool = False
    """Whether its runs may hold replicas of shards: `dp_replicate` and `dp_shard` of a topology (HSDP)."""
    takes_placement: bool = False
    """Whether its files depend on which experts a rank holds: `placement` of a topology."""

    def takes_family(self, topology: Topology | None) -> bool:
        """Whether it uses the rules of a model family; --family and --patterns may then be meant for it alone."""
        del topology
        return False

    def scheduler_of(self, settings: Mapping[str, str]) -> str | None:
        """`scheduler`; None if the variant that `settings` choose has no place for it."""
        del settings
        return self.scheduler

    def takes_names_of(self, index: Index, settings: Mapping[str, str]) -> bool:
        """Whether it writes a model of no known family under unchanged names."""
        del index, settings
        return False

    def model_arguments(self, index: Index, settings: Mapping[str, str]) -> Mapping[str, object]:
        """Sizes and settings of the model, for choosing its family: recorded by the source, or given with --set."""
        return {**recorded_arguments(index), **parse_values(settings)}

    def source_settings(self, index: Index) -> Collection[str]:
        """Further names that `--set` takes, because this source records them."""
        del index
        return ()

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Files, and which slice of which state goes where. Writes nothing. Raises UsageError, MissingStateError."""

    def seal(self, index: Index, plan: TargetPlan, receipts: Receipts) -> tuple[OutputFile, ...]:
        """Files to write last, in order, when all others are written; the last one is the commit. By default none."""
        del index, plan, receipts
        return ()

    def find_faults(self, written: Path) -> Iterable[str]:
        """Lines on what the framework's own reader refuses in the files below `written` (on disk), for --verify."""
        del written
        return ()


@runtime_checkable
class Observer(Protocol):
    """Receives the progress of a run.

    Stages follow one another. Within a stage, `advance` is called from many threads, also at the same time: an observer
    that counts needs a lock. The work waits until `advance` returns.
    """

    def begin(self, *, title: str, nbytes: int) -> None:
        """A stage starts, with `nbytes` bytes to write (or to read, if nothing is written).

        `nbytes` is 0 if there is nothing to copy, or while another process is waited for: the title then begins with
        `WAITING` and names it.
        """

    def advance(self, nbytes: int) -> None:
        """`nbytes` more bytes are done."""

    def end(self) -> None:
        """The stage is over."""


class Engine(Protocol):
    """Carries out tasks."""

    name: str
    """Name on the command line, e.g. "processes"."""
    summary: str
    """What does the work, in a few words, for `ucp convert --help`."""
    settings: Mapping[str, str] = MappingProxyType({})
    """What `--set NAME=VALUE` takes: name to meaning, in a few words."""
    spans_machines: bool = False
    """Whether it works on other machines too: then `--workers` is by default as many as the memory budget allows, not
    one per core of this machine."""

    def configured(self, settings: Mapping[str, str]) -> Engine:
        """The same engine with these values of its `settings`. Raises UsageError for an invalid value."""
        del settings
        return self

    def run(
        self, job: Job, root: Path, tasks: Sequence[Task], *, workers: int, threads: int
    ) -> Generator[Done | Step, None, None]:
        """Reports of `tasks`, in the order in which they finish, and progress steps of long ones.

        Raises what a worker raised; the remaining tasks are then not done. Closing the generator ends the work.
        """
