"""Which rank saved what, against a simulation of the ranks, and on real files that were swapped."""

from __future__ import annotations

import re
import shutil
from itertools import product
from pathlib import Path

import pytest
from ucp_formats.megatron.arguments import Arguments
from ucp_formats.megatron.legacy.files import Grid, find_misplaced, rank_placing
from ucp_formats.megatron.names import parse_rank_folder
from ucp_formats.megatron.source import MegatronFormat

from ucp.errors import MalformedError

FIXTURES = Path(__file__).parents[5] / "fixtures" / "megatron"
DENSE = list(product((1, 2, 4), (1, 2), (1, 3), (1, 2, 3)))
"""tp, cp, dp, pp."""


@pytest.mark.parametrize("inner", [False, True])
def test_dense_ranks(inner: bool) -> None:
    """parallel_state.py: order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp; the first of them fastest."""
    for tp, cp, dp, pp in DENSE:
        arguments = Arguments(raw={"use_tp_pp_dp_mapping": inner}, cp=cp, dp=dp, world=tp * cp * dp * pp)
        numbering = rank_placing(Grid(tp=tp, pp=pp, ep=1, etp=tp), arguments)
        assert numbering is not None
        outer = product(range(dp), range(pp)) if inner else product(range(pp), range(dp))
        stages = [pair[1] if inner else pair[0] for pair in outer]
        order = [(t, stage) for stage in stages for _ in range(cp) for t in range(tp)]
        assert [(rank.tp, rank.pp) for rank in map(numbering, range(len(order)))] == order, (tp, cp, dp, pp)


@pytest.mark.parametrize(("tp", "etp", "ep", "copies"), [(2, 1, 2, 2), (2, 2, 2, 1), (1, 1, 4, 1), (4, 2, 4, 2)])
def test_ranks_of_experts(tp: int, etp: int, ep: int, copies: int) -> None:
    """The same ranks, numbered as etp-ep-dp-pp."""
    world = etp * ep * copies * 2
    numbering = rank_placing(Grid(tp=tp, pp=2, ep=ep, etp=etp), Arguments(raw={}, world=world))
    assert numbering is not None
    order = [(p, e) for p in range(2) for _ in range(copies) for e in range(ep) for _ in range(etp)]
    assert [(own.pp, own.ep) for own in map(numbering, range(world))] == order


@pytest.mark.parametrize(
    "arguments",
    [
        Arguments(raw={}),
        Arguments(raw={}, world=6),
        Arguments(raw={}, world=8, dp=1),
        Arguments(raw={}, world=8, cp=4),
        Arguments(raw={"encoder_tensor_model_parallel_size": 2}, world=8),
    ],
)
def test_a_numbering_that_is_not_certain_is_none(arguments: Arguments) -> None:
    assert rank_placing(Grid(tp=2, pp=2, ep=1, etp=2), arguments) is None


def test_expert_ranks_beside_context_ranks_were_numbered_otherwise_before_etp() -> None:
    """core 0.8 parallel_state.py: one RankGenerator, expert ranks above those of context; later ones record etp."""
    grid = Grid(tp=1, pp=1, ep=2, etp=1)
    assert rank_placing(grid, Arguments(raw={}, world=4, cp=2)) is None
    assert rank_placing(grid, Arguments(raw={}, world=4, cp=2, etp=1)) is not None


@pytest.mark.parametrize("ranks", [[0, 0], [0, None], [1, 7], [1, True]])
def test_records_that_prove_nothing(ranks: list[object]) -> None:
    """All the same: a tool wrote them in one process. None, or none of this world: not those of the writers."""
    folders = tuple(parse_rank_folder(name) for name in ("mp_rank_00", "mp_rank_01"))
    named = {folder.name: rank for folder, rank in zip(folders, ranks, strict=True)}
    assert not list(find_misplaced(Grid(tp=2, pp=1, ep=1, etp=2), folders, Arguments(raw={}, world=2), named))


SWAPPED = [
    ("llama-tp2-pp2-dp2-torch-zero", "mp_rank_00_000", "mp_rank_00_001"),
    ("gpt-tp2-pp2-torch", "mp_rank_00_001", "mp_rank_01_000"),
    ("qwen-tp4-torch-zero", "mp_rank_01", "mp_rank_03"),
    ("llama-pp2-vpp2-dp2-torch-zero", "mp_rank_00_000", "mp_rank_00_001"),
    ("mixtral-tp2-ep2-etp1-torch-zero", "mp_rank_00_000", "mp_rank_01_001"),
    ("deepseek-tp2-ep2-dp2-torch-zero", "mp_rank_00_000", "mp_rank_00_001"),
    ("mixtral-ep2-dp2-torch", "mp_rank_00_000", "mp_rank_00_001"),
]


@pytest.mark.parametrize(("case", "one", "other"), SWAPPED)
def test_swapped_folders_of_real_runs(case: str, one: str, other: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / case / "checkpoint", tmp_path / "c")
    there = tmp_path / "c" / "iter_0000010"
    (there / one).rename(there / "aside")
    (there / other).rename(there / one)
    (there / "aside").rename(there / other)
    with pytest.raises(MalformedError, match="2 problems") as caught:
        MegatronFormat().read(tmp_path / "c")
    for place, home in ((one, other), (other, one)):
        assert re.search(rf"\n  {place}: .* {home}\b", str(caught.value))
