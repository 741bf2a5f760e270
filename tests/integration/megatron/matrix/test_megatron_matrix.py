"""The Megatron matrix: what real megatron-core wrote at one layout, it loads at another after `ucp convert`.

Oracle 1: the same state written by Megatron at two layouts is read as the same atoms, bit for bit. Oracle 2: what is
converted to a layout, Megatron loads there, and its ranks then hold what the ranks of a run of that layout held. Oracle
3: masters, cast to the type of the model, are the weights. All sources are made here (megatron_cases.py).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ucp
from tests.integration.matrix_page import write_section
from tests.integration.megatron.matrix.megatron_matrix import (
    MAKER,
    SOURCES,
    TIED,
    Cell,
    Reading,
    cells,
    convert_all,
    judge_sources,
    names_to_make,
)
from tests.integration.megatron.matrix.megatron_tables import loads_table, readings_table, refused_table
from tests.integration.megatron.megatron_jobs import FIXTURES, Load, Loaded, load_all, make_sources
from ucp.errors import MissingStateError, TopologyError

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1500)]

CELLS = cells()
SHIFTED = "gpt-tp2-pp2-dp2-full"
"""A source with the states that Megatron writes shifted."""

REFUSED = {
    ("gpt-dp4-dp", "tp=3"): "tp=3 does not divide num_attention_heads=4",
    ("llama-tp2-dp2-dp", "pp=3"): "3 stages of 1 chunk do not divide 4",
    ("llama-tp2-dp2-dp", "pp=4,vpp=2"): "4 stages of 2 chunks do not divide 4",
    ("gpt-dp4-dp", "ep=4,dp=4"): "ep=4, but the model has no experts",
    ("mixtral-ep4-dp4-full", "ep=3,dp=3"): "ep=3 does not divide 4",
}
"""A kept source and a target at which Megatron would not start -> the reason that is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the whole run found."""

    made: Path
    """folder of the sources"""
    readings: tuple[Reading, ...]
    loaded: Mapping[str, Loaded]
    """name of the cell -> outcome; what `ucp` refused is an error"""
    refused: Mapping[tuple[str, str], str]
    """source and topology -> the line of the message that gives the reason"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Make, read, convert, load, and write the page."""
    made, root = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("converted")
    make_sources(names_to_make(), made, release=MAKER)
    refused = convert_all(CELLS, made, root)
    loads: list[Load] = [cell.load(root, made) for cell in CELLS if cell.name not in refused]
    loaded = {name: Loaded(error=said) for name, said in refused.items()} | load_all(loads, root / "results")
    outcome = Found(made=made, readings=judge_sources(made), loaded=loaded, refused=_refused(root))
    write_section("megatron", _section(outcome))
    return outcome


def _refused(root: Path) -> dict[tuple[str, str], str]:
    """Ask for what cannot be."""
    said = {}
    for number, ((name, topology), reason) in enumerate(REFUSED.items()):
        source = FIXTURES / "megatron" / name / "checkpoint"
        try:
            ucp.convert(source, root / f"refused-{number}", to="megatron", topology=topology, workers=1)
        except TopologyError as error:
            lines = [line.strip() for line in str(error).splitlines() if reason in line]
            said[name, topology] = lines[0] if lines else str(error)
    return said


def _section(outcome: Found) -> str:
    exact = [own for own in outcome.loaded.values() if own.exact]
    return _SECTION.format(
        versions=f"torch {torch.__version__}, Python {platform.python_version()}, on CPU with gloo",
        maker=MAKER,
        readings=readings_table(outcome.readings),
        loads=loads_table(CELLS, outcome.loaded),
        refused=refused_table(outcome.refused),
        count=len(exact),
        of=len(CELLS),
        tensors=f"{sum(own.tensors for own in exact):,}",
    )


def _reading_id(name: str) -> str:
    return name


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_megatron_holds_at_the_target_what_it_holds_there(cell: Cell, found: Found) -> None:
    """Oracle 2: every weight, master and moment, whole, bit for bit, and the step."""
    loaded = found.loaded[cell.name]
    assert not loaded.error
    assert loaded.tensors >= 100
    assert loaded.differences == ()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.case("all"))
