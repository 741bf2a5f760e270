"""Real DeepSpeed resumes from what `ucp convert` wrote: every source, every target, natively and universally.

Right after the load, weights, moments, steps and hyper-parameters are those of the source, bit for bit. The losses of
the next steps are those of the uninterrupted run, up to the order in which floats are summed over ranks and flat
buffers (`TOLERANCE`); where number of ranks and stage are the same, those of DeepSpeed resuming its own files, exactly.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make integration` installs it")

from tests.integration.deepspeed.resume.resume_matrix import (
    Cell,
    Verdict,
    cells,
    convert_all,
    judge,
    load_all,
    matrix_table,
    other_table,
)
from tests.integration.deepspeed.resume.resume_sources import SAME

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

PAGE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "resume-matrix.md"

TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 1e-3}
"""Largest relative difference of a loss. In fp32 a sum over ranks in another order differs by some 1e-7, which five
steps amplify, Muon's orthogonalisation most; with the 8 bits of bf16 and the 11 of fp16 by as much more."""

FP16_STAGE_0 = 0.15
"""The same between stage 0 and the others in fp16: stage 0 of 0.19.8 divides gradients by a loss scale with which it
never multiplied the loss (engine.backward scales for ZeRO optimizers only), and then does not clip."""

CELLS = cells()
MATRIX = [cell for cell in CELLS if cell.mended]
LOADABLE = [cell for cell in MATRIX if not cell.fails]


def _id(cell: Cell) -> str:
    return cell.name


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Verdict]:
    """Convert everything, load everything, compare, and write the page."""
    root = tmp_path_factory.mktemp("destinations")
    results = tmp_path_factory.mktemp("results")
    convert_all(CELLS, root)
    load_all(CELLS, root, results)
    found = [judge(cell, results) for cell in CELLS]
    page = _page([verdict for verdict in found if not verdict.cell.original])
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
        matrix=matrix_table(found),
        others=other_table(found),
        compared=sum(verdict.compared for verdict in found if not verdict.cell.fails),
        loads=sum(not verdict.cell.fails for verdict in found),
        tolerance=", ".join(f"{bound:g} in {dtype}" for dtype, bound in TOLERANCE.items()),
        stage_0=FP16_STAGE_0,
    )


@pytest.mark.parametrize("cell", LOADABLE, ids=_id)
def test_weights_and_moments_are_the_source_s_bit_for_bit(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    verdict = verdicts[cell.name]
    assert not verdict.error
    assert verdict.compared >= 40
    assert not verdict.differing


@pytest.mark.parametrize("cell", LOADABLE, ids=_id)
def test_steps_hyperparameters_and_client_state_are_the_source_s(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    verdict = verdicts[cell.name]
    shares_a_rate = cell.universal and cell.target.stage == 3 and cell.source.scheduled
    assert [line for line in verdict.settings if not (shares_a_rate and ": lr " in line)] == []


@pytest.mark.parametrize("cell", LOADABLE, ids=_id)
def test_training_goes_on_as_if_it_had_not_stopped(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    verdict = verdicts[cell.name]
    crosses = cell.source.dtype == "fp16" and (cell.source.truth["case"]["stage"] == 0) != (cell.target.stage == 0)
    assert verdict.loss_gap <= (FP16_STAGE_0 if crosses else TOLERANCE[cell.source.dtype])
    assert verdict.lrs_equal
    assert verdict.step_after == verdict.step_expected


@pytest.mark.parametrize("cell", [cell for cell in LOADABLE if not cell.unmanaged], ids=_id)
def test_native_files_restore_frozen_parameters_and_buffers(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    assert not verdicts[cell.name].not_restored


@pytest.mark.parametrize("cell", [cell for cell in MATRIX if cell.fails], ids=_id)
def test_limit_these_are_beyond_deepspeed(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    """Whoever converted; see the page for the reasons. If this fails, DeepSpeed can now: tell so."""
    verdict = verdicts[cell.name]
    assert verdict.error or verdict.differing


@pytest.mark.parametrize(
    "cell", [cell for cell in LOADABLE if not cell.original and SAME.get(cell.source.name) == cell.target], ids=_id
)
def test_the_same_layout_goes_on_exactly(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    """As DeepSpeed goes on from its own files: the same losses to the last bit, on whatever processor."""
    original = Cell(source=cell.source, target=cell.target, universal=False, original=True)
    assert verdicts[cell.name].losses == verdicts[original.name].losses


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
and real DeepSpeed loaded it into a model with another seed: {versions}. `make integration` makes this page.

**Right after each load, all weights, moments, steps and hyper-parameters are those of the source, bit for bit**
({compared} tensors compared over {loads} loads). The number in a cell is the largest relative difference between the
next five losses and those of the uninterrupted run; "exact" means that they are equal. Losses differ because other
numbers of ranks and other flat buffers sum floats in another order, or because another processor trained the source
(DeepSpeed resuming its own files on both differs as much). The test allows differences below {tolerance}; in fp16
between stage 0 and the other stages, which do not train alike (see the end), below {stage_0:g}.

{matrix}

Runs of other kinds:

{others}

## Limits of DeepSpeed 0.19.8

For native files (`--to deepspeed`) only the last of these applies.

- **Stage 0 loads no universal checkpoint**: the engine looks for the optimizer in the model-states file.
- **A universal load does not load frozen parameters and buffers**: they stay as the model was built. For this table
  they were copied in afterwards. `ucp` writes them under `module` of `mp_rank_00_model_states.pt`.
- **After a universal load, all sub-groups of stage 3 share one step tensor**, and a torch optimizer increases it
  once for each sub-group. For this table, each state got its own:

      for state in engine.optimizer.optimizer.state.values():
          state["step"] = state["step"].clone()

- **Stage 3 copies the first group's hyper-parameters over all groups.** `ucp` leaves out those that
  differ, so each group keeps the values of the engine's configuration. With a scheduler, all groups have the learning
  rate of the first group until the scheduler sets them after the first step. For this table it was set at once:

      engine.lr_scheduler.step(engine.lr_scheduler.last_batch_iteration)

- **Stage 3 loads only exp_avg, exp_avg_sq and step from a universal checkpoint**, so it cannot resume SGD, FusedLion
  or Muon. (CPULion has an exp_avg_sq, which it never uses.)
- **Under stages 1 and 2 each rank loads only its partition of Muon's momentum, but uses it as the full tensor**, so at
  more than one rank the first step after a universal load fails.
- **Stages 1 and 2 with `round_robin_gradients` load a universal checkpoint into the wrong parameters.**
- **In fp16, stage 0 and the other stages do not train alike**: stage 0 divides gradients by a loss scale by which it
  never multiplied the loss, and then does not clip them. From states that are equal bit for bit, losses of stage 0 and
  of the other stages differ by up to 10 % after five steps.
"""
