"""Format `deepspeed`: native checkpoints, recognised by file names; `read/index` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ucp.contract.locating import Evidence
from ucp.contract.protocols import Format, SourceOptions
from ucp.contract.run_extras import LR_SCHEDULER, LossScale, RunExtras
from ucp.core.index import Index
from ucp_formats.deepspeed.names import add_save_folder, locate_tag, parse_name, require_folder


def _scale(index: Index) -> LossScale | None:
    from ucp_formats.deepspeed.config import deepspeed_scale

    return deepspeed_scale(index)


RUN = RunExtras(scheduler=LR_SCHEDULER, scale=_scale, client="client_state")
"""Values other than tensors with which a DeepSpeed run resumes, in both formats."""


class DeepSpeedFormat(Format):
    """Format `deepspeed`.

    `group_names`: the parameter names of each optimizer group, in its order; only for checkpoints without ZeRO whose
    optimizer does not record them (the error then asks for them). `options`: the model family whose rules state how
    tensor-parallel ranks split parameters, for checkpoints that do not record it.
    """

    name = "deepspeed"
    pickles = frozenset(
        {
            "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.zero.config.ZeroStageEnum",
            "deepspeed.utils.tensor_fragment.fragment_address",
        }
    )

    run = RUN

    def __init__(
        self, group_names: Sequence[Sequence[str]] | None = None, options: SourceOptions | None = None
    ) -> None:
        self._group_names = group_names
        self._options = options or SourceOptions()

    def configured(self, options: SourceOptions) -> DeepSpeedFormat:
        """The format with these options."""
        return DeepSpeedFormat(self._group_names, options)

    def detect(self, path: Path) -> Evidence | None:
        """Whether `path` is, or leads to, a native tag folder."""
        located = locate_tag(path, universal=False)
        return None if located is None else located.evidence

    def owns(self, name: str) -> bool:
        """Whether DeepSpeed gives this name to a file of a tag folder."""
        return parse_name(name) is not None

    def read(self, path: Path) -> Index:
        """Index of the checkpoint at `path`."""
        from ucp_formats.deepspeed.read.index import read_native

        located = require_folder(locate_tag(path, universal=False), path)
        index = read_native(located, self.name, group_names=self._group_names, options=self._options)
        return add_save_folder(index, located)
