"""The files of one legacy checkpoint, read and checked to belong together.

1. Read the file of every rank's folder; one that cannot be read is a problem, not the end.
2. What the run was: its arguments, from the first file that was read.
3. The grid: every rank that must have saved did, and no rank is there that cannot be.
4. The same run: iteration, version and degrees of parallelism are equal everywhere.
5. The right places: no file was saved by another rank than its folder says.
6. Raise all problems together.

The ranks of one pipeline stage are numbered twice (parallel_state.py, order tp-cp-ep-dp-pp): as `tp + TP * d` for the
dense layers, and as `etp + ETP * (ep + EP * copy)` for the experts. A rank saves when it is the first of its dense or
of its expert data-parallel group (checkpointing.py: save_checkpoint), under its tp and ep. So where TP and EP share
ranks the grid is sparse:

>>> grid = Grid(tp=2, pp=1, ep=2, etp=1)
>>> [(place.tp, place.ep) for place in grid.places()]
[(0, 0), (1, 1)]
>>> grid.expert_part(GridPlace(tp=1, pp=0, ep=1))
ExpertPart(etp=0, copy=0)

Every rank saves `rank` and `world_size` among its arguments, which tell whether files lie under their own name. Which
of the data-parallel ranks wrote a folder differs, so only the tensor-parallel rank, the stage and the expert-parallel
rank are compared.

>>> print(placing(Grid(tp=2, pp=2, ep=1, etp=2), Arguments(raw={}, world=8, dp=2))(5))
tp rank 1, stage 1, expert rank 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ucp.contract.ranks import Checksums, Problems
from ucp.core.index import Extra, SourceFile
from ucp.core.tensor import Record
from ucp.errors import CorruptError, MalformedError, MissingFileError, SourceError, UnsupportedError
from ucp.io.folder import names_of_folder
from ucp.io.identity import source_file
from ucp.io.pickle.fields import described, mapping
from ucp.io.torch_file.archive import Archive, read_archive
from ucp_formats.megatron.arguments import Arguments, read_arguments
from ucp_formats.megatron.names import (
    DISTRIBUTED_OPTIMIZER,
    MODEL,
    GridPlace,
    RankFolder,
    is_side_file,
    parse_rank_folder,
    rank_folder_name,
)

_ENCODER = ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size")
"""Degrees of an encoder with ranks of its own, which shift all others (megatron-core 0.9 to 0.12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """What a rank holds of each of its experts."""

    etp: int
    """Tensor-parallel rank among those of an expert."""
    copy: int
    """How many ranks before it hold the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Degrees of parallelism that files are named by."""

    tp: int
    """Tensor-parallel ranks."""
    pp: int
    """Pipeline stages."""
    ep: int
    """Expert-parallel ranks."""
    etp: int
    """Tensor-parallel ranks of an expert."""

    @classmethod
    def of(cls, arguments: Arguments, folders: tuple[RankFolder, ...]) -> Grid:
        """The grid that the arguments say; of what they do not say, what the names of the folders show."""
        tp = arguments.tp or 1 + max(folder.tp for folder in folders)
        numbers = [folder.numbers for folder in folders]
        several = [own[0] for own in numbers if own]
        # experts came with version 3 of the checkpoint, long after the arguments: without these a number is a stage
        pp = arguments.pp or (1 if arguments.ep else 1 + max(several, default=0))
        ep = arguments.ep or 1 + max((own[1] for own in numbers if len(own) == 2), default=0)
        etp = arguments.etp if arguments.num_experts or ep > 1 else None  # without experts it says nothing
        return cls(tp=tp, pp=pp, ep=ep, etp=etp or tp)

    @property
    def collides(self) -> bool:
        """Whether two ranks with different parts of experts have the same name, and one overwrote the other."""
        return len(self._named(self.etp * self.ep)) < self.etp * self.ep

    def places(self) -> tuple[GridPlace, ...]:
        """Every rank that must have saved, by stage."""
        named = self._named(max(self.tp, self.etp * self.ep if self.ep > 1 else 1))
        return tuple(GridPlace(tp=tp, pp=pp, ep=ep) for pp in range(self.pp) for tp, ep in named)

    def _named(self, ranks: int) -> dict[tuple[int, int], None]:
        """Tp and ep of so many ranks of a stage."""
        return dict.fromkeys((rank % self.tp, rank // self.etp % self.ep) for rank in range(ranks))

    def contains(self, place: GridPlace) -> bool:
        """Whether a rank lies in the grid at all."""
        return place.tp < self.tp and place.pp < self.pp and place.ep < self.ep

    def rank(self, place: GridPlace) -> int:
        """Number, among those of its stage, of the first rank of that place."""
        ranks = range(place.tp, self.tp * self.etp * self.ep, self.tp)
        return next((rank for rank in ranks if rank // self.etp % self.ep == place.ep), place.tp)

    def expert_part(self, place: GridPlace) -> ExpertPart:
        """What the rank at `place` holds of its experts."""
        rank = self.rank(place)
        return ExpertPart(etp=rank % self.etp, copy=rank // (self.etp * self.ep))

    def __str__(self) -> str:
        """Degrees above one, e.g. "tp=2,pp=4"."""
        degrees = {"tp": self.tp, "pp": self.pp, "ep": self.ep}
        if self.etp != self.tp:
            degrees["etp"] = self.etp
        shown = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1 or axis == "etp"]
        return ",".join(shown) or "one rank"


def placing(grid: Grid, arguments: Arguments) -> Callable[[int], GridPlace] | None:
    """Where the ranks of a run are in the grid; None where its arguments do not say it, or contradict one another.

    Ranks are numbered in the order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp under `--use-tp-pp-dp-mapping`
    (parallel_state.py: initialize_model_parallel).
    """
    cp, world = arguments.cp or 1, arguments.world or 0
    dense, experts = grid.tp * cp, grid.etp * grid.ep
    per_stage = world // grid.pp
    inner = arguments.raw.get("use_tp_pp_dp_mapping") is True
    stride = dense if inner else per_stage
    contradictions = (
        world <= 0 or world % (dense * grid.pp) or per_stage % experts,
        arguments.dp is not None and world != dense * grid.pp * arguments.dp,
        inner and grid.ep > 1 and experts != dense,
        cp > 1 and grid.ep > 1 and arguments.etp is None,  # up to 0.9 expert ranks lay above those of context
        any(arguments.raw.get(key) for key in _ENCODER),
    )
    if any(contradictions):
        return None
    return lambda rank: GridPlace(tp=rank % grid.tp, pp=rank // stride % grid.pp, ep=rank // grid.etp % grid.ep)


def misplaced(
    grid: Grid, folders: tuple[RankFolder, ...], arguments: Arguments, ranks: Mapping[str, object]
) -> Iterator[str]:
    """Folders whose files another rank wrote. `ranks`: folder to `rank` in the arguments of its file.

    Nothing where the numbering is not known, a rank is not recorded, or all files record the same one: tools that
    convert a checkpoint in one process write such files.
    """
    placed = placing(grid, arguments)
    known = {name: rank for name, rank in ranks.items() if type(rank) is int}
    is_recorded = len(known) == len(ranks) and all(0 <= rank < (arguments.world or 0) for rank in known.values())
    if placed is None or not is_recorded or (len(known) > 1 and len(set(known.values())) == 1):
        return
    for folder in folders:
        named = folder.place(pipelined=grid.pp > 1)
        writer = placed(known[folder.name]) if folder.name in known and grid.contains(named) else named
        if writer != named:
            home = rank_folder_name(writer, pipelined=grid.pp > 1, experts=grid.ep > 1)
            yield (
                f"{folder.name}: expected files of {named}; got those that rank {known[folder.name]} of "
                f"{arguments.world} saved, {writer}: they belong in {home}"
            )


_SAME_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "world_size",
    "num_layers",
    "hidden_size",
    "padded_vocab_size",
)
"""Arguments that all ranks of a run have in common, and two runs easily differ in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRank:
    """The files of one rank."""

    name: str
    """Name of its folder."""
    place: GridPlace
    """Where it is in the grid."""
    arguments: Arguments
    """Arguments that it saved."""
    model: Archive
    """Its model file."""
    buffers: Archive | None
    """Its file of the distributed optimizer, where there is one."""

    @property
    def path(self) -> str:
        """Its model file, absolute."""
        return self.model.path

    @property
    def root(self) -> Mapping[object, object]:
        """What that says."""
        return mapping(self.model.root, self.model.path)

    @property
    def chunks(self) -> tuple[tuple[int, object], ...]:
        """Chunks of the model it holds, by number: one, or those of a virtual pipeline. Empty stages have none."""
        if "model" in self.root:
            return ((0, self.root["model"]),)
        numbered = [(key[5:], own) for key, own in self.root.items() if isinstance(key, str) and key[:5] == "model"]
        return tuple(sorted(((int(rest), own) for rest, own in numbered if rest.isdecimal()), key=lambda pair: pair[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyRun:
    """Files that belong together."""

    folder: Path
    """The iteration folder."""
    ranks: tuple[SavedRank, ...]
    """By stage, expert rank and tensor-parallel rank."""
    arguments: Arguments
    """Arguments of the run."""
    grid: Grid
    """Degrees that the files are named by."""
    strays: tuple[str, ...]
    """Files in the folders of ranks that are known and not read."""

    @property
    def root(self) -> Mapping[object, object]:
        """Model file of the first rank."""
        return self.ranks[0].root

    @property
    def version(self) -> float:
        """Version of the checkpoint: 0 where there is none, as Megatron counts it."""
        found = self.root.get("checkpoint_version", 0)
        return float(found) if isinstance(found, int | float) else 0.0

    @property
    def vpp(self) -> int:
        """Chunks of the model per pipeline stage."""
        return self.arguments.vpp or max((number + 1 for rank in self.ranks for number, _ in rank.chunks), default=1)

    @property
    def records(self) -> tuple[Record, ...]:
        """Checksums of all storages."""
        archives = (own for rank in self.ranks for own in (rank.model, rank.buffers) if own is not None)
        return tuple(record for archive in archives for record in archive.records)


def read_run(folder: Path) -> LegacyRun:
    """Read and check the files of an iteration. Raises one error with all that is missing or of another run."""
    folder = folder.absolute()
    folders = _rank_folders(folder)
    problems = Problems()
    read = {own.name: pair for own in folders if (pair := _read(folder / own.name, problems)) is not None}
    roots = {name: mapping(model.root, model.path) for name, (model, _) in read.items()}
    saved: dict[str, Arguments] = {}
    for name, root in roots.items():
        try:
            saved[name] = read_arguments(root.get("args"), name)
        except MalformedError as error:
            problems.wrong.append(str(error))
    arguments = next((own for own in saved.values() if own.raw), Arguments(raw={}))
    grid = Grid.of(arguments, folders)
    has_buffers = bool(read) and all(buffers is not None for _, buffers in read.values())
    _check_grid(grid, folders, (MODEL, DISTRIBUTED_OPTIMIZER) if has_buffers else (MODEL,), problems)
    if has_buffers:
        lacking = (f"{own.name}/{DISTRIBUTED_OPTIMIZER}" for own in folders if own.name not in read)
        problems.missing += [name for name in lacking if not (folder / name).is_file()]
    for key in ("iteration", "total_iters", "checkpoint_version"):
        problems.check_agreement(key, {name: root.get(key) for name, root in roots.items()})
    for key in _SAME_ARGUMENTS:
        problems.check_agreement(key, {name: own.raw.get(key) for name, own in saved.items()})
    problems.check_agreement("whether it has an optimizer", {name: "optimizer" in root for name, root in roots.items()})
    if len(saved) == len(roots):
        numbers = {name: own.raw.get("rank") for name, own in saved.items()}
        problems.wrong += misplaced(grid, folders, arguments, numbers)
    problems.raise_any(str(folder), f"Megatron, {grid}")
    places = {own.name: own.place(pipelined=grid.pp > 1) for own in folders}
    ranks = [
        SavedRank(name=name, place=places[name], arguments=saved[name], model=own, buffers=apart)
        for name, (own, apart) in read.items()
    ]
    return LegacyRun(
        folder=folder,
        ranks=tuple(sorted(ranks, key=lambda rank: (rank.place.pp, rank.place.ep, rank.place.tp))),
        arguments=arguments,
        grid=grid,
        strays=tuple(
            f"{own.name}/{name}"
            for own in folders
            for name in sorted(names_of_folder(folder / own.name))
            if is_side_file(name)
        ),
    )


def source_files(run: LegacyRun) -> Iterator[SourceFile]:
    """Identity of every file that was read."""
    for rank in run.ranks:
        yield source_file(rank.path, f"model of {rank.name}")
        if rank.buffers is not None:
            yield source_file(rank.buffers.path, f"distributed optimizer of {rank.name}")


def _rank_folders(folder: Path) -> tuple[RankFolder, ...]:
    """Folders of ranks."""
    try:
        entries = sorted(names_of_folder(folder))
    except OSError as error:
        raise SourceError(f"cannot list {folder}: {error.strerror}") from error
    found = tuple(own for own in map(parse_rank_folder, entries) if own is not None)
    if not found:
        raise MissingFileError(f"expected folders such as mp_rank_00 in {folder}; there is none. Copy them")
    return found


def _read(folder: Path, problems: Problems) -> tuple[Archive, Archive | None] | None:
    """The model file of one rank, and that of its buffers, or None and a problem."""
    archives: dict[str, Archive] = {}
    for name in (MODEL, DISTRIBUTED_OPTIMIZER):
        try:
            if name == MODEL or (folder / name).is_file():
                archives[name] = read_archive(str(folder / name))
        except MissingFileError:
            problems.missing.append(f"{folder.name}/{name}")
        except UnsupportedError as error:
            problems.unsupported.append(str(error))
        except (SourceError, CorruptError) as error:
            problems.wrong.append(str(error).replace(f"{folder.parent}/", ""))
    model = archives.get(MODEL)
    if model is not None and not isinstance(model.root, dict):
        problems.unsupported.append(f"{model.path}: expected a dict at the top; got {described(model.root)}")
        return None
    return None if model is None else (model, archives.get(DISTRIBUTED_OPTIMIZER))


def _check_grid(grid: Grid, folders: tuple[RankFolder, ...], files: tuple[str, ...], problems: Problems) -> None:
    """Check that every rank that must have saved did; each saves `files`."""
    if grid.collides:
        problems.unsupported.append(
            f"tp={grid.tp}, ep={grid.ep}, etp={grid.etp}: ranks with different parts of an expert have one folder "
            "name, and only one of them is there (--ckpt-format torch cannot save this layout). Save with torch_dist"
        )
    there = {own.place(pipelined=grid.pp > 1): own.name for own in folders}
    for place in grid.places():
        if place not in there:
            name = rank_folder_name(place, pipelined=grid.pp > 1, experts=grid.ep > 1)
            problems.missing += [f"{name}/{file} ({place})" for file in files]
    problems.wrong += [
        f"extra: {name} lies outside the grid of {grid}" for place, name in there.items() if not grid.contains(place)
    ]


_OF_A_RANK = ("rank", "local_rank")
"""Arguments that are a rank's own number, and say nothing."""
_PER_RANK = ("rng_state",)
"""Kept per rank even where all are equal."""


def run_extras(run: LegacyRun, checksums: Checksums) -> tuple[list[Extra], list[str]]:
    """Extras of a run, and what is dropped, each with the reason."""
    extras: list[Extra] = []
    for key in dict.fromkeys(key for rank in run.ranks for key in rank.root):
        name = str(key)
        if name == "optimizer" or name.rstrip("0123456789") == "model":
            continue
        values = {n: rank.root[key] for n, rank in enumerate(run.ranks) if rank.root.get(key) is not None}
        if name == "args" and values:
            extras.append(Extra(name=name, value=next(iter(values.values()))))
        else:
            extras += ranks_extras(run, name, values, checksums)
    first = run.ranks[0]
    raws = (rank.arguments.raw.items() for rank in run.ranks)
    differing = sorted(
        {key for raw in raws for key, value in raw if not checksums.is_same(value, first.arguments.raw.get(key))}
        - {*_OF_A_RANK}
    )
    if not differing:
        return extras, []
    shown = ", ".join(differing[:8]) + (", ..." if len(differing) > 8 else "")
    return extras, [f"args of ranks other than {first.name}, which differ in {shown}: the first rank's are kept"]


def ranks_extras(run: LegacyRun, name: str, values: Mapping[int, object], checksums: Checksums) -> list[Extra]:
    """Extras for what ranks (by number) saved under one name: one, where all that have it agree."""
    first = next(iter(values.values()), None)
    if name not in _PER_RANK and all(checksums.is_same(first, own) for own in values.values()):
        return [Extra(name=name, value=first)] if values else []
    places = ((own, run.ranks[number].place) for number, own in values.items())
    return [
        Extra(name=f"{name}/pp{at.pp}.tp{at.tp}" + (f".ep{at.ep}" if run.grid.ep > 1 else ""), value=own)
        for own, at in places
    ]
