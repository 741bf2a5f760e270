from __future__ import annotations

from pathlib import Path

from ucp_formats.deepspeed.read.source import DeepSpeedFormat
from ucp_formats.deepspeed.read.universal.source import DeepSpeedUniversalFormat

from ucp.conversion.options import ConvertOptions
from ucp.core.topology import Topology
from ucp.testing import FormatContract, TargetContract

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
KEPT = ("z0-fp32", "z1-dp4-bf16", "z2-dp2-client-state", "z2-dp4-fp32-roundrobin", "z3-dp3-uneven", "z3-dp4-subgroups")
PARALLEL = ("z0-pp2", "z1-pp2-dp2", "z1-ep2", "z1-tp2-dp2")


class TestDeepSpeedFormat(FormatContract):
    def make(self):
        return DeepSpeedFormat()

    def paths(self, folder):
        return [FIXTURES / name / "checkpoint" for name in (*KEPT, *PARALLEL)]


class TestDeepSpeedUniversalFormat(FormatContract):
    def make(self):
        return DeepSpeedUniversalFormat()

    def paths(self, folder):
        return [FIXTURES / name / "universal" for name in ("z1-dp4-fp32", "z1-pp2-dp2")]


class TestDeepSpeedUniversalTarget(TargetContract):
    def cases(self, folder):
        options = ConvertOptions(to="deepspeed-universal")
        return [(FIXTURES / name / "checkpoint", options) for name in ("z0-fp32", "z1-dp4-fp32", "z3-dp3-uneven")]


class TestDeepSpeedTarget(TargetContract):
    def cases(self, folder):
        cases = (
            ("z1-dp4-fp32", "dp=2,zero=1"),
            ("z1-dp4-fp32", "dp=4,zero=3"),
            ("z3-dp4-bf16", "dp=1,zero=0"),
            ("z3-dp4-bf16", "dp=3,zero=2"),
            ("z1-tp2-dp2", "dp=1,tp=4,zero=3"),
            ("z1-ep2", "dp=4,ep=4,zero=2"),
        )
        return [
            (FIXTURES / name / "checkpoint", ConvertOptions(to="deepspeed", topology=Topology.parse(text)))
            for name, text in cases
        ]
