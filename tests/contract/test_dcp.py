"""The contracts of formats and targets, for checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

from ucp_formats.torch.source import DcpFormat

from ucp.conversion.options import make_options
from ucp.testing import FormatContract, TargetContract

KEPT = Path(__file__).parents[2] / "fixtures"
SAVED = sorted(path.parent for path in (KEPT / "torch").glob("*/checkpoint/.metadata"))


class TestDcpFormat(FormatContract):
    def make(self):
        return DcpFormat()

    def paths(self, folder):
        return SAVED[::2]


class TestDcpTarget(TargetContract):
    def cases(self, folder):
        ours = KEPT / "torch" / "fsdp2-dp4" / "checkpoint"
        zero = KEPT / "deepspeed" / "z3-dp4-fp32" / "checkpoint"
        return [
            (ours, make_options(to="dcp", topology="dp=3")),
            (zero, make_options(to="dcp", topology="dp=2", settings={"style": "flattened"})),
            (zero, make_options(to="dcp", settings={"style": "torchtitan"}, dtypes={"weight": "bfloat16"})),
        ]
