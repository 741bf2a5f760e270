"""Format `deepspeed-universal`: recognised by file names; `universal/index` reads it."""

from __future__ import annotations

from pathlib import Path

from ucp.contract.locating import Evidence
from ucp.contract.protocols import Format, SourceOptions
from ucp.core.index import Index
from ucp_formats.deepspeed.names import add_save_folder, locate_tag, require_folder
from ucp_formats.deepspeed.read.source import RUN


class DeepSpeedUniversalFormat(Format):
    """Format `deepspeed-universal`."""

    name = "deepspeed-universal"
    run = RUN

    def __init__(self, options: SourceOptions | None = None) -> None:
        self._options = options or SourceOptions()

    def configured(self, options: SourceOptions) -> DeepSpeedUniversalFormat:
        """The format with these options."""
        return DeepSpeedUniversalFormat(options)

    def detect(self, path: Path) -> Evidence | None:
        """Whether `path` is, or leads to, a tag folder with `zero/`."""
        located = locate_tag(path, universal=True)
        return None if located is None else located.evidence

    def read(self, path: Path) -> Index:
        """Index of the checkpoint at `path`."""
        from ucp_formats.deepspeed.read.universal.index import read_universal

        located = require_folder(locate_tag(path, universal=True), path)
        return add_save_folder(read_universal(located, self.name, self._options), located)
