"""Which files make up a checkpoint that was saved by `torch.save`, from names alone.

1. A file of every rank (verl, accelerate); verl keeps them in `actor/` or `critic/` of `global_step_N/`.
2. Weights and an optimizer in a folder (Trainer, accelerate).
3. One file with everything in it: the path itself or the only such file of a folder, recognised by its suffix alone,
   or `checkpoint.pt` in a folder that `ucp` wrote.

    model_world_size_4_rank_1.pt, optim_..., extra_state_...       verl (`fsdp_checkpoint_manager.py`, 2026)
    pytorch_model_fsdp_0_rank1.bin, optimizer_0_rank1.bin          accelerate 1.15, `use_dcp=False` (`fsdp_utils.py`)
    pytorch_model_fsdp_rank1.bin                                   accelerate, FSDP1's LOCAL_STATE_DICT
    checkpoint_rank_1.pt                                           scripts, and `--to torch` with a rule for dp
    pytorch_model_fsdp.bin, optimizer.bin                          accelerate, FULL_STATE_DICT
    model.safetensors or pytorch_model.bin, with optimizer.pt      Trainer of transformers; optimizer.bin: accelerate
    ckpt.pt, last.ckpt, ...                                        scripts, Lightning

>>> parse_rank_file("optim_world_size_4_rank_1.pt"), parse_rank_file("pytorch_model_fsdp_rank0.bin")
(RankFile(item='optimizer', rank=1, ranks=4), RankFile(item='model', rank=0, ranks=None))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ucp.contract.locating import Located, Strength, find_only, require_checkpoint
from ucp.contract.registry import is_owned_by_another
from ucp.errors import DestinationError, MissingFileError, UsageError, format_count, format_list
from ucp.io.folder import names_in
from ucp.io.provenance import read_mark

Item = Literal["model", "optimizer", "others", "all"]
"""What a file holds."""

NAME = "checkpoint.pt"
"""What `--to torch` writes."""

INDEX = "model.safetensors.index.json"
"""File that says which of several safetensors files holds which tensor."""

WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model_fsdp.bin")
"""Files of weights beside an optimizer; the first that exists is read."""
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")

_VERL = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")
_VERL_ITEMS: dict[str, Item] = {"model": "model", "optim": "optimizer", "extra_state": "others"}
_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)(?:_0)?_rank(\d+)\.bin")
_SCRIPT = re.compile(r"checkpoint_rank_?(\d+)\.pt")
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_COMPANIONS = re.compile(
    r"scheduler\.(?:pt|bin)|rng_state(?:_\d+)?\.pth|scaler\.pt|training_args\.bin|sampler.*\.bin|dl_state_dict.*\.bin"
    r"|custom_checkpoint_\d+\.pkl|meta\.pt|common\.pt|data\.pt"
    r"|pytorch_model(?:-\d+-of-\d+)?\.bin|adapter_model\.bin"
)
"""Files that trainers save beside a checkpoint (`scheduler.pt`, `rng_state_0.pth`, `data.pt`), and files of weights."""


class RankFile(NamedTuple):
    """A parsed name of a rank's file."""

    item: Item
    """What it holds."""
    rank: int
    """Rank that saved it."""
    ranks: int | None
    """Ranks of the run, if the name says it."""


def parse_rank_file(name: str) -> RankFile | None:
    """The parsed name of a file of one rank; None for other files."""
    if match := _VERL.fullmatch(name):
        return RankFile(_VERL_ITEMS[match[1]], int(match[3]), int(match[2]))
    if match := _ACCELERATE.fullmatch(name):
        return RankFile("optimizer" if match[1] == "optimizer" else "model", int(match[2]), None)
    match = _SCRIPT.fullmatch(name)
    return None if match is None else RankFile("all", int(match[1]), None)


def _is_part_of_folder(name: str) -> bool:
    """Whether a file cannot be read by itself; a script's file of one rank can."""
    file = parse_rank_file(name)
    return file is not None and file.item != "all"


def name_of_rank(name: str, rank: int) -> str:
    """Name of the same file of another rank.

    >>> name_of_rank("optim_world_size_4_rank_1.pt", 3)
    'optim_world_size_4_rank_3.pt'
    """
    return re.sub(r"(rank_?)\d+\.", rf"\g<1>{rank}.", name)


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """Files of a checkpoint."""

    files: Mapping[Item, Mapping[int, str]]
    """Names of the files by item and rank; the rank is 0 for a file of all ranks."""
    ranks: int = 1
    """Ranks with files."""


def locate(path: Path) -> Located[SavedFiles] | None:
    """The checkpoint at `path`, or None if there is none."""
    if path.is_file():
        if _is_part_of_folder(path.name):
            return _rank_files(path.parent, [path.name])
        return _by_suffix(path, [path.name]) if _is_candidate(path.name) else None
    return (_look(path) or find_only(path, (_look_for_ranks,))) if path.is_dir() else None


