"""Conversions to Megatron, in this process and on one worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ucp.api import convert
from ucp.conversion.convert import ConvertReport


@pytest.fixture
def to_megatron() -> Callable[..., ConvertReport]:
    """`to_megatron(src, dst, "tp=2", "torch", name=value, ...)`: modules are megatron-core's own unless told."""

    def run(src: Path, dst: Path, topology: str, layout: str = "", **options: object) -> ConvertReport:
        settings = {"transformer_impl": "local", **{key: str(value) for key, value in options.items()}}
        return convert(src, dst, to="megatron", topology=topology, layout=layout, settings=settings, workers=1)

    return run
