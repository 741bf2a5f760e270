"""DeepSpeed's own functions for placements of experts agree with ours: what they accept, and the pieces they make."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make integration` installs it")

from deepspeed.checkpoint import autoep_affine as affine
from hypothesis import given
from hypothesis import strategies as st
from ucp_formats.deepspeed.placement import read_affine_map, write_affine_map

from tests.property.formats.test_expert_placement import held_by_rank
from ucp.placement.descriptor import ExpertPlacement

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

FIXTURES = Path(__file__).resolve().parents[4] / "fixtures"
ANY = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=4)


@given(st.one_of(held_by_rank(), held_by_rank(), ANY), st.lists(st.integers(1, 3), max_size=2))
def test_the_same_placements_are_accepted_and_give_the_same_pieces(
    ranks: Sequence[tuple[int, ...]], rest: list[int]
) -> None:
    count = 1 + max(chain(*ranks), default=0)
    record = ExpertPlacement.of(ranks, num_experts=count)
    try:
        theirs = affine.make_autoep_placement_descriptor(count, ranks)
    except ValueError:
        assert record.problem
        return
    assert record.problem == ""
    assert record.to_document() == theirs
    shape = (count, *rest)
    pieces = affine.autoep_placement_to_affine_map(theirs, shape).to_dict()
    assert write_affine_map(record.experts_by_rank, shape) == pieces
    assert read_affine_map(pieces, "x") == tuple(ranks)
    assert sorted(set(chain(*ranks))) == list(range(count))


def test_its_converter_reads_our_rewritten_runs(tmp_path: Path) -> None:
    """The script rewrites them, and compares what DeepSpeed's converter makes of them with that of the real run."""
    script = FIXTURES / "make" / "deepspeed" / "place_experts.py"
    spec = importlib.util.spec_from_file_location("place_experts", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(FIXTURES / "deepspeed", tmp_path)
    assert len(list(tmp_path.glob("*-placed/checkpoint"))) == len(module.PLACED) == 4
