"""Real DeepSpeed resumes from what `ucp convert` wrote: every source, every target, natively and universally.

Right after the load, weights, moments, steps and hyper-parameters are those of the source, bit for bit. The losses of
the next steps are those of the uninterrupted run: exactly, where number of ranks and stage are the same; else up to the
order in which floats are summed over ranks and flat buffers (`TOLERANCE`).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed; `make integration` installs it")

from tests.integration.resume_matrix import (
    Cell,
    Verdict,
    cells,
    convert_all,
    judge,
    load_all,
    table,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "resume-matrix.md"

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest relative difference of a loss. In fp32 a sum over ranks in another order differs by some 1e-7, which five
steps amplify; in bf16 by some 4e-3 (8 bits of mantissa), in gradients and in activations."""

CELLS = cells()


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Verdict]:
    """Convert everything, load everything, compare, and write the page."""
    root = tmp_path_factory.mktemp("destinations")
    results = tmp_path_factory.mktemp("results")
    convert_all(CELLS, root)
    load_all(CELLS, root, results)
    found = [judge(cell, results) for cell in CELLS]
    page = _page(found)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page)
    print(f"\n{page}")
    return {verdict.cell.name: verdict for verdict in found}


def _page(found: list[Verdict]) -> str:
    import deepspeed
    import torch

    versions = f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return _PAGE.format(
        versions=f"{versions}, on CPU with gloo",
        table=table(found),
        compared=sum(verdict.compared for verdict in found),
        fp32=TOLERANCE["fp32"],
        bf16=TOLERANCE["bf16"],
        cells=len(found),
    )


def _id(cell: Cell) -> str:
    return cell.name


MATRIX = [cell for cell in CELLS if cell.mended]
LOADABLE = [cell for cell in MATRIX if not (cell.universal and cell.target.stage == 0)]


@pytest.mark.parametrize("cell", LOADABLE, ids=_id)
def test_weights_and_moments_are_the_source_s_bit_for_bit(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    verdict = verdicts[cell.name]
    assert not verdict.error
    assert verdict.compared > 30
    assert not verdict.differing


@pytest.mark.parametrize("cell", LOADABLE, ids=_id)
def test_groups_steps_and_hyperparameters_are_the_source_s(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    verdict = verdicts[cell.name]
    allowed = _shares_a_rate(cell)
    assert [line for line in verdict.groups if not (allowed and ": lr " in line)] == []
    assert verdict.lrs_equal or allowed


def _shares_a_rate(cell: Cell) -> bool:
    """A limit of stage 3: under a schedule all groups have the first one's rate until the scheduler's next step."""
    return cell.universal and cell.target.stage == 3 and cell.source.scheduled


@pytest.mark.parametrize("cell", LOADABLE, ids=_id)
def test_training_goes_on_as_if_it_had_not_stopped(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    verdict = verdicts[cell.name]
    assert verdict.loss_gap <= TOLERANCE[cell.source.dtype]
    assert verdict.step_after == verdict.step_expected


@pytest.mark.parametrize("cell", [cell for cell in LOADABLE if not cell.universal], ids=_id)
def test_native_files_restore_frozen_parameters_and_buffers(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    assert not verdicts[cell.name].not_restored


@pytest.mark.parametrize("cell", [cell for cell in MATRIX if cell not in LOADABLE], ids=_id)
def test_limit_stage_0_loads_no_universal_checkpoint(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    """DeepSpeed looks for the optimizer in the model-states file, whatever was converted; if this fails, 0 can."""
    assert verdicts[cell.name].error


@pytest.mark.parametrize("cell", [cell for cell in LOADABLE if cell.universal], ids=_id)
def test_limit_a_universal_load_skips_the_module(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    """If this fails, DeepSpeed restores frozen parameters and buffers now: drop the note of the target."""
    assert "frozen.weight/module" in verdicts[cell.name].not_restored


def test_limit_stage_3_counts_a_shared_step_once_per_sub_group(verdicts: Mapping[str, Verdict]) -> None:
    """If this fails, DeepSpeed gives each sub-group its own step now: drop the note of the target."""
    (cell,) = (cell for cell in CELLS if not cell.mended)
    verdict = verdicts[cell.name]
    assert not verdict.differing
    assert verdict.step_after == verdict.step_before + 2 * (verdict.step_expected - verdict.step_before)


_PAGE = """# Resume matrix

Every source is a checkpoint that real DeepSpeed wrote (`fixtures/deepspeed/`). `ucp convert` wrote it for every target,
and real DeepSpeed loaded it into a model of another seed: {versions}. Made by `make integration`.

{table}

In every cell but "not by DeepSpeed", right after the load, **all weights and moments are those of the source, bit for
bit** ({compared} tensors compared over {cells} loads), and so are the steps and the hyper-parameters of each group. The
number is the largest relative difference of the next five losses from the uninterrupted run's: "exact" when there is
none. It comes from another order of adding floats over ranks and flat buffers, and must stay below {fp32:g} in fp32 and
{bf16:g} in bf16.

Limits that are DeepSpeed's, none of which native files have (`--to deepspeed`):

- Stage 0 loads no universal checkpoint: the engine looks for the optimizer in the model-states file.
- A universal load leaves frozen parameters and buffers as the model was built; here they were copied in afterwards.
- Stage 3 shares one step tensor between all sub-groups after a universal load, so that torch optimizers count it once
  for each. Here every state was given its own: `state["step"] = state["step"].clone()` for each state of the optimizer.
- Stage 3 would overwrite every group with the first group's hyper-parameters. Our universal files leave out those that
  differ, and each group keeps what the engine was configured with; under a schedule all take the learning rate of the
  first group, until the scheduler sets them after the first step.
"""
