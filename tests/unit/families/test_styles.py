"""The naming style of a source, found by its shapes where two styles store other elements under one name."""

from __future__ import annotations

from pathlib import Path

import pytest

import ucp

FIXTURES = Path(__file__).parents[3] / "fixtures"
GPT2 = FIXTURES / "huggingface" / "gpt2" / "model"


@pytest.mark.parametrize("style", ["huggingface", "nanogpt"])
def test_convert_takes_the_style_of_the_shapes(tmp_path: Path, style: str) -> None:
    named = tmp_path / style
    ucp.convert(GPT2, named, names=style, to="dcp", settings={"drop": "config", "num_attention_heads": 4})
    ucp.convert(named, tmp_path / "out", to="huggingface", settings={"config": str(GPT2), "num_attention_heads": 4})
    assert ucp.diff(GPT2, tmp_path / "out").equal
