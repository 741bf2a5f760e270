"""The diagonal of the matrix of `load_into`, without a framework: kept checkpoints into the reference model.

Checkpoints of real megatron-core, each into hand-written models of the layout that it was saved at, of another, and of
one process. Ranks are threads, and nothing is trained: what they hold must be, bit for bit, the slices of what
`ucp.open` reads. The whole matrix, of real processes that train on, is tests/integration/live/matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ucp
from tests.integration.live.matrix.megatron_names import separated
from tests.integration.live.reference.grid import Grid
from tests.integration.live.reference.model import Share, Style
from tests.integration.live.reference.rank_model import RankModel
from tests.integration.live.reference.run import named_groups
from tests.integration.live.reference.sizes import Sizes
from tests.unit.live.threads import ThreadRanks, run

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "megatron"
LLAMA = Sizes(layers=4, ffn=28, hidden=20, vocabulary=64)
MIXTRAL = Sizes(layers=4, ffn=12, hidden=16, head_dim=2, vocabulary=64, experts=4)
"""As the kept checkpoints have them (fixtures/make/megatron/megatron_cases.py)."""
MARKED, PLAIN = Style(local=True, marked=True), Style()
DIAGONAL = [
    ("llama-tp2-pp2-dp2-full", LLAMA, "tp2 pp2 dp2", MARKED),
    ("llama-tp2-pp2-dp2-torch-zero", LLAMA, "tp4", PLAIN),
    ("llama-pp2-vpp2-dp2-torch-zero", LLAMA, "pp2 vpp2 dp2", MARKED),
    ("llama-tp2-torch-fused", LLAMA, "tp2", PLAIN),
    ("llama-tp2-dp2-dp", LLAMA, "tp1", PLAIN),
    ("mixtral-ep4-dp4-full", MIXTRAL, "ep4 dp4", MARKED),
    ("mixtral-tp2-ep2-etp1-torch-zero", MIXTRAL, "tp2 dp2 ep2", MARKED),
    ("mixtral-ep2-dp2-torch", MIXTRAL, "tp2", PLAIN),
]
STATES = ("weight", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Seat:
    """Stands for a process group of a rank."""

    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


def share_of(grid: Grid, rank: int) -> Share:
    at = grid.at(rank)
    tp = Seat(at.tp, grid.tp) if grid.tp > 1 else None
    return Share(tp=tp, ep=Seat(at.dp % grid.ep, grid.ep) if grid.ep > 1 else None)


def read(folder: Path, sizes: Sizes) -> dict[str, dict[str, Tensor]]:
    """State to name of Hugging Face to the whole tensor."""
    checkpoint = ucp.open(folder)
    atoms = checkpoint.atoms
    return {state: separated({name: checkpoint.read(name, state) for name in atoms}, sizes) for state in STATES}


@pytest.mark.parametrize(
    ("case", "sizes", "layout", "style"), DIAGONAL, ids=[f"{own[0]}-into-{own[2]}" for own in DIAGONAL]
)
def test_every_rank_holds_its_slices(case: str, sizes: Sizes, layout: str, style: Style) -> None:
    folder, grid = FIXTURES / case / "checkpoint", Grid.parse(layout)
    whole = read(folder, sizes)

    def load(ranks: ThreadRanks) -> int:
        part = RankModel(sizes, grid, ranks.rank, share_of(grid, ranks.rank), style=style, seed="another ")
        optimizer = torch.optim.AdamW(named_groups([(own.name, own.param) for own in part.held]), lr=1.0)
        ucp.load_into(part.model, grid.topology, folder, optimizer=optimizer, process_group=ranks)
        for own in part.held:
            held = {"weight": own.param.detach(), **optimizer.state[own.param]}
            assert held["step"] == 10
            for state in STATES:
                assert torch.equal(held[state], part.cut(own.name, whole[state])), (ranks.rank, own.name, state)
        return len(part.held)

    counts = run(grid.world, load)
    assert all(isinstance(own, int) and own > 0 for own in counts), counts
