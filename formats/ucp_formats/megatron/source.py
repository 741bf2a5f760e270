"""Checkpoints of Megatron-LM and of what is built on megatron-core, whichever way they were saved.

They are told by names alone; the readers are imported by what needs them.
"""

from __future__ import annotations

import re
from pathlib import Path

from ucp.contract.companions import with_companions
from ucp.contract.locating import Located
from ucp.contract.protocols import Evidence, Format, SourceOptions
from ucp.contract.run_extras import LossScale, RunExtras
from ucp.core.index import Index
from ucp.errors import UnsupportedError
from ucp_formats.megatron.locate import (
    SavedAs,
    is_of_the_format,
    locate,
    lost_backend,
    the_folder,
    unknown_version,
)
from ucp_formats.megatron.names import DISTRIBUTED_OPTIMIZER, METADATA, MODEL, MODEL_APART

__all__ = ["MegatronFormat"]

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


def _scale(index: Index) -> LossScale | None:
    from ucp_formats.megatron.extras import megatron_scale

    return megatron_scale(index)


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
        scale=_scale,
        places=re.compile(r"(?P<name>rng_state)/pp(?P<pp>\d+)\.tp(?P<tp>\d+)(?:\.ep(?P<ep>\d+))?"),
    )

    def __init__(self, options: SourceOptions | None = None) -> None:
        self._options = options or SourceOptions()

    def configured(self, options: SourceOptions) -> MegatronFormat:
        """The same format, with the family that `options` name."""
        return MegatronFormat(options)

    def detect(self, path: Path) -> Evidence | None:
        """Whether `path` is, or leads to, an iteration folder of Megatron."""
        located = locate(path)
        return None if located is None else located.evidence

    def owns(self, name: str) -> bool:
        """Whether it is a file of a rank, or says how an iteration was saved."""
        return name in (MODEL, MODEL_APART, DISTRIBUTED_OPTIMIZER, METADATA)

    def read(self, path: Path) -> Index:
        """Index of the checkpoint at `path`."""
        located = the_folder(locate(path), path)
        return with_companions(self._read(located), located.saved_in, is_own=is_of_the_format)

    def _read(self, located: Located[SavedAs]) -> Index:
        if located.content is SavedAs.TORCH_DIST:
            refused = unknown_version(located.root)
            if refused is not None:
                raise refused
            from ucp_formats.megatron.torch_dist.source import read_dist

            return read_dist(located, self.name, self._options)
        if located.content is SavedAs.TORCH:
            from ucp_formats.megatron.legacy.source import read_legacy

            return read_legacy(located, self.name, self._options)
        lost = lost_backend(located.root) if located.content is SavedAs.TORCH_DCP else None
        if lost is not None:
            raise lost
        what, remedy = _REMEDIES[located.content]
        raise UnsupportedError(f"{located.root} is {what}, which is not read here. {remedy}")
