"""Files of ranks that are copies of one another: genuine ones that were copied, and made ones that may be equal."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import ucp
from ucp.core.index import Doubt, Fragment, StateIndex
from ucp.core.region import Box
from ucp.errors import MalformedError
from ucp.io.torch_file.archive import read_archive
from ucp.source.copied_ranks import find_copied_ranks
from ucp.testing.handmade import make_index

FIXTURES = Path(__file__).parents[3] / "fixtures"
EXPERTS = (
    "megatron",
    "mixtral-ep2-dp2-torch",
    "mp_rank_00_000/model_optim_rng.pt",
    "mp_rank_00_001/model_optim_rng.pt",
)


def copied(tmp_path: Path, framework: str, case: str, src: str, dst: str) -> Path:
    """A genuine checkpoint in which one file was copied over another."""
    path = Path(shutil.copytree(FIXTURES / framework / case / "checkpoint", tmp_path / case))
    (tag,) = (folder for folder in path.iterdir() if folder.is_dir())
    shutil.copyfile(tag / src, tag / dst)
    return path


@pytest.mark.parametrize(
    ("framework", "case", "src", "dst"),
    [
        EXPERTS,
        ("megatron", "llama-tp2-torch-fused", "mp_rank_01/model_optim_rng.pt", "mp_rank_00/model_optim_rng.pt"),
        (
            "deepspeed",
            "z3-dp4-fp32",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "zero_pp_rank_2_mp_rank_00_optim_states.pt",
        ),
        (
            "deepspeed",
            "z3-dp4-fp32",
            "zero_pp_rank_3_mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
        ),
        (
            "deepspeed",
            "z3-tp2-dp2",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "zero_pp_rank_0_mp_rank_01_optim_states.pt",
        ),
        ("deepspeed", "z0-tp2-dp2", "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
        ("deepspeed", "z0-pp2", "layer_01-model_states.pt", "layer_04-model_states.pt"),
        (
            "deepspeed",
            "z0-ep2-dp4",
            "expp_rank_1_mp_rank_00_optim_states.pt",
            "expp_rank_0_mp_rank_00_optim_states.pt",
        ),
    ],
    ids=["experts", "megatron tp", "zero-3", "frozen parts of zero-3", "tp", "tp without zero", "layers", "ep"],
)
def test_a_file_that_was_copied_over_that_of_another_rank(framework, case, src, dst, tmp_path):
    path = copied(tmp_path, framework, case, src, dst)
    (doubt,) = ucp.open(path).index.doubts
    assert doubt.kind == "equal-ranks"
    assert src in doubt.text
    assert dst in doubt.text
    assert doubt.text in ucp.verify(path).problems


def test_it_is_refused_unless_it_is_accepted(tmp_path):
    path = copied(tmp_path, *EXPERTS)
    model = torch.nn.Linear(1, 1)
    for refused in (
        lambda: ucp.plan(path),
        lambda: ucp.convert(path, tmp_path / "out"),
        lambda: ucp.load_into(model, checkpoint=path, strict=False),
    ):
        with pytest.raises(MalformedError, match="--accept equal-ranks") as caught:
            refused()
        assert caught.value.__notes__ == ["In Python: --accept is accept=..."]
    assert not (tmp_path / "out").exists()
    (warning,) = ucp.convert(path, tmp_path / "out", accept=["equal-ranks"], workers=1, verify=True).warnings
    assert "hold the same bytes" in warning
    assert any("hold the same bytes" in note for note in ucp.diff(path, tmp_path / "out").notes)


class Ranks:
    """Two files of equal bytes, of ranks with other experts `e0` and `e1`, or with other rows of `w`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def index(self, tensors: dict[str, torch.Tensor], *, rows: bool = False) -> tuple[Doubt, ...]:
        states: dict[tuple[str, str], list[Fragment]] = {}
        records = []
        for rank in range(2):
            path = self.folder / f"rank_{rank}.pt"
            torch.save(tensors, self.folder / "rank.pt")
            (self.folder / "rank.pt").rename(path)
            archive = read_archive(str(path))
            records += archive.records
            for state, ref in archive.root.items():
                start = (rank * ref.shape[0], *(0 for _ in ref.shape[1:])) if rows else (0,) * len(ref.shape)
                states.setdefault(("w" if rows else f"e{rank}", state), []).append(
                    Fragment(box=Box(start, ref.shape), ref=ref)
                )
        made = {
            key: StateIndex(
                dtype=own[0].ref.dtype,
                global_shape=(len(own) * own[0].box.sizes[0], *own[0].box.sizes[1:]),
                fragments=tuple(own),
            )
            for key, own in states.items()
        }
        return find_copied_ranks(make_index(self.folder, made, records=records))


@pytest.fixture
def ranks(tmp_path) -> Ranks:
    return Ranks(tmp_path)


EVEN, ODD = torch.zeros(200, 3), torch.arange(600.0).reshape(200, 3)
LATE = torch.from_numpy(np.eye(1, 600, 599, dtype=np.float32).reshape(200, 3))
"""Zeros but for the last element."""


@pytest.mark.parametrize(
    "tensors",
    [
        {"weight": ODD, "scale": EVEN},
        {"weight": ODD, "exp_avg": EVEN, "exp_avg_sq": EVEN},
        {"weight": EVEN, "exp_avg": EVEN + 1},
    ],
    ids=["experts of one dense layer", "before the first step", "constant"],
)
def test_parameters_may_be_equal_until_they_are_trained(tensors, ranks):
    assert ranks.index(tensors) == ()


@pytest.mark.parametrize("exp_avg", [ODD + 1, LATE], ids=["at once", "in the last element"])
def test_parameters_that_were_trained_are_not_equal(exp_avg, ranks):
    (doubt,) = ranks.index({"weight": ODD, "exp_avg": exp_avg})
    assert "rank_0.pt and rank_1.pt hold the same bytes, e0/" in doubt.text
    assert "in the one and e1/" in doubt.text


def test_a_file_with_one_tensor_is_of_no_rank(ranks):
    """Biases that are added up have equal gradients, and so equal moments: a folder of a file per state may repeat."""
    assert ranks.index({"exp_avg": ODD}) == ()


def test_parts_of_one_tensor_are_not_equal_even_before_they_are_trained(ranks):
    (doubt,) = ranks.index({"weight": ODD, "exp_avg": EVEN}, rows=True)
    assert "w/weight [0:200, 0:3] in the one and w/weight [200:400, 0:3] in the other" in doubt.text
    assert ranks.index({"weight": EVEN, "exp_avg": EVEN}, rows=True) == ()


def test_copies_of_one_region_are_equal(tmp_path):
    """Data-parallel ranks hold the same: no genuine checkpoint is in doubt."""
    for case in ("z3-dp4-fp32", "z0-tp2-dp2", "z2-ep2-dp4-contiguous", "z1-pp2-tp2-dp2-bf16", "z3-tp2-dp2"):
        assert ucp.open(FIXTURES / "deepspeed" / case / "checkpoint").index.doubts == ()
