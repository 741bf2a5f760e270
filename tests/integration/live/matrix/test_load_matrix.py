"""The matrix of `ucp.load_into`: bitwise equal states in every cell, and losses that go on unbroken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.integration.live.matrix.load_matrix import SOURCES, STEPS, Outcome, Way, cells, load_all, make_sources
from tests.integration.live.matrix.load_page import write_page
from tests.integration.live.reference.sizes import DENSE, MOE

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1500)]

CELLS = cells()
FIRST = 5
"""Steps after the load in which nothing but the order of sums tells runs apart."""
AT_FIRST = 1e-6
"""Largest relative difference of a loss in these steps: eight units in the last place of fp32."""
ROUTED = 1e-4
"""In these steps of a model with a router: it may choose the other of two experts that are all but equal."""
AT_LAST = {"dense": 1e-5, "moe": 1e-3}
"""In all steps after the load."""
APART = {"dense": 1e-4, "moe": 1e-3}
"""Of runs of the frameworks from each other, over all steps from the first."""

Losses = Mapping[Way, Sequence[float]]
Outcomes = Mapping[tuple[Way, Way], Outcome]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Losses, Outcomes]:
    """Train all sources, load all cells, and write the page."""
    root = tmp_path_factory.mktemp("runs")
    losses = make_sources(root)
    outcomes = load_all(CELLS, root)
    sizes = {"dense": DENSE.layers, "moe": MOE.layers, "experts": MOE.experts}
    print(write_page(losses, outcomes, first=FIRST, sizes=sizes))
    return losses, outcomes


def _id(cell: tuple[Way, Way]) -> str:
    return f"{cell[0].name}-to-{cell[1].name}"


@pytest.mark.parametrize("cell", CELLS, ids=_id)
def test_ranks_hold_what_the_source_holds(cell: tuple[Way, Way], found: tuple[Losses, Outcomes]) -> None:
    outcome = found[1][cell]
    assert outcome.error == ""
    assert outcome.differing == []
    assert outcome.compared >= 200


@pytest.mark.parametrize("cell", CELLS, ids=_id)
def test_losses_are_those_of_the_run_that_was_never_stopped(
    cell: tuple[Way, Way], found: tuple[Losses, Outcomes]
) -> None:
    losses, outcomes = found
    gaps = outcomes[cell].gaps(losses[cell[0]])
    assert len(gaps) == STEPS
    model = cell[0].model
    assert max(gaps[:FIRST]) <= (AT_FIRST if model == "dense" else ROUTED)
    assert max(gaps) <= AT_LAST[model]


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_all_frameworks_train_the_same_model(model: str, found: tuple[Losses, Outcomes]) -> None:
    """Without this, losses that go on would say little: a run would be compared with itself alone."""
    runs = [losses for way, losses in found[0].items() if way.model == model]
    assert len(runs) == len([own for own in SOURCES if own.model == model])
    for at in zip(*runs, strict=True):
        assert max(at) / min(at) - 1 <= APART[model]
    assert runs[0][-1] < runs[0][0] - 1, "the model learns: a loss that stays proves nothing"
