"""The files of one native checkpoint, read and found to belong together.

1. Read every file of the grammar; a file that cannot be read is a problem, not the end.
2. How many ranks: what the model-states files say, else the optimizer files.
3. The grid: one optimizer file per rank (no ZeRO: none), one model-states file per rank under ZeRO-3, else one.
4. The same run: step, version and world size are equal everywhere.
5. Raise all problems together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ucp.contract.problems import Problems
from ucp.contract.rank_extras import Checksums
from ucp.core.index import SourceFile
from ucp.core.tensor import Record
from ucp.errors import CorruptError, MalformedError, MissingFileError, SourceError, UnsupportedError
from ucp.io.files import split_parts
from ucp.io.torch_file.archive import read_archive
from ucp_formats.deepspeed.config import Precision, RunConfig
from ucp_formats.deepspeed.fields import number_of_enum
from ucp_formats.deepspeed.locate import TagFolder
from ucp_formats.deepspeed.names import FileName, Role
from ucp_formats.deepspeed.refusals import refuse_contents

__all__ = ["SavedFile", "SavedRun", "checked_run", "read_file", "read_run", "source_files", "try_read"]


_KEY = {Role.MODEL: "module", Role.SHARDED_MODEL: "module"}
"""Key that files of a role have, whatever wrote them; a pipeline's module is None."""

_MOST_NAMED = 1000
"""Missing files to name; a damaged count of ranks can be anything."""

