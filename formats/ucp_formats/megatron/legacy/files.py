"""The files of one legacy checkpoint, read and checked for consistency.

1. Read the files in the folder of every rank.
2. Take the arguments of the run from the first file that has them.
3. Check that every rank of the model-parallel grid has saved, and no other rank.
4. Check that iteration, version and parallel degrees are equal in all files.
5. Check that every file is in the folder of the rank that saved it.
6. Raise one error with all problems.

The ranks of a pipeline stage have two numberings (parallel_state.py, order tp-cp-ep-dp-pp): `tp + TP * d` for dense
layers, `etp + ETP * (ep + EP * copy)` for experts. A rank saves if it is the first of its dense or of its expert
data-parallel group, in a folder named after its tp and ep (checkpointing.py: save_checkpoint). If tensor and expert
parallelism share ranks, not every pair of tp and ep exists:

>>> grid = Grid(tp=2, pp=1, ep=2, etp=1)
>>> [(place.tp, place.ep) for place in grid.places()]
[(0, 0), (1, 1)]
>>> grid.expert_part(GridPlace(tp=1, pp=0, ep=1))
ExpertPart(etp=0, copy=0)

The arguments in each file include `rank` and `world_size`. They show where in the grid the rank is that saved the file:

>>> print(rank_placing(Grid(tp=2, pp=2, ep=1, etp=2), Arguments(raw={}, world=8, dp=2))(5))
tp rank 1, stage 1, expert rank 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ucp.contract.ranks import Problems
from ucp.core.index import SourceFile
from ucp.core.tensor import Record
from ucp.errors import CorruptError, MalformedError, MissingFileError, SourceError, UnsupportedError
from ucp.io.folder import names_of_folder
from ucp.io.pickle.fields import describe_value, require_mapping
from ucp.io.provenance import source_file
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
"""Degrees of an encoder on separate ranks, which shift the numbers of all others (megatron-core 0.9 to 0.12)."""
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
"""Arguments that are equal on all ranks of a run, and often differ between runs."""


class ExpertPart(NamedTuple):
    """Which part of its experts a rank holds."""

    etp: int
    """Expert-tensor-parallel rank."""
    copy: int
    """Number of the copy: how many ranks before it hold the same part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Degrees of parallelism that decide which ranks save and how their folders are named."""

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
        """The grid that the arguments record; degrees they lack are taken from the names of the folders."""
        tp = arguments.tp or 1 + max(folder.tp for folder in folders)
        numbers = [folder.numbers for folder in folders if folder.numbers]
        # runs without arguments are older than experts: a single number is a stage
        pp = arguments.pp or (1 if arguments.ep else 1 + max((first for first, *_ in numbers), default=0))
        ep = arguments.ep or 1 + max((pair[1] for pair in numbers if len(pair) == 2), default=0)
        etp = arguments.etp if arguments.num_experts or ep > 1 else None  # ignored without experts
        return cls(tp=tp, pp=pp, ep=ep, etp=etp or tp)

    @property
    def degrees(self) -> dict[str, int]:
        """Axis to its degree."""
        return {"tp": self.tp, "pp": self.pp, "ep": self.ep, "etp": self.etp}

    @property
    def collides(self) -> bool:
        """Whether two ranks with different parts of experts have one folder name, so that one overwrote the other."""
        return len(self._stage_places(self.etp * self.ep)) < self.etp * self.ep

    def places(self) -> tuple[GridPlace, ...]:
        """Every rank that saves, by stage."""
        in_stage = self._stage_places(max(self.tp, self.etp * self.ep if self.ep > 1 else 1))
        return tuple(GridPlace(tp=tp, pp=pp, ep=ep) for pp in range(self.pp) for tp, ep in in_stage)

    def _stage_places(self, ranks: int) -> dict[tuple[int, int], None]:
        """(tp, ep) of the first `ranks` ranks of a stage, without repeats."""
        return dict.fromkeys((rank % self.tp, rank // self.etp % self.ep) for rank in range(ranks))

    def contains(self, place: GridPlace) -> bool:
        """Whether the place is inside the grid."""
        return place.tp < self.tp and place.pp < self.pp and place.ep < self.ep

    def rank(self, place: GridPlace) -> int:
        """The first rank at that place, numbered within its stage."""
        ranks = range(place.tp, self.tp * self.etp * self.ep, self.tp)
        return next((rank for rank in ranks if rank // self.etp % self.ep == place.ep), place.tp)

    def expert_part(self, place: GridPlace) -> ExpertPart:
        """The part of its experts that the rank at `place` holds."""
        rank = self.rank(place)
        return ExpertPart(etp=rank % self.etp, copy=rank // (self.etp * self.ep))

    def __str__(self) -> str:
        """Degrees above one, e.g. "tp=2,pp=4"."""
        degrees = [(axis, n) for axis, n in self.degrees.items() if (n != self.tp if axis == "etp" else n > 1)]
        return ",".join(f"{axis}={n}" for axis, n in degrees) or "one rank"


def rank_placing(grid: Grid, arguments: Arguments) -> Callable[[int], GridPlace] | None:
    """Function from a global rank to its place in the grid; None if the arguments do not determine it.

    The order of ranks is tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp with `--use-tp-pp-dp-mapping` (parallel_state.py:
    initialize_model_parallel).
    """
    cp, world = arguments.cp or 1, arguments.world or 0
    dense, experts = grid.tp * cp, grid.etp * grid.ep
    per_stage = world // grid.pp
    is_dp_outermost = arguments.raw.get("use_tp_pp_dp_mapping") is True
    stride = dense if is_dp_outermost else per_stage
    contradictions = (
        world <= 0 or world % (dense * grid.pp) or per_stage % experts,
        arguments.dp is not None and world != dense * grid.pp * arguments.dp,
        is_dp_outermost and grid.ep > 1 and experts != dense,
        cp > 1 and grid.ep > 1 and arguments.etp is None,  # up to 0.9 ep and cp were in another order
        any(arguments.raw.get(key) for key in _ENCODER),
    )
    if any(contradictions):
        return None
    return lambda rank: GridPlace(tp=rank % grid.tp, pp=rank // stride % grid.pp, ep=rank // grid.etp % grid.ep)


def find_misplaced(
    grid: Grid, folders: tuple[RankFolder, ...], arguments: Arguments, saved_ranks: Mapping[str, object]
) -> Iterator[str]:
    """A line for every folder whose files another rank saved. `saved_ranks`: folder to the `rank` in its arguments.

    No lines if the arguments do not determine the grid, if a file records no rank, or if all files record the same rank
    (conversion tools write all of them in one process).
    """
    place_of = rank_placing(grid, arguments)
    ranks = {name: rank for name, rank in saved_ranks.items() if type(rank) is int}
    is_recorded = len(ranks) == len(saved_ranks) and all(0 <= rank < (arguments.world or 0) for rank in ranks.values())
    if place_of is None or not is_recorded or (len(ranks) > 1 and len(set(ranks.values())) == 1):
        return
    for folder in folders:
        place = folder.place(pipelined=grid.pp > 1)
        writer = place_of(ranks[folder.name]) if folder.name in ranks and grid.contains(place) else place
        if writer != place:
            home = rank_folder_name(writer, pipelined=grid.pp > 1, experts=grid.ep > 1)
            yield (
                f"{folder.name}: expected files of {place}; got files that rank {ranks[folder.name]} of "
                f"{arguments.world} saved ({writer}): they belong in {home}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRank:
    """The files of one rank."""

    name: str
    """Name of its folder."""
    place: GridPlace
    """Its place in the grid."""
    arguments: Arguments
    """Arguments in its model file."""
    model: Archive
    """Model file."""
    buffers: Archive | None
    """File of the distributed optimizer, if any."""

    @property
    def root(self) -> Mapping[object, object]:
        """Content of the model file."""
        return require_mapping(self.model.root, self.model.path)

    @property
    def chunks(self) -> tuple[tuple[int, object], ...]:
        """Number and state_dict of each chunk: one, several with a virtual pipeline, none on an empty stage."""
        if "model" in self.root:
            return ((0, self.root["model"]),)
        entries = [(key[5:], chunk) for key, chunk in self.root.items() if isinstance(key, str) and key[:5] == "model"]
        return tuple(sorted(((int(n), chunk) for n, chunk in entries if n.isdecimal()), key=lambda pair: pair[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyRun:
    """The files of all ranks."""

    folder: Path
    """The iteration folder."""
    ranks: tuple[SavedRank, ...]
    """By stage, expert rank and tensor-parallel rank."""
    arguments: Arguments
    """Arguments of the run."""
    grid: Grid
    """Degrees of parallelism of the ranks that saved."""
    unread: tuple[str, ...]
    """Known files in the folders of ranks that `ucp` does not read."""

    @property
    def root(self) -> Mapping[object, object]:
        """Content of the first rank's model file."""
        return self.ranks[0].root

    @property
    def version(self) -> float:
        """Version of the checkpoint; 0 if none is recorded, as in Megatron."""
        version = self.root.get("checkpoint_version", 0)
        return float(version) if isinstance(version, int | float) else 0.0

    @property
    def vpp(self) -> int:
        """Chunks of the model per pipeline stage."""
        return self.arguments.vpp or max((number + 1 for rank in self.ranks for number, _ in rank.chunks), default=1)

    @property
    def records(self) -> tuple[Record, ...]:
        """Checksums of all storages."""
        archives = (archive for rank in self.ranks for archive in (rank.model, rank.buffers) if archive is not None)
        return tuple(record for archive in archives for record in archive.records)

    @property
    def files(self) -> Iterator[SourceFile]:
        """Identity of every file that was read."""
        for rank in self.ranks:
            yield source_file(rank.model.path, f"model of {rank.name}")
            if rank.buffers is not None:
                yield source_file(rank.buffers.path, f"distributed optimizer of {rank.name}")


