"""The contract of formats, for torch_dist checkpoints of Megatron in every layout of the optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ucp_formats.megatron.source import MegatronFormat

from ucp.testing import FormatContract

ROOT = Path(__file__).parents[2] / "fixtures" / "megatron"
KEPT = sorted(p.parent for p in ROOT.glob("*/case.json") if json.loads(p.read_text())["format"] == "torch_dist")


@pytest.mark.skipif(not KEPT, reason="the fixtures are made by fixtures/make/megatron/make_megatron.py --kept --keep")
class TestMegatronFormat(FormatContract):
    def make(self):
        return MegatronFormat()

    def paths(self, folder):
        return [case / "checkpoint" for case in KEPT[::3]]
