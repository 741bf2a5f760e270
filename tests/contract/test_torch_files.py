"""The contracts of formats and targets, for files of plain torch.save."""

from __future__ import annotations

from pathlib import Path

from ucp_formats.torch.files.source import TorchFormat

from ucp.conversion.options import make_options
from ucp.testing import FormatContract, TargetContract

KEPT = Path(__file__).parents[2] / "fixtures"
WAYS = ("verl-fsdp2-dp2-tp2", "verl-fsdp1-dp4", "fsdp2-dp2-full", "lightning")


class TestTorchFormat(FormatContract):
    def make(self):
        return TorchFormat()

    def paths(self, folder):
        return [KEPT / "torch" / way / "checkpoint" for way in WAYS]


class TestTorchTarget(TargetContract):
    def cases(self, folder):
        ours = KEPT / "torch" / "verl-fsdp2-dp4" / "checkpoint"
        zero = KEPT / "deepspeed" / "z3-dp4-fp32" / "checkpoint"
        return [
            (ours, make_options(to="torch")),
            (zero, make_options(to="torch", dtypes={"weight": "bfloat16"})),
        ]
