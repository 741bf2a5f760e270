"""The suite of `ucp.testing` for formats, on a run that this file saves."""

import json
from pathlib import Path

import numpy as np
from npy_format import NpyFormat

from ucp.testing import FormatContract

WEIGHTS = {
    "embed.weight": np.arange(24, dtype="float32").reshape(6, 4),
    "head.bias": np.arange(5, dtype="float16"),
}


def save_run(run: Path) -> Path:
    """A run of two ranks that saved one step."""
    step = run / "step-100"
    for rank in range(2):
        (step / f"rank-{rank}").mkdir(parents=True)
        for name, array in WEIGHTS.items():
            np.save(step / f"rank-{rank}" / f"{name}.npy", np.array_split(array, 2)[rank])
    params = {name: {"dim": 0} for name in WEIGHTS}
    (step / "index.json").write_text(json.dumps({"step": 100, "ranks": 2, "params": params}))
    (run / "latest").write_text("step-100")
    return run


class TestNpyFormat(FormatContract):
    """Every shard is covered, truncated files raise errors, reading twice gives the same, and nothing is changed."""

    def make(self) -> NpyFormat:
        """The format under test."""
        return NpyFormat()

    def paths(self, folder: Path) -> list[Path]:
        """Checkpoints to try it on."""
        return [save_run(folder)]
