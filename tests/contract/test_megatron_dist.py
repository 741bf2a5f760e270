"""The contract of formats, for torch_dist checkpoints of Megatron in every layout of the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from ucp_formats.megatron.source import MegatronFormat

from ucp.testing import FormatContract

ROOT = Path(__file__).parents[2] / "fixtures" / "megatron"
KEPT = (
    "gpt-tp2-pp2-plain",
    "llama-tp2-dp2-dp-fused-buckets",
    "llama-tp2-dp2-full-0.19.2",
    "llama-tp2-dp2-gathered-0.13.1",
    "llama-tp2-dp2-modelspace-0.13.1",
    "mamba-tp2-dp2-full",
    "mixtral-ep2-dp2-full-singleton",
    "mixtral-tp2-ep2-etp1-dp",
)


class TestMegatronFormat(FormatContract):
    def make(self):
        return MegatronFormat()

    def paths(self, folder):
        found = [ROOT / name / "checkpoint" for name in KEPT if (ROOT / name).is_dir()]
        if not found:
            pytest.skip("no torch_dist fixtures here; make them with fixtures/make_megatron.py")
        return found
