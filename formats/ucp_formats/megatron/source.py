"""Format `megatron`: checkpoints of Megatron-LM, and of frameworks built on megatron-core.

A user may pass the save folder (with its tracker), an iteration folder, or the folder of one rank. File names, the
tracker and metadata.json suffice to find the checkpoint and to see how it was saved; only then the reader is imported.
The kind of an iteration folder is decided in Megatron's order (checkpointing.py: _get_checkpoint_format):
metadata.json, then folders of ranks, then the .metadata of torch.distributed.checkpoint.

metadata.json names the backend of megatron-core that wrote an iteration folder (core/dist_checkpointing/core.py):

| written by | text |
|---|---|
| core 0.3 to 0.18 | {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", ...} |
| core 0.19 on | {"sharded_backend": "torch_dist", "sharded_backend_version": 1} |

Without it Megatron assumes torch.distributed.checkpoint (torch_dcp), which also has a .metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ucp.contract import locating
from ucp.contract.locating import Evidence, Located, Pointer, require_checkpoint
from ucp.contract.protocols import Format, SourceOptions
from ucp.contract.run_extras import LossScale, RunExtras
from ucp.contract.sidecars import attach_sidecars
from ucp.core.index import Index
from ucp.errors import MalformedError, MissingFileError, SourceError, UnsupportedError
from ucp.io.folder import exists, names_in, read_short_text
from ucp_formats.megatron.names import (
    COMMON,
    DCP_METADATA,
    DISTRIBUTED_OPTIMIZER,
    METADATA,
    MODEL,
    RELEASE,
    TRACKER,
    SavedAs,
    parse_iteration,
    parse_rank_folder,
)

_INNER = ("", "weights", "model_weights")
"""Folders in an iteration folder that may hold the checkpoint: libraries built on megatron-core nest it."""
_MOST_BYTES = 1 << 20
_VERSION = 1
"""The only version of any backend so far; megatron-core up to 0.18 refuses others (strategies/base.py)."""
_COMMON_STATE = "common_state/"
_SHOWN = 40


_TRACKER = Pointer(
    TRACKER,
    lambda text: text if text == RELEASE else f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else None,
    is_binding=False,
)


def locate(path: Path) -> Located[SavedAs] | None:
    """Where the checkpoint at `path` is, or None if there is none."""
    located = locating.locate(path, _look, (_TRACKER,)) if path.is_dir() else None
    if located is None or located.choices or located.saved_in is None or located.saved_in.path != path:
        return located
    if _TRACKER.read(path) is not None or not exists(path / TRACKER):
        return located
    text = read_short_text(path / TRACKER, most_bytes=_MOST_BYTES)
    shown = "no short text" if text is None else f"{text!r}" if text else "nothing"
    note = (
        f"{TRACKER} holds {shown}, which is no iteration: {located.root.name} was read, because it is the only one "
        "there. Megatron fails on such a file. There may have been a later iteration"
    )
    return replace(located, notes=(note,))


def require_folder(located: Located[SavedAs] | None, path: Path) -> Located[SavedAs]:
    """The iteration folder that `locate` found at `path`.

    Raises UnknownFormatError if there is none, MalformedError if the tracker names one that does not exist, and
    UsageError if there are several.
    """
    example = (
        f"a folder with {TRACKER}, or an iteration folder such as iter_0001000 with {METADATA} or folders like "
        "mp_rank_00"
    )
    return require_checkpoint(located, path, "a Megatron checkpoint", example, TRACKER)


def is_of_the_format(path: Path) -> bool:
    """Whether an entry of a save folder is an iteration or the tracker."""
    return path.name == TRACKER or parse_iteration(path.name) is not None


def _look(path: Path) -> Located[SavedAs] | None:
    """The iteration folder: `path` itself, a folder in it, or its parent if `path` is the folder of one rank."""
    if parse_rank_folder(path.name) is not None and (path / MODEL).is_file():
        return Located(root=path.parent, content=SavedAs.TORCH, reasons=(f"{path.name}, the folder of a rank",))
    return next(filter(None, (_look_at_iteration(path / name if name else path) for name in _INNER)), None)


def _look_at_iteration(path: Path) -> Located[SavedAs] | None:
    backend = _read_backend(path)
    if backend.get("sharded_backend") in (SavedAs.TORCH_DIST, SavedAs.ZARR):
        saved_as = SavedAs(str(backend["sharded_backend"]))
        return Located(root=path, content=saved_as, reasons=(f"{METADATA} of {saved_as}",))
    ranks = sorted(
        name for name in names_in(path) if parse_rank_folder(name) is not None and (path / name / MODEL).is_file()
    )
    if ranks:
        reason = f"{len(ranks)} folders such as {ranks[0]}" if len(ranks) > 1 else f"folder {ranks[0]}"
        return Located(root=path, content=SavedAs.TORCH, reasons=(reason,))
    if parse_iteration(path.name) is not None and (path / DCP_METADATA).is_file():
        context = f"beside a {METADATA} that names no backend" if exists(path / METADATA) else f"without {METADATA}"
        return Located(root=path, content=SavedAs.TORCH_DCP, reasons=(f"{DCP_METADATA} {context}",))
    return None


def _read_backend(folder: Path) -> Mapping[str, object]:
    """Contents of metadata.json in `folder`; empty if there is none, if it is damaged, or if it names no backend."""
    try:
        values = json.loads(read_short_text(folder / METADATA, most_bytes=_MOST_BYTES) or "")
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) and isinstance(values.get("sharded_backend"), str) else {}


def _refusal(folder: Path, saved_as: SavedAs) -> SourceError | None:
    """Why a folder is refused: another version of torch_dist, or a torch_dist folder without its METADATA."""
    file, backend = folder / METADATA, _read_backend(folder)
    if saved_as is SavedAs.TORCH_DIST:
        version = backend.get("sharded_backend_version", _VERSION)
        if version == _VERSION:
            return None
        return UnsupportedError(
            f"expected version {_VERSION} of {saved_as} in {file}, which megatron-core up to 0.19 writes; "
            f"got {str(version)[:_SHOWN]!r}. If the file is damaged, copy it again; if a later megatron-core wrote it, "
            "save the checkpoint with 0.19 or earlier"
        )
    remedy = "Copy the file again, or from another checkpoint of the run: it is the same in all of them"
    wanted = f'expected the backend that wrote the folder, as in {{"sharded_backend": "torch_dist"}}, in {file}'
    if backend:
        shown = str(backend["sharded_backend"])[:_SHOWN]
        return UnsupportedError(f"{wanted}; got {shown!r}, which ucp does not know. {remedy}")
    if exists(file):  # folders of torch_dcp have neither this file nor a common state
        text = read_short_text(file, most_bytes=_MOST_BYTES) if file.is_file() else None
        shown = "no short text" if text is None else repr(text[:_SHOWN]) if text else "nothing"
        return MalformedError(f"{wanted}; got {shown}: the file is damaged. {remedy}")
    is_torch_dist = exists(folder / COMMON)
    if not is_torch_dist:
        from ucp.io.dcp.metadata import read_metadata

        with suppress(SourceError):
            objects = read_metadata(str(folder / DCP_METADATA)).objects
            is_torch_dist = any(key.startswith(_COMMON_STATE) for key in objects)
    if is_torch_dist:
        return MissingFileError(
            f"{wanted}; the file is missing, although the rest of a torch_dist checkpoint is there. {remedy}"
        )
    return None


_REMEDIES = {
    SavedAs.ZARR: (
        "a zarr checkpoint of megatron-core (up to 0.15)",
        "Load it with megatron-core 0.15 or earlier and save it with --ckpt-format torch_dist",
    ),
    SavedAs.TORCH_DCP: (
        "a checkpoint of torch.distributed.checkpoint, saved as torch_dcp or by Megatron-FSDP (fsdp_dtensor)",
        "Load it in the job that wrote it and save it with --ckpt-format torch_dist",
    ),
}


def read_loss_scale(index: Index) -> LossScale | None:
    """The dynamic loss scale of DynamicGradScaler (core/optimizer/grad_scaler.py); None for a fixed one."""
    state = find_grad_scaler(index)
    if not isinstance(state, dict) or not {"scale", "growth_tracker"} <= state.keys():
        return None
    return LossScale(found_in="optimizer", scale=state["scale"], growth_tracker=state["growth_tracker"])


def find_grad_scaler(index: Index) -> object:
    """State of the gradient scaler of fp16; None if the source has none."""
    for extra in index.extras:
        if extra.name.startswith("optimizer/") and "grad_scaler" in extra.name.split("/"):
            return extra.value
        if extra.name == "optimizer" and isinstance(extra.value, dict):
            for optimizer in (extra.value, *extra.value.values()):  # one optimizer, or several by number
                if isinstance(optimizer, dict) and optimizer.get("grad_scaler"):
                    return optimizer["grad_scaler"]
    return None


class MegatronFormat(Format):
    """Format `megatron`."""

    name = "megatron"
    pickles = frozenset(
        {
            "megatron.core.enums.ModelType",
            "megatron.core.rerun_state_machine.RerunDiagnostic",
            "megatron.core.rerun_state_machine.RerunMode",
            "megatron.core.rerun_state_machine.RerunState",
            "megatron.core.transformer.enums.AttnBackend",
            "megatron.core.transformer.enums.AttnMaskType",
            "megatron.core.transformer.enums.AttnType",
            "megatron.core.transformer.enums.CudaGraphScope",
            "megatron.core.transformer.enums.LayerType",
            "megatron.core.transformer.enums.ModelType",
        }
    )

    run = RunExtras(
        scheduler="opt_param_scheduler",
        scale=read_loss_scale,
        places=re.compile(r"(?P<name>rng_state)/pp(?P<pp>\d+)\.tp(?P<tp>\d+)(?:\.ep(?P<ep>\d+))?"),
    )

    def __init__(self, options: SourceOptions | None = None) -> None:
        self._options = options or SourceOptions()

    def configured(self, options: SourceOptions) -> MegatronFormat:
        """The same format with these options, which may name the model family."""
        return MegatronFormat(options)

    def detect(self, path: Path) -> Evidence | None:
        """Whether `path` is, or leads to, an iteration folder of Megatron."""
        located = locate(path)
        return None if located is None else located.evidence

    def owns(self, name: str) -> bool:
        """Whether this is the name of a file of one rank, or metadata.json."""
        return name in (MODEL, DISTRIBUTED_OPTIMIZER, METADATA)

    def read(self, path: Path) -> Index:
        """Index of the checkpoint at `path`."""
        located = require_folder(locate(path), path)
        return attach_sidecars(self._read(located), located.saved_in, is_own=is_of_the_format)

    def _read(self, located: Located[SavedAs]) -> Index:
        refusal = None
        if located.content in (SavedAs.TORCH_DIST, SavedAs.TORCH_DCP):
            refusal = _refusal(located.root, located.content)
        if refusal is not None:
            raise refusal
        if located.content is SavedAs.TORCH_DIST:
            from ucp_formats.megatron.torch_dist.source import read_dist

            return read_dist(located, self.name, self._options)
        if located.content is SavedAs.TORCH:
            from ucp_formats.megatron.legacy.source import read_legacy

            return read_legacy(located, self.name, self._options)
        what, remedy = _REMEDIES[located.content]
        raise UnsupportedError(f"{located.root} is {what}, which ucp does not read. {remedy}")