_NO_OPTIMIZER = (
    "there is no optimizer file at all. Where none was saved, the masters and the optimizer are lost: DeepSpeed 0.18.4 "
    "saves none for ZeRO-1 with bf16 and data_types.grad_accum_dtype fp32"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One file of torch.save."""

    name: FileName
    """Its name, understood."""
    path: str
    """Absolute path."""
    root: Mapping[object, object]
    """What was saved."""
    records: tuple[Record, ...]
    """Checksums of its storages."""

    @property
    def optimizer(self) -> Mapping[object, object]:
        """`optimizer_state_dict` of an optimizer file; empty elsewhere."""
        found = self.root.get("optimizer_state_dict")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """Files that belong together."""

    folder: TagFolder
    """Where they lie."""
    models: Mapping[int, SavedFile]
    """Rank to its model-states file: rank 0 alone, but all ranks under ZeRO-3."""
    optimizers: Mapping[int, SavedFile]
    """Rank to its optimizer file, increasing; empty without ZeRO."""
    ranks: int
    """Data-parallel ranks, sequence-parallel ones counted."""
    stage: int
    """ZeRO stage."""
    notes: tuple[str, ...]
    """What was tolerated."""

    @property
    def model(self) -> SavedFile:
        """Model-states file of rank 0."""
        return self.models[0]

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        found = self.model.root.get("ds_config")
        return RunConfig(found if isinstance(found, dict) else {})

    @property
    def files(self) -> tuple[SavedFile, ...]:
        """All files."""
        return (*self.models.values(), *self.optimizers.values())

    @property
    def is_bf16_optimizer(self) -> bool:
        """Whether BF16_Optimizer wrote it: a ZeRO-1 file that names no stage (bf16_optimizer.py, 0.19.8)."""
        return any("zero_stage" not in file.optimizer for file in self.optimizers.values())


def read_run(folder: TagFolder) -> SavedRun:
    """Read and check the files of `folder`. Raises one error with all that is missing, damaged or of another run."""
    problems = Problems()
    files = [read for name in folder.files if (read := try_read(folder.path, name, problems)) is not None]
    refuse_contents(str(folder.path), {file.name.name: file.root for file in files})
    run = checked_run(folder, files, problems)
    problems.raise_any(str(folder.path), f"ZeRO-{run.stage} over {run.ranks} rank{'s' if run.ranks > 1 else ''}")
    return run


def checked_run(folder: TagFolder, files: list[SavedFile], problems: Problems, *, mp: int = 0) -> SavedRun:
    """The files of one model-parallel rank; what is wrong with them goes to `problems`.

    `folder`: with the names of that rank's files only. `files`: those of them that could be read.
    """
    models = {file.name.dp: file for file in files if file.name.role is not Role.OPTIMIZER}
    optimizers = {file.name.dp: file for file in files if file.name.role is Role.OPTIMIZER}
    stage = _stage(folder, files)
    ranks = _ranks(folder, files)
    _check_doubles(folder, problems)
    _check_grid(folder, (stage, ranks, mp), problems, prefix=_prefix(files))
    _check_same_run(files, problems)
    return SavedRun(
        folder=folder,
        models=dict(sorted(models.items())),
        optimizers=dict(sorted(optimizers.items())),
        ranks=ranks,
        stage=stage,
        notes=_tolerated(folder, stage, ranks, models),
    )


def read_file(path: Path, name: FileName) -> SavedFile:
    """One file. Raises SourceError or CorruptError."""
    archive = read_archive(str(path))
    if not isinstance(archive.root, dict):
        raise UnsupportedError(f"{path}: expected a dict at the top; got a {type(archive.root).__name__}")
    wanted = _KEY.get(name.role)
    if wanted is not None and wanted not in archive.root:
        held = ", ".join(map(repr, list(archive.root)[:8])) or "nothing"
        raise MalformedError(f"{path}: expected {wanted!r} among the keys, as {name.label} have it; got {held}")
    return SavedFile(name=name, path=str(path), root=archive.root, records=archive.records)


def source_files(paths: Iterable[tuple[str, str]]) -> Iterator[SourceFile]:
    """Identity of each file given as (path, role); of its parts, where it is split."""
    for path, role in paths:
        whole = Path(path)
        for part in (whole,) if whole.exists() else map(Path, split_parts(path)):
            stat = part.stat()
            yield SourceFile(path=str(part), nbytes=stat.st_size, mtime_ns=stat.st_mtime_ns, role=role)


def try_read(folder: Path, name: FileName, problems: Problems) -> SavedFile | None:
    """The file of that name in `folder`, or None and a problem."""
    try:
        return read_file(folder / name.name, name)
    except MissingFileError:
        problems.missing.append(name.name)
    except UnsupportedError as error:
        problems.unsupported.append(str(error))
    except (SourceError, CorruptError) as error:
        problems.wrong.append(f"{name.name} ({name.label}): {_below(error, folder)}")
    return None


def _below(error: Exception, folder: Path) -> str:
    return str(error).replace(f"{folder}/", "")


def _stage(folder: TagFolder, files: list[SavedFile]) -> int:
    """ZeRO stage: what the optimizer files say, else what the names and the model-states file show."""
    for file in files:
        if file.name.role is Role.OPTIMIZER and "zero_stage" in file.optimizer:
            stage = number_of_enum(file.optimizer["zero_stage"], f"zero_stage of {file.path}")
            if stage not in (1, 2, 3):
                raise UnsupportedError(f"expected a ZeRO stage of 1, 2 or 3 in {file.path}; got {stage}")
            return stage
    roles = {name.role for name in folder.files}
    if Role.SHARDED_MODEL in roles:
        return 3
    if Role.OPTIMIZER in roles:
        return 1
    for file in files:
        # with ZeRO the optimizer is elsewhere; without, ucp keeps the names of its parameters in param_shapes
        if file.root.get("param_shapes") is not None and file.root.get("optimizer") is None:
            config = file.root.get("ds_config")
            section = config.get("zero_optimization") if isinstance(config, dict) else None
            configured = section.get("stage") if isinstance(section, dict) else None
            return 2 if configured == 2 else 1
    return 0


def _ranks(folder: TagFolder, files: list[SavedFile]) -> int:
    """Ranks that most files speak of, else as many as there are optimizer files."""
    said = Counter(count for file in files if (count := _said_ranks(file)) is not None)
    if said:
        return said.most_common(1)[0][0]
    return max((name.dp + 1 for name in folder.files), default=1)


def _said_ranks(file: SavedFile) -> int | None:
    if file.name.role is not Role.OPTIMIZER:
        count = file.root.get("dp_world_size")
    else:
        count = file.optimizer.get("partition_count")
        if isinstance(count, list) and count and all(isinstance(own, int) for own in count):
            count = max(count)  # groups of experts are cut over fewer ranks than the others
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def _check_doubles(folder: TagFolder, problems: Problems) -> None:
    """Two files for one place: other prefixes, or the model states of two kinds of stage."""
    places: dict[tuple[bool, int], str] = {}
    for name in folder.files:
        place = (name.role is Role.OPTIMIZER, name.dp)
        other = places.setdefault(place, name.name)
        if other != name.name:
            problems.wrong.append(f"extra: {name.name} and {other} are the same part of a checkpoint, of another run")


def _check_grid(folder: TagFolder, layout: tuple[int, int, int], problems: Problems, *, prefix: str) -> None:
    """`layout`: ZeRO stage, ranks, and the model-parallel rank whose files these are."""
    stage, ranks, mp = layout
    grids = [(Role.OPTIMIZER, ranks if stage else 0)]
    grids.append((Role.SHARDED_MODEL, ranks) if stage == 3 else (Role.MODEL, 1))
    for role, count in grids:
        there = {name.dp for name in folder.files if name.role is role}
        needed = 1 if role is Role.SHARDED_MODEL else count
        lost = list(islice((rank for rank in range(needed) if rank not in there), _MOST_NAMED))
        problems.missing += [f"{_expected(role, rank, prefix, mp)} (rank {rank} of {count})" for rank in lost]
        if role is Role.OPTIMIZER and count and not there:
            problems.missing.append(_NO_OPTIMIZER)
        problems.wrong += [
            f"extra: {name.name} is for rank {name.dp} of {count}"
            for name in folder.files
            if name.role is role and name.dp >= count
        ]


def _prefix(files: list[SavedFile]) -> str:
    """Prefix of optimizer files: that of those that are there, else what the configuration leads to."""
    for file in files:
        if file.name.role is Role.OPTIMIZER:
            return file.name.prefix
    configs = (file.root.get("ds_config") for file in files)
    is_bf16 = any(RunConfig(own).precision(()) is Precision.BF16 for own in configs if isinstance(own, dict))
    return "bf16_" if is_bf16 else ""


def _expected(role: Role, rank: int, prefix: str, mp: int) -> str:
    """Name of the file that should be there."""
    match role:
        case Role.OPTIMIZER:
            return f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
        case Role.SHARDED_MODEL:
            return f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt"
        case _:
            return f"mp_rank_{mp:02d}_model_states.pt"


def _check_same_run(files: list[SavedFile], problems: Problems) -> None:
    models = {file.name.name: file for file in files if file.name.role is not Role.OPTIMIZER}
    optimizers = {file.name.name: file for file in files if file.name.role is Role.OPTIMIZER}
    for key in ("global_steps", "dp_world_size", "mp_world_size"):
        problems.agree(key, {name: file.root.get(key) for name, file in models.items()})
    problems.agree("ds_version", {file.name.name: _version(file.root) for file in files})
    problems.agree("zero_stage", {name: _enum(file.optimizer.get("zero_stage")) for name, file in optimizers.items()})
    said = {file.name.name: _said_ranks(file) for file in files}
    if optimizers:
        problems.agree("the number of ranks", said)
    for key in ("param_shapes", "frozen_param_shapes"):
        values = {name: file.root.get(key) for name, file in models.items()}
        if len(set(Checksums(()).first_same(value for value in values.values() if value is not None))) > 1:
            problems.wrong.append(f"{', '.join(values)}: of another run: {key} differs among them")


def _version(root: Mapping[object, object]) -> object:
    version = root.get("ds_version")
    return version.strip() if isinstance(version, str) else version


def _enum(value: object) -> object:
    return None if value is None else number_of_enum(value, "zero_stage")


def _tolerated(folder: TagFolder, stage: int, ranks: int, models: Mapping[int, SavedFile]) -> tuple[str, ...]:
    """ZeRO-3 model states of single ranks may be lost: all but frozen shards is in rank 0's (DeepSpeed issue 7546)."""
    if stage != 3 or 0 not in models:
        return ()
    there = {name.dp for name in folder.files if name.role is Role.SHARDED_MODEL}
    lost = [rank for rank in range(ranks) if rank not in there]
    if not lost:
        return ()
    named = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
    return (f"no model-states file of rank {named}: nothing in it is needed here, client state of those ranks is lost",)
