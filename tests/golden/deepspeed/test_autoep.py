"""Experts that AutoEP stacked: universal folders, files that lack some, and what is written from them.

`test_deepspeed_parallel` compares the native files with what each rank of the run held.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ucp
from tests.golden.deepspeed.test_deepspeed_parallel import ROOT, states_of, truths
from tests.golden.truth import check_copies, check_equal, is_same, read_states
from ucp.errors import MissingFileError, UnsupportedError

CASES = sorted(path.name for path in ROOT.glob("z*autoep*"))
CONVERTED = [case for case in CASES if (ROOT / case / "universal").is_dir()]
EXPERTS = "model.layers.0.mlp.experts"


def without_module_dtype(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: state.float() for key, state in states.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_stack_has_the_experts_of_all_ranks_in_order(case: str) -> None:
    for part in ("w1", "w2", "w3"):
        for state in ("weight", "exp_avg", "exp_avg_sq"):
            key = f"{EXPERTS}.{part}/{state}"
            held = [rank.get(key, rank[f"{EXPERTS}.{part}/module"]) for rank in truths(case)]
            assert len(held) == 2
            assert is_same(states_of(case)[key], torch.cat(held)), key


@pytest.mark.parametrize("case", CONVERTED)
def test_deepspeeds_universal_folder_is_read_the_same(case: str) -> None:
    index = ucp.open(ROOT / case / "universal").index
    check_copies(index)
    check_equal(without_module_dtype(read_states(index)), without_module_dtype(states_of(case)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["deepspeed-universal", "torch", "dcp"])
def test_what_is_written_is_read_the_same(case: str, to: str, tmp_path: Path) -> None:
    ucp.convert(ROOT / case / "checkpoint", tmp_path / "out", to=to)
    found = read_states(ucp.open(tmp_path / "out").index)
    for key, state in states_of(case).items():
        assert torch.equal(found[key], state), key


@pytest.mark.parametrize("case", CONVERTED)
def test_the_universal_files_say_what_deepspeed_s_own_say(case: str, tmp_path: Path) -> None:
    ucp.convert(ROOT / case / "checkpoint", tmp_path / "out", to="deepspeed-universal")
    (ours,), (theirs,) = (list(path.glob("*/zero")) for path in (tmp_path / "out", ROOT / case / "universal"))
    for part in ("w1", "w2", "w3"):
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            found, wanted = (torch.load(path / f"{EXPERTS}.{part}" / f"{state}.pt") for path in (ours, theirs))
            assert torch.equal(found.pop("param"), wanted.pop("param"))
            assert found == wanted


def test_moments_of_one_rank_are_refused(tmp_path: Path) -> None:
    universal = shutil.copytree(ROOT / CONVERTED[0] / "universal", tmp_path / "universal")
    (path,) = universal.glob(f"*/zero/{EXPERTS}.w1/exp_avg.pt")
    saved = torch.load(path)
    torch.save({**saved, "param": saved["param"][:2].clone()}, path)
    with pytest.raises(UnsupportedError, match="8147"):
        ucp.open(universal)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    source = shutil.copytree(ROOT / "z1-autoep2" / "checkpoint", tmp_path / "checkpoint")
    for path in source.glob("*/layer_1_expert_3_*"):
        path.unlink()
    with pytest.raises(MissingFileError, match=r"model\.layers\.1\.mlp\.experts\.w1"):
        ucp.open(source)


def test_native_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="deepspeed-universal"):
        ucp.convert(ROOT / "z1-autoep2" / "checkpoint", tmp_path / "out", to="deepspeed")
    assert not (tmp_path / "out").exists()
