"""The contract of formats, for models of Hugging Face."""

from __future__ import annotations

from pathlib import Path

from ucp_formats.huggingface.source import HuggingFaceFormat

from ucp.testing import FormatContract

KEPT = Path(__file__).parents[2] / "fixtures" / "huggingface"


class TestHuggingFaceFormat(FormatContract):
    def make(self):
        return HuggingFaceFormat()

    def paths(self, folder):
        return [*sorted(KEPT.glob("*/model")), KEPT / "llama" / "model" / "model.safetensors"]
