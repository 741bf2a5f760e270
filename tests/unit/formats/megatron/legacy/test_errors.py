"""What is wrong with a legacy checkpoint is told, all of a kind together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from ucp_formats.megatron.legacy.source import read_legacy
from ucp_formats.megatron.source import MegatronFormat, locate

from ucp.contract.protocols import SourceOptions
from ucp.errors import (
    FamilyError,
    MalformedError,
    MissingFileError,
    UnknownFamilyError,
    UnsupportedError,
)


def read(folder: Path) -> object:
    return MegatronFormat().read(folder)


def test_every_file_of_a_missing_rank_is_named(fake_legacy, tmp_path: Path) -> None:
    """Also where its folder is there: what the other ranks have of the distributed optimizer, it lacks."""
    there = fake_legacy(kind="llama", tp=2, pp=2, optimizer="L3a").save(tmp_path) / "iter_0000010"
    shutil.rmtree(there / "mp_rank_01_001")
    (there / "mp_rank_00_001" / "model_optim_rng.pt").unlink()
    (there / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    (there / "mp_rank_01_000" / "distrib_optim.pt").unlink()
    with pytest.raises(MissingFileError, match="5 problems") as caught:
        read(there.parent)
    told = [line.split()[1] for line in str(caught.value).splitlines() if "missing: " in line]
    assert sorted(told) == [
        "mp_rank_00_001/model_optim_rng.pt",
        "mp_rank_01_000/distrib_optim.pt",
        "mp_rank_01_000/model_optim_rng.pt",
        "mp_rank_01_001/distrib_optim.pt",
        "mp_rank_01_001/model_optim_rng.pt",
    ]


def test_missing_buffers_are_named_together(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", tp=2, optimizer="L3a")
    run.buffers.clear()
    with pytest.raises(MissingFileError, match=r"(?s)2 files .*mp_rank_01/distrib_optim\.pt"):
        read(run.save(tmp_path))


def test_damaged_and_foreign_files_are_told_together(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", tp=4)
    run.roots["mp_rank_02"]["iteration"] = 11
    folder = run.save(tmp_path)
    (folder / "iter_0000010" / "mp_rank_03" / "model_optim_rng.pt").write_bytes(b"nonsense")
    with pytest.raises(MalformedError, match="2 problems") as caught:
        read(folder)
    assert "mp_rank_03/model_optim_rng.pt" in str(caught.value)
    assert "iteration is a int (11)" in str(caught.value)


def test_arguments_that_are_none_are_told_beside_what_is_missing(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", tp=4)
    run.roots["mp_rank_02"]["args"] = "none"
    folder = run.save(tmp_path)
    shutil.rmtree(folder / "iter_0000010" / "mp_rank_03")
    with pytest.raises(MalformedError, match="mp_rank_02") as caught:
        read(folder)
    assert "mp_rank_03/model_optim_rng.pt" in str(caught.value)


def test_a_rank_too_many_is_of_another_run(fake_legacy, tmp_path: Path) -> None:
    folder = fake_legacy(kind="llama", tp=2).save(tmp_path)
    there = folder / "iter_0000010"
    shutil.copytree(there / "mp_rank_00", there / "mp_rank_02")
    with pytest.raises(MalformedError, match="extra: mp_rank_02"):
        read(folder)


def test_file_names_that_collide_are_refused(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="mixtral", ep=2, dp=2)
    for root in run.roots.values():
        root["args"].expert_tensor_parallel_size = 2
    with pytest.raises(UnsupportedError, match="tp=1, ep=2, etp=2: "):
        read(run.save(tmp_path))


def test_rows_in_the_order_of_2020_are_refused(fake_legacy, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"version 1, "):
        read(fake_legacy(style="legacy", kind="gpt", tp=2, version=1.0).save(tmp_path))


def test_layers_that_do_not_add_up(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", pp=2, optimizer="none")
    for root in run.roots.values():
        root["args"].num_layers = 6
    with pytest.raises(MalformedError, match=r"(?s) 6 layers.* 4 in .*\n  stage 1, chunk 0: 2 layers"):
        read(run.save(tmp_path))


def test_names_without_a_rule_are_listed_together(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", optimizer="none")
    run.roots["mp_rank_00"]["model"] |= {"my.adapter.weight": torch.ones(2), "my.gate": torch.ones(1)}
    folder = run.save(tmp_path)
    with pytest.raises(UnknownFamilyError, match=r"my\.adapter\.weight"):
        read(folder)

    with pytest.raises(FamilyError, match=r"2 names .*'llama':\n  my\.adapter\.weight\n  my\.gate\n"):
        read_legacy(locate(folder), "megatron", SourceOptions("llama"))


@pytest.mark.parametrize("options", [{"pp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 4}])
def test_names_without_a_rule_are_those_of_all_stages(fake_legacy, tmp_path: Path, options: dict[str, int]) -> None:
    """The keys of every stage begin at 0; the numbers told are those of the model, each once."""
    folder = fake_legacy(kind="llama", optimizer="none", **options).save(tmp_path)

    with pytest.raises(FamilyError, match=r"8 names .*'mixtral'") as caught:
        read_legacy(locate(folder), "megatron", SourceOptions("mixtral"))
    told = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert sorted(told) == [f"decoder.layers.{n}.mlp.linear_fc{part}.weight" for n in range(4) for part in (1, 2)]


def test_masters_of_another_run(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", optimizer="whole")
    for own in run.roots["mp_rank_00"]["model"].values():
        if own is not None:
            own.add_(1)
    with pytest.raises(MalformedError, match=r"(?s)fits none.*decoder\.layers\.1\.mlp\.linear_fc2\.weight \[8, 12\]"):
        read(run.save(tmp_path))


def test_stretches_of_buffers_without_a_parameter(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", optimizer="L3a")
    run.roots["mp_rank_00"]["model"]["decoder.layers.1.mlp.linear_fc2.weight"][0] += 1
    with pytest.raises(MalformedError, match=r"(?s)1 range .*decoder\.layers\.1\.mlp\.linear_fc2\.weight \[8, 12\]"):
        read(run.save(tmp_path))


def test_packed_tensors_with_gaps_are_refused(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", optimizer="none")
    model = run.roots["mp_rank_00"]["model"]
    model["output_layer.weight"] = model["output_layer.weight"].t().contiguous().t()
    with pytest.raises(UnsupportedError, match=r"output_layer\.weight"):
        read(run.save(tmp_path))


def test_a_sparse_grid_lacks_nothing(fake_legacy, tmp_path: Path) -> None:
    folder = fake_legacy(kind="mixtral", tp=2, ep=2, etp=1, dp=1).save(tmp_path)
    assert sorted(own.name for own in (folder / "iter_0000010").iterdir()) == ["mp_rank_00_000", "mp_rank_01_001"]
    shutil.rmtree(folder / "iter_0000010" / "mp_rank_01_001")
    with pytest.raises(MissingFileError, match="mp_rank_01_001"):
        read(folder)
