"""Local numbers of layers and experts."""

from __future__ import annotations

import pytest
from ucp_formats.megatron.legacy.model import count_layers, to_global_name

from ucp.errors import MalformedError


def names(count: int, stack: str = "decoder") -> list[str]:
    return [f"{stack}.layers.{number}.norm.weight" for number in range(count)]


def test_encoder_and_decoder_are_counted_apart() -> None:
    first_layers = count_layers({(0, 0): names(2, "encoder"), (1, 0): names(3)}, num_layers=2)
    assert (
        to_global_name("decoder.layers.0.norm.weight", (1, 0), first_layers, first_expert=0)
        == "decoder.layers.0.norm.weight"
    )


def test_a_wrong_count_is_told_by_chunk() -> None:
    with pytest.raises(MalformedError, match=r"(?s) 5 layers.* 4 in decoder.*\n  stage 1, chunk 0: 3 layers"):
        count_layers({(0, 0): names(1), (1, 0): names(3)}, num_layers=5)


def test_a_gap_is_refused() -> None:
    with pytest.raises(MalformedError, match=r"decoder\.layers\.1"):
        count_layers({(0, 0): [names(3)[0], names(3)[2]]}, num_layers=3)
