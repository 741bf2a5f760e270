"""The contract of targets, for models of Hugging Face: sources that hold no more than these do."""

from __future__ import annotations

from pathlib import Path

from ucp.api import convert
from ucp.conversion.options import make_options
from ucp.testing import TargetContract

KEPT = Path(__file__).parents[2] / "fixtures" / "huggingface"


class TestHuggingFaceTarget(TargetContract):
    def cases(self, folder):
        llama, mixtral = KEPT / "llama" / "model", KEPT / "mixtral" / "model"
        convert(llama, folder / "atoms", workers=1)
        convert(mixtral, folder / "dcp", to="dcp", topology="dp=3", workers=1)
        config = {"config": str(mixtral)}
        return [
            (llama, make_options(to="huggingface", settings={"max_shard_size": "4KB"})),
            (folder / "atoms", make_options(to="huggingface", dtypes={"weight": "float16"})),
            (folder / "dcp", make_options(to="huggingface", settings=config)),
        ]
