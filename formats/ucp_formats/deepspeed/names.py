"""File names of a checkpoint: what each file of a tag folder holds, and how the tag folder is found.

The names are those of runtime/engine.py and pipe/module.py (0.19.8). `dp` is the rank in the group over which ZeRO
partitions (the "pp" in a file name means partition-parallel), `mp` the model-parallel rank. Numbers have a minimum
width only, so they are parsed and never compared as text.

| role | example |
|---|---|
| MODEL | mp_rank_00_model_states.pt |
| SHARDED_MODEL | zero_pp_rank_3_mp_rank_00_model_states.pt |
| OPTIMIZER | bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt, zero_pp_rank_3_mp_rank_00optim_states.pt (old) |
| LAYER | layer_02-model_01-model_states.pt, layer_02-model_states.pt |
| EXPERT | layer_0_expert_3_mp_rank_00_model_states.pt, expert_3_mp_rank_00_model_states.pt (old) |
| EXPERT_OPTIMIZER | expp_rank_1_mp_rank_00_optim_states.pt |

FastPersist can split any of them by bytes into `NAME-0.4` to `NAME-3.4`
(runtime/model_checkpointing/writer_factory.py).

A user may pass the save folder (with its `latest`), a tag folder, or the `checkpoint-N/` of a Hugging Face Trainer,
which is a save folder too. A tag folder is native when it has files with these names, and universal when it has a
folder `zero/`. Other files of the save folder (`ucp.contract.sidecars`) are attributed to the tag that `latest` names,
or to the only tag.

>>> name = parse_name("bf16_zero_pp_rank_103_mp_rank_00_optim_states.pt-1.4")
>>> name.role, name.dp, name.prefix
(<Role.OPTIMIZER: 'optimizer states'>, 103, 'bf16_')
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ucp.contract.locating import Located, Pointer, find_only, follow_pointers, look_at, require_checkpoint
from ucp.contract.output_names import is_text
from ucp.contract.sidecars import attach_sidecars
from ucp.core.index import TAG, Extra, Index
from ucp.errors import SourceError
from ucp.io.folder import names_in, names_of_folder, path_of, to_absolute

LATEST = "latest"
"""Text file beside the tag folders: the tag to load."""
LATEST_UNIVERSAL = "latest_universal"
"""Text file beside the tag folders: the universal tag to load."""
UNIVERSAL = "zero"
"""Folder in a tag folder that makes it a universal checkpoint: one folder per parameter."""
OFFLOADED = "offloaded_tensors"
"""Folder in a tag folder with optimizer states that were on NVMe."""


class Role(StrEnum):
    """What a file holds."""

    MODEL = "model states"
    SHARDED_MODEL = "model states of one rank"
    OPTIMIZER = "optimizer states"
    LAYER = "pipeline layer"
    EXPERT = "expert"
    EXPERT_OPTIMIZER = "optimizer states of experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """A parsed file name."""

    role: Role
    """What the file holds."""
    name: str
    """The name, without the suffix of a file that FastPersist split."""
    dp: int = 0
    """Rank in the partition group; 0 if the name has none."""
    mp: int = 0
    """Model-parallel rank; 0 if the name has none."""
    prefix: str = ""
    """"bf16_", "fp16_" or nothing."""
    layer: int = -1
    """Layer of a pipeline, or mixture-of-experts layer of an expert; -1 if the name has none."""
    expert: int = 0
    """Global number of an expert; for optimizer states of experts, the expert-parallel rank."""
    axes: tuple[tuple[str, int], ...] = ()
    """Axes in the name of a pipeline layer's file, such as ("model", 1): each with the rank on it."""

    @property
    def tp(self) -> int:
        """Tensor-parallel rank of a pipeline layer."""
        return dict(self.axes).get("model", 0)

    @property
    def label(self) -> str:
        """Description of the file for messages, for example "optimizer states of rank 3"."""
        ranked = self.role in (Role.SHARDED_MODEL, Role.OPTIMIZER)
        suffix = f", model-parallel rank {self.mp}" if self.mp else ""
        match self.role:
            case Role.LAYER:
                return f"{self.role.value} {self.layer}{f', tensor-parallel rank {self.tp}' if self.tp else ''}"
            case Role.EXPERT:
                return f"{self.role.value} {self.expert} of layer {max(self.layer, 0)}{suffix}"
            case Role.EXPERT_OPTIMIZER:
                return f"{self.role.value}, expert-parallel rank {self.expert}{suffix}"
        contents = self.role.value.removesuffix(" of one rank")
        return f"{contents} of rank {self.dp}{suffix}" if ranked else f"{contents}{suffix}"


