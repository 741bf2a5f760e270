"""Which folder holds the checkpoint, and what lies in it; from names alone.

A user may pass the save folder (with its `latest`), a tag folder, or the `checkpoint-N/` of a Hugging Face Trainer,
which is a save folder too. Other files of the save folder (`ucp.contract.companions`) belong to the tag that
`latest` names, or to the only one. A tag folder is native when it has files of the grammar
(`ucp_formats.deepspeed.names`), and universal when it has a folder `zero/`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ucp.contract.companions import with_companions
from ucp.contract.locating import Located, Pointer, find_only, follow_pointers, look_at, the_checkpoint
from ucp.contract.output_names import is_text
from ucp.core.index import TAG, Extra, Index
from ucp.errors import SourceError
from ucp.io.folder import absolute, names_in, names_of_folder, path_of
from ucp_formats.deepspeed.names import LATEST, LATEST_UNIVERSAL, UNIVERSAL, FileName, Role, parse_name

__all__ = ["TagFolder", "list_folder", "locate_tag", "saved_as", "the_folder"]

_EXAMPLE = "mp_rank_00_model_states.pt"
_LATEST, _LATEST_UNIVERSAL = Pointer(LATEST), Pointer(LATEST_UNIVERSAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TagFolder:
    """Entries of a tag folder."""

    path: Path
    """The folder, absolute."""
    files: tuple[FileName, ...]
    """Files of the grammar, by name; a split file once."""
    entries: frozenset[str]
    """Names of everything in it."""
    strays: tuple[str, ...]
    """Names that are not part of the grammar, sorted."""


def locate_tag(path: Path, *, universal: bool) -> Located[bool] | None:
    """The native or `universal` tag folder that `path` is or leads to; None if there is none, or one of the other kind.

    Where both are there, the one that a pointer names is meant, and the native one before the universal one.
    """
    if not path.is_dir():
        return None
    kinds = ((_look_native, (_LATEST,)), (_look_universal, (_LATEST_UNIVERSAL, _LATEST)))
    found = (look_at(path, *kind) or follow_pointers(path, *kind) for kind in kinds)
    located = next(filter(None, found), None)
    located = located or find_only(path, (_look_native, _look_universal), (_LATEST, _LATEST_UNIVERSAL))
    return located if located is not None and located.content is universal else None


def the_folder(located: Located[bool] | None, path: Path) -> Located[bool]:
    """The tag folder found. Raises UnknownFormatError when there is none, UsageError when there are several."""
    example = (
        f"a folder with {LATEST!r}, or a tag folder such as global_step100 with files like mp_rank_00_model_states.pt"
    )
    return the_checkpoint(located, path, "a DeepSpeed checkpoint", example, f"file {LATEST!r}")


def saved_as(index: Index, located: Located[bool]) -> Index:
    """`index` of the tag folder found, with its tag and with what lies beside it as extras."""
    root = path_of(absolute(located.root))
    folder = root.parent if located.saved_in is None else path_of(absolute(located.saved_in.path))
    name = root.relative_to(folder)
    tag = (Extra(name=TAG, value=str(name)),) if is_text(str(name)) else ()

    def is_own(path: Path) -> bool:
        is_named = path.name in (LATEST, LATEST_UNIVERSAL, *name.parts[:1])
        return is_named or _look_native(path) is not None or _look_universal(path) is not None

    return with_companions(replace(index, extras=(*index.extras, *tag)), located.saved_in, is_own=is_own)


def list_folder(path: Path) -> TagFolder:
    """What lies in a tag folder. Raises SourceError when it cannot be listed."""
    try:
        entries = sorted(names_of_folder(path))
    except OSError as error:
        raise SourceError(f"cannot list {path}: {error.strerror}") from error
    parsed = {entry: parse_name(entry) for entry in entries}
    files = {file.name: file for file in parsed.values() if file is not None}
    strays = tuple(entry for entry, file in parsed.items() if file is None)
    ordered = sorted(files.values(), key=lambda file: (file.role.name, file.mp, file.dp, file.name))
    return TagFolder(path=path.absolute(), files=tuple(ordered), entries=frozenset(entries), strays=strays)


def _look_native(path: Path) -> Located[bool] | None:
    samples: dict[Role, str] = {}
    for file in filter(None, map(parse_name, sorted(names_in(path)))):
        samples.setdefault(file.role, file.name)
    if not samples or _look_universal(path) is not None:
        return None
    return Located(root=path, content=False, reasons=(", ".join(samples.values()),))


def _look_universal(path: Path) -> Located[bool] | None:
    """A folder `zero/` with a folder of `fp32.pt` in it."""
    zero = path / UNIVERSAL
    if not zero.is_dir():
        return None
    if not any(name == "optimizer_state.pt" or (zero / name / "fp32.pt").is_file() for name in names_in(zero)):
        return None
    return Located(root=path, content=True, reasons=(f"folder {UNIVERSAL}/ of parameters",))