def read_run(folder: Path) -> LegacyRun:
    """Read and check the files of an iteration. Raises one error with all files that are missing or inconsistent."""
    folder = folder.absolute()
    folders = _rank_folders(folder)
    names = [rank_folder.name for rank_folder in folders]
    problems = Problems()
    archives = {name: pair for name in names if (pair := _read_rank(folder / name, problems)) is not None}
    roots = {name: require_mapping(model.root, model.path) for name, (model, _) in archives.items()}
    recorded: dict[str, Arguments] = {}
    for name, root in roots.items():
        try:
            recorded[name] = read_arguments(root.get("args"), name)
        except MalformedError as error:
            problems.wrong.append(str(error))
    arguments = next((args for args in recorded.values() if args.raw), Arguments(raw={}))
    grid = Grid.of(arguments, folders)
    has_buffers = bool(archives) and all(buffers is not None for _, buffers in archives.values())
    places = {name: entry.place(pipelined=grid.pp > 1) for name, entry in zip(names, folders, strict=True)}
    _check_grid(grid, places, (MODEL, DISTRIBUTED_OPTIMIZER) if has_buffers else (MODEL,), problems)
    if has_buffers:
        expected = (f"{name}/{DISTRIBUTED_OPTIMIZER}" for name in names if name not in archives)
        problems.missing += [name for name in expected if not (folder / name).is_file()]
    for key in ("iteration", "total_iters", "checkpoint_version"):
        problems.check_agreement(key, {name: root.get(key) for name, root in roots.items()})
    for key in _SAME_ARGUMENTS:
        problems.check_agreement(key, {name: args.raw.get(key) for name, args in recorded.items()})
    problems.check_agreement("whether it has an optimizer", {name: "optimizer" in root for name, root in roots.items()})
    if len(recorded) == len(roots):
        saved_ranks = {name: args.raw.get("rank") for name, args in recorded.items()}
        problems.wrong += find_misplaced(grid, folders, arguments, saved_ranks)
    problems.raise_any(str(folder), f"Megatron, {grid}")
    ranks = [
        SavedRank(name=name, place=places[name], arguments=recorded[name], model=model, buffers=buffers)
        for name, (model, buffers) in archives.items()
    ]
    ranks.sort(key=lambda rank: (rank.place.pp, rank.place.ep, rank.place.tp))
    files = (f"{name}/{file}" for name in names for file in sorted(names_of_folder(folder / name)))
    unread = tuple(path for path in files if is_side_file(path.rpartition("/")[2]))
    return LegacyRun(folder=folder, ranks=tuple(ranks), arguments=arguments, grid=grid, unread=unread)