_AXIS = re.compile(r"-([a-z]+)_(\d+)")
_PART = re.compile(r"-\d+\.\d+\Z")
_FORMS = (
    (Role.MODEL, re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")),
    (Role.SHARDED_MODEL, re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")),
    (
        Role.OPTIMIZER,
        re.compile(r"(?P<prefix>bf16_|fp16_|)zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"),
    ),
    (Role.LAYER, re.compile(r"layer_(?P<layer>\d+)(?P<axes>(-[a-z]+_\d+)*)-model_states\.pt")),
    (
        Role.EXPERT,
        re.compile(r"(layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    ),
    (Role.EXPERT_OPTIMIZER, re.compile(r"expp_rank_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")),
)


def parse_name(name: str) -> FileName | None:
    """The parsed name; None for a name that DeepSpeed does not use. The parts of a split file all have its name."""
    full_name = _PART.sub("", name)
    for role, form in _FORMS:
        match = form.fullmatch(full_name)
        if match:
            fields = match.groupdict()
            return FileName(
                role=role,
                name=full_name,
                dp=int(fields.get("dp") or 0),
                mp=int(fields.get("mp") or 0),
                prefix=fields.get("prefix") or "",
                layer=int(fields.get("layer") or -1),
                expert=int(fields.get("expert") or 0),
                axes=tuple((axis, int(rank)) for axis, rank in _AXIS.findall(fields.get("axes") or "")),
            )
    return None


_LATEST, _LATEST_UNIVERSAL = Pointer(LATEST), Pointer(LATEST_UNIVERSAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TagFolder:
    """Entries of a tag folder."""

    path: Path
    """The folder, absolute."""
    files: tuple[FileName, ...]
    """Files with known names; a split file is listed once."""
    entries: frozenset[str]
    """Names of all entries."""
    strays: tuple[str, ...]
    """Unknown names, sorted."""


def locate_tag(path: Path, *, universal: bool) -> Located[bool] | None:
    """The tag folder that `path` is or leads to; None if there is none, or if it is not of the wanted kind.

    `universal`: the wanted kind, native or universal. A folder that a pointer such as `latest` names comes before one
    that is merely the only candidate; among folders that pointers name, a native one comes before a universal one.
    """
    if not path.is_dir():
        return None
    kinds = ((_look_native, (_LATEST,)), (_look_universal, (_LATEST_UNIVERSAL, _LATEST)))
    candidates = (look_at(path, *kind) or follow_pointers(path, *kind) for kind in kinds)
    located = next(filter(None, candidates), None)
    located = located or find_only(path, (_look_native, _look_universal), (_LATEST, _LATEST_UNIVERSAL))
    return located if located is not None and located.content is universal else None


def require_folder(located: Located[bool] | None, path: Path) -> Located[bool]:
    """The located tag folder. Raises UnknownFormatError when there is none, UsageError when there are several."""
    example = (
        f"a folder with {LATEST!r}, or a tag folder such as global_step100 with files like mp_rank_00_model_states.pt"
    )
    return require_checkpoint(located, path, "a DeepSpeed checkpoint", example, f"file {LATEST!r}")


def add_save_folder(index: Index, located: Located[bool]) -> Index:
    """`index`, with the tag and the other files of the save folder added as extras."""
    root = path_of(to_absolute(located.root))
    folder = root.parent if located.saved_in is None else path_of(to_absolute(located.saved_in.path))
    name = root.relative_to(folder)
    tag = (Extra(name=TAG, value=str(name)),) if is_text(str(name)) else ()

    def is_own(path: Path) -> bool:
        is_named = path.name in (LATEST, LATEST_UNIVERSAL, *name.parts[:1])
        return is_named or _look_native(path) is not None or _look_universal(path) is not None

    return attach_sidecars(replace(index, extras=(*index.extras, *tag)), located.saved_in, is_own=is_own)


def list_folder(path: Path) -> TagFolder:
    """Entries of a tag folder. Raises SourceError when it cannot be listed."""
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
    """A tag folder whose `zero/` has `optimizer_state.pt`, or the folder of a parameter with `fp32.pt`."""
    zero = path / UNIVERSAL
    if not zero.is_dir():
        return None
    if not any(name == "optimizer_state.pt" or (zero / name / "fp32.pt").is_file() for name in names_in(zero)):
        return None
    return Located(root=path, content=True, reasons=(f"folder {UNIVERSAL}/ of parameters",))