def _look(path: Path) -> Located[SavedFiles] | None:
    """The checkpoint that the folder `path` itself is."""
    if (located := _look_for_ranks(path)) is not None:
        return located
    names = sorted(name for name in names_in(path) if (path / name).is_file())
    weights = next((name for name in WEIGHTS if name in names), None)
    optimizer = next((name for name in OPTIMIZERS if name in names), None)
    files: dict[Item, Mapping[int, str]] = {}
    if weights is not None and optimizer is not None:
        files = {"model": {0: weights}, "optimizer": {0: optimizer}}
    elif weights == "pytorch_model_fsdp.bin":
        files = {"model": {0: weights}}
    elif NAME in names and _is_written_by_target(path):
        files = {"all": {0: NAME}}
    if files:
        reasons = tuple(name for by_rank in files.values() for name in by_rank.values())
        return Located(root=path, content=SavedFiles(files), reasons=reasons)
    candidates = [name for name in names if _is_candidate(name) and not name.endswith(".bin")]
    return _by_suffix(path, candidates) if candidates not in ([], [optimizer]) else None


def _is_written_by_target(path: Path) -> bool:
    """Whether a conversion to the target torch marked the folder as its own; False for a damaged mark."""
    try:
        return read_mark(path).target == "torch"
    except DestinationError:
        return False


def _is_candidate(name: str) -> bool:
    """Whether a file may hold a whole checkpoint, by its name."""
    return name.endswith(_SUFFIXES) and _COMPANIONS.fullmatch(name) is None and not is_owned_by_another(name, "torch")


def _by_suffix(path: Path, names: list[str]) -> Located[SavedFiles]:
    """The file of `names`, if it is the only one; else the choice between them."""
    choices = tuple(names) if len(names) > 1 else ()
    content = SavedFiles({} if choices else {"all": {0: names[0]}})
    return Located(root=path, content=content, choices=choices, reasons=tuple(names), strength=Strength.SUFFIX)


def _look_for_ranks(path: Path) -> Located[SavedFiles] | None:
    files = {name: file for name in sorted(names_in(path)) if (file := parse_rank_file(name)) is not None}
    return _rank_files(path, files) if any(file.item in ("model", "all") for file in files.values()) else None


def _rank_files(path: Path, names: Iterable[str]) -> Located[SavedFiles]:
    files: dict[Item, dict[int, str]] = {}
    by_name = {name: file for name in names if (file := parse_rank_file(name)) is not None}
    for name, file in by_name.items():
        files.setdefault(file.item, {})[file.rank] = name
    ranks = max(max(file.rank + 1, file.ranks or 0) for file in by_name.values())
    globs = dict.fromkeys(name.replace(f"{file.rank}.", "*.") for name, file in by_name.items())
    return Located(root=path, content=SavedFiles(files, ranks), reasons=tuple(globs)[:4])


def check_files(located: Located[SavedFiles] | None, path: Path) -> Located[SavedFiles]:
    """`located`, if it is complete.

    Raises UnknownFormatError, UsageError, MissingFileError naming the files of all ranks that have none.
    """
    located = require_checkpoint(located, path, "a checkpoint saved by torch.save", "none is there")
    if path.is_file() and _is_part_of_folder(path.name):
        raise UsageError(f"{path} is the file of one rank; pass the folder with the files of all ranks: {path.parent}")
    files, ranks = located.content.files.values(), located.content.ranks
    rank_files = (parse_rank_file(name) for by_rank in files for name in by_rank.values())
    sizes = sorted({file.ranks for file in rank_files if file is not None and file.ranks is not None})
    if len(sizes) > 1:
        raise UsageError(
            f"{located.root} holds files of runs of {' and '.join(map(str, sizes))} ranks: move the files of "
            "all runs but one elsewhere"
        )
    missing = [
        name_of_rank(next(iter(by_rank.values())), rank)
        for by_rank in files
        for rank in range(ranks)
        if rank not in by_rank
    ]
    if missing:
        raise MissingFileError(
            f"expected a file of each of {format_count(ranks, 'rank')} in {located.root}; "
            f"{format_count(len(missing), 'file is', 'files are')} not there:\n{format_list(missing)}\nCopy them from "
            "where the run saved them: every node keeps the files of its own ranks"
        )
    return located


def is_of_the_format(path: Path) -> bool:
    """Whether an entry of a checkpoint's folder is part of the checkpoint itself."""
    name = path.name
    return parse_rank_file(name) is not None or name in (*WEIGHTS, *OPTIMIZERS, "fsdp_config.json")