def _rank_folders(folder: Path) -> tuple[RankFolder, ...]:
    try:
        names = sorted(names_of_folder(folder))
    except OSError as error:
        raise SourceError(f"cannot list {folder}: {error.strerror}") from error
    folders = tuple(filter(None, map(parse_rank_folder, names)))
    if not folders:
        raise MissingFileError(f"expected folders such as mp_rank_00 in {folder}; there is none. Copy all of them")
    return folders


def _read_rank(folder: Path, problems: Problems) -> tuple[Archive, Archive | None] | None:
    """The model file of one rank and its distributed optimizer; None, and a problem, without a model file."""
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
        problems.unsupported.append(f"{model.path}: expected a dict at the top; got {describe_value(model.root)}")
        return None
    return None if model is None else (model, archives.get(DISTRIBUTED_OPTIMIZER))


def _check_grid(grid: Grid, places: Mapping[str, GridPlace], files: tuple[str, ...], problems: Problems) -> None:
    """Check that exactly the ranks of the grid have a folder. `places`: by folder; `files`: those that each saves."""
    if grid.collides:
        problems.unsupported.append(
            f"tp={grid.tp}, ep={grid.ep}, etp={grid.etp}: ranks with different parts of an expert share one folder "
            "name, so the files of all but one were overwritten: --ckpt-format torch cannot save this topology. Save "
            "with --ckpt-format torch_dist"
        )
    existing = set(places.values())
    for place in grid.places():
        if place not in existing:
            name = rank_folder_name(place, pipelined=grid.pp > 1, experts=grid.ep > 1)
            problems.missing += [f"{name}/{file} ({place})" for file in files]
    problems.wrong += [
        f"extra: {name} is outside the grid of {grid}" for name, place in places.items() if not grid.contains(place)
    ]