def test_atoms_are_the_same_from_every_layout_and_kind_of_file(source, found: Found) -> None:
    """Oracle 1, and equal to what the ranks held. What Megatron writes wrongly is one parameter, and is never taken."""
    for reading in _readings(found, source):
        assert len(reading.others) >= 2
        assert reading.states >= 100
        for name, changes in reading.others.items():
            wrongly = source.is_written_wrongly(reading.kind) or source.is_written_wrongly(name)
            assert {change.param for change in changes} == ({TIED} if wrongly else set()), changes
        held = {key.rpartition("/")[0] for key in reading.not_held}
        assert held == ({TIED} if source.is_written_wrongly(reading.kind) else set())


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.case("all"))
def test_masters_round_to_the_weights(source, found: Found) -> None:
    """Oracle 3: by torch against what the models held, and by `ucp` against what stands in the files."""
    for reading in _readings(found, source):
        if not source.is_written_wrongly(reading.kind):
            assert reading.rounded >= 27
            assert reading.not_rounded == ()
            assert reading.drifted == ()


def test_limit_what_megatron_writes_shifted_is_refused(found: Found, tmp_path: Path) -> None:
    """If this fails, megatron-core writes the states of a tied embedding rightly now: drop the note of the source."""
    with pytest.raises(MissingStateError, match=TIED):
        ucp.convert(found.made / SHIFTED / "checkpoint", tmp_path / "out", to="megatron", topology="tp=1", workers=1)


@pytest.mark.parametrize(("name", "topology"), REFUSED, ids=lambda own: own)
def test_a_layout_that_megatron_does_not_run_is_refused(name: str, topology: str, found: Found) -> None:
    assert REFUSED[name, topology] in found.refused.get((name, topology), "nothing: it was written")


def _readings(found: Found, source) -> list[Reading]:
    own = [reading for reading in found.readings if reading.source == source]
    assert len(own) == 3
    return own


_SECTION = """## Megatron

Sources: models that real megatron-core {maker} trained and saved at each layout, in three kinds of files: torch_dist
with a `fully_reshardable` and with a `dp_reshardable` optimizer, and legacy files with `distrib_optim.pt`. All use the
distributed optimizer. {versions}.
Four pipeline stages of two chunks need eight layers; the other models have four.

### Oracles 1 and 3: what is read

Megatron saved the same state at every layout, so `ucp` must read the same atoms from all of these checkpoints. A
cell is the number of comparisons x the number of states in each (names, shapes, values and groups of weights,
moments and steps). No state differed.

| column | compares |
|---|---|
| its three kinds | the three kinds of files of this layout with one another |
| TP1, TP2 DP4 | each kind with the checkpoint of the same kind that Megatron wrote at that layout |
| the ranks | each kind with what the ranks held when they saved it |
| masters round to weights | masters, cast by torch, with the weights that the models held and with those in the files |

{readings}

### Oracle 2: what is loaded

`ucp convert --to megatron` wrote each source for each target, and real Megatron loaded it into a job with other
weights. "exact" means that after the load the ranks held the same as the ranks of a run that trained at that
layout: model weights, masters and both moments bit for bit, and the step. That is so for {count} of {of} loads,
{tensors} tensors in all. A cell stands for three loads:

| from | written as | loaded by |
|---|---|---|
| torch_dist, `dp_reshardable` | torch_dist | megatron-core 0.16.1 |
| legacy | torch_dist | megatron-core 0.19.2 |
| torch_dist, `fully_reshardable` | legacy | megatron-core 0.15.3 |

{loads}

[1] If stages share an embedding, megatron-core 0.16.1 saves wrong optimizer states of it in `fully_reshardable`
files ([why](megatron.md#states-that-megatron-saves-wrongly)). `ucp` leaves these states out, and does not write an
optimizer without them. So here the legacy files are made from legacy files.

[2] megatron-core 0.15.3 runs expert and tensor parallelism together only with sequence parallelism, which the models
of this page do not use. So here 0.16.1 loads the legacy files.

### Refused

Megatron does not start at these layouts, so `ucp` refuses them and writes nothing:

{refused}
"""
