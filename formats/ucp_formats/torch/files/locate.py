"""Which files make up a checkpoint that was saved by `torch.save`, from names alone.

1. A file of every rank (verl, accelerate); verl keeps them in `actor/` or `critic/` of `global_step_N/`.
2. Weights and an optimizer in a folder (Trainer, accelerate).
3. One file with everything in it: the path itself, the only such file of a folder, or `checkpoint.pt` where `ucp`
   wrote it. The first two are told by their suffix alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ucp.contract.protocols import Strength
from ucp.errors import DestinationError, MissingFileError, UnknownFormatError, UsageError, counted, listed
from ucp.io.destination.mark import read_mark
from ucp.io.folder import names_in
from ucp_formats.torch.files.names import (
    NAME,
    OPTIMIZERS,
    WEIGHTS,
    Item,
    RankFile,
    is_beside,
    is_of_another_framework,
    is_torch_file,
    item_of_rank,
    name_of_rank,
)

__all__ = ["Located", "is_of_the_format", "locate", "the_files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What a path resolves to."""

    root: Path
    """Folder of the checkpoint, or its one file."""
    files: Mapping[Item, Mapping[int, str]]
    """What is in it: item to rank to name of the file; of what no rank saved for itself, rank 0."""
    ranks: int = 1
    """Ranks that files are of."""
    choices: tuple[str, ...] = ()
    """Folders or files to choose from, where there are several."""
    reasons: tuple[str, ...] = ()
    """What was seen."""
    strength: Strength = Strength.MARKER
    """How sure it is that this is a checkpoint."""

    @property
    def folder(self) -> Path:
        """Folder that the files lie in."""
        return self.root if self.root.is_dir() else self.root.parent


def locate(path: Path) -> Located | None:
    """The checkpoint at `path`, or None if there is none."""
    if path.is_file():
        if item_of_rank(path.name) is not None:
            return _of_ranks(path.parent, [path.name])
        return _by_suffix(path, [path.name]) if _is_candidate(path.name) else None
    if not path.is_dir():
        return None
    if (found_here := _seen(path)) is not None:
        return found_here
    below = {name: own for name in sorted(names_in(path)) if (own := _ranks_in(path / name)) is not None}
    if len(below) == 1:
        ((name, own),) = below.items()
        return Located(root=own.root, files=own.files, ranks=own.ranks, reasons=(name, *own.reasons))
    return Located(root=path, files={}, choices=tuple(below), reasons=tuple(below)) if below else None


def _seen(path: Path) -> Located | None:
    """The checkpoint that the folder `path` itself is."""
    if (of_ranks := _ranks_in(path)) is not None:
        return of_ranks
    names = sorted(name for name in names_in(path) if (path / name).is_file())
    weights = next((name for name in WEIGHTS if name in names), None)
    optimizer = next((name for name in OPTIMIZERS if name in names), None)
    if weights is not None and optimizer is not None:
        return Located(
            root=path, files={"model": {0: weights}, "optimizer": {0: optimizer}}, reasons=(weights, optimizer)
        )
    if weights == "pytorch_model_fsdp.bin":
        return Located(root=path, files={"model": {0: weights}}, reasons=(weights,))
    if NAME in names and _is_written_by_target(path):
        return Located(root=path, files={"all": {0: NAME}}, reasons=(NAME,))
    candidates = [name for name in names if _is_candidate(name) and not name.endswith(".bin")]
    return _by_suffix(path, candidates) if candidates not in ([], [optimizer]) else None


def _is_written_by_target(path: Path) -> bool:
    """Whether a conversion says that it wrote the folder for the target torch; a damaged mark says nothing."""
    try:
        return read_mark(path).get("target") == "torch"
    except DestinationError:
        return False


def _is_candidate(name: str) -> bool:
    """Whether a file may hold a whole checkpoint, by its name."""
    return is_torch_file(name) and not is_beside(name) and not is_of_another_framework(name)


def _by_suffix(path: Path, names: list[str]) -> Located:
    """The one file of `names` at `path`, or the choice between several."""
    if len(names) > 1:
        return Located(root=path, files={}, choices=tuple(names), reasons=tuple(names), strength=Strength.SUFFIX)
    return Located(root=path, files={"all": {0: names[0]}}, reasons=tuple(names), strength=Strength.SUFFIX)


def _ranks_in(path: Path) -> Located | None:
    names = [name for name in sorted(names_in(path)) if item_of_rank(name) is not None] if path.is_dir() else []
    return _of_ranks(path, names) if any("model" in name for name in names) else None


def _of_ranks(path: Path, names: Iterable[str]) -> Located:
    files: dict[Item, dict[int, str]] = {}
    every = dict(_rank_files(names))
    for name, own in every.items():
        files.setdefault(own.item, {})[own.rank] = name
    said = {own.ranks for own in every.values() if own.ranks is not None}
    ranks = max([*said, *(own.rank + 1 for own in every.values())])
    globs = dict.fromkeys(name.replace(f"{own.rank}.", "*.") for name, own in every.items())
    return Located(root=path, files=files, ranks=ranks, reasons=tuple(globs)[:4])


def _rank_files(names: Iterable[str]) -> Iterator[tuple[str, RankFile]]:
    for name in names:
        own = item_of_rank(name)
        assert own is not None  # chosen by it
        yield name, own


def the_files(located: Located | None, path: Path) -> Located:
    """The checkpoint found. Raises UnknownFormatError, UsageError, MissingFileError naming all ranks without a file."""
    if located is None:
        raise UnknownFormatError(f"expected a checkpoint saved by torch.save at {path}; none is there")
    if located.choices:
        what = "file of torch.save" if located.strength is Strength.SUFFIX else "checkpoint"
        raise UsageError(
            f"{path} holds {counted(len(located.choices), what)}; pass one of them:\n"
            f"{listed(str(path / name) for name in located.choices)}"
        )
    if path.is_file() and item_of_rank(path.name) is not None:
        raise UsageError(f"{path} is the file of one rank; pass the folder that holds those of all: {path.parent}")
    _check_ranks(located)
    return located


def _check_ranks(located: Located) -> None:
    names = [name for own in located.files.values() for name in own.values()]
    said = sorted({own.ranks for _, own in _rank_files(filter(item_of_rank, names)) if own.ranks is not None})
    if len(said) > 1:
        raise UsageError(
            f"{located.root} holds files of runs of {' and '.join(map(str, said))} ranks: move those of all but one "
            "elsewhere"
        )
    missing = [
        name_of_rank(next(iter(own.values())), rank)
        for own in located.files.values()
        for rank in range(located.ranks)
        if rank not in own
    ]
    if missing:
        raise MissingFileError(
            f"expected a file of each of {counted(located.ranks, 'rank')} in {located.root}; "
            f"{counted(len(missing), 'file is', 'files are')} not there:\n{listed(missing)}\nCopy them from where the "
            "run saved them: every node keeps its own"
        )


def is_of_the_format(path: Path) -> bool:
    """Whether an entry of a checkpoint's folder is part of the checkpoint itself."""
    name = path.name
    return item_of_rank(name) is not None or name in (*WEIGHTS, *OPTIMIZERS, "fsdp_config.json")
