"""Files that are missing, extra, damaged or of another run: one error that lists them all."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from ucp_formats.deepspeed.read.source import DeepSpeedFormat

from ucp.errors import MalformedError, MissingFileError, SourceError, UnsupportedError

FIXTURES = Path(__file__).parents[5] / "fixtures" / "deepspeed"
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


@pytest.fixture
def kept(tmp_path: Path):
    """`kept(case)`: the tag folder of a copy of a kept checkpoint."""

    def copied(case: str) -> Path:
        shutil.copytree(FIXTURES / case / "checkpoint", tmp_path / case)
        return next(path for path in (tmp_path / case).iterdir() if path.is_dir())

    return copied


def refused(path: Path, kind: type[SourceError], *facts: str) -> str:
    """The message of the error, in which each of these expressions is found."""
    with pytest.raises(kind) as caught:
        DeepSpeedFormat().read(path)
    assert [fact for fact in facts if not re.search(fact, str(caught.value))] == [], caught.value
    return str(caught.value)


@pytest.mark.parametrize("case", ["z1-dp4-fp32", "z3-dp4-fp32"])
def test_every_missing_rank_is_named(kept, case: str) -> None:
    tag = kept(case)
    for rank in (1, 3):
        (tag / OPTIMIZER.format(rank)).unlink()
    missing = [rf"missing: {OPTIMIZER.format(rank)} \(rank {rank} of 4\)" for rank in (1, 3)]
    refused(tag, MissingFileError, "^2 problems ", *missing)


def test_missing_names_have_the_prefix_of_the_configuration(kept) -> None:
    tag = kept("z1-dp4-bf16")
    for file in tag.glob("*optim*"):
        file.unlink()
    refused(tag, MissingFileError, f"missing: bf16_{OPTIMIZER.format(3)}")


def test_extra_ranks(kept) -> None:
    tag = kept("z3-dp4-fp32")
    shutil.copy(tag / OPTIMIZER.format(0), tag / OPTIMIZER.format(9))
    shutil.copy(tag / MODEL.format(0), tag / MODEL.format(12))
    refused(tag, MalformedError, f"extra: {OPTIMIZER.format(9)} .*9 of 4", f"extra: {MODEL.format(12)} .*12 of 4")


def test_everything_at_once(kept) -> None:
    tag = kept("z1-dp4-fp32")
    (tag / OPTIMIZER.format(0)).unlink()
    (tag / OPTIMIZER.format(1)).write_bytes(b"not a checkpoint at all")
    shutil.copy(tag / OPTIMIZER.format(2), tag / OPTIMIZER.format(7))
    missing, extra = (f"{OPTIMIZER.format(rank)} " for rank in (0, 7))
    damaged = rf"\n  {OPTIMIZER.format(1)} \(.*\): "
    refused(tag, MalformedError, "^3 problems ", f"missing: {missing}", damaged, f"extra: {extra}")


def test_an_optimizer_file_of_another_world_size(kept) -> None:
    tag, other = kept("z3-dp4-fp32"), kept("z3-dp3-uneven")
    shutil.copy(other / OPTIMIZER.format(2), tag / OPTIMIZER.format(2))
    refused(tag, MalformedError, rf"{OPTIMIZER.format(2)}: .* ranks .*\(3\), .*\(4\)\n")


def test_model_states_of_two_stages(kept) -> None:
    tag, other = kept("z3-dp4-fp32"), kept("z1-dp4-fp32")
    shutil.copy(other / "mp_rank_00_model_states.pt", tag)
    refused(tag, MalformedError, rf"extra: {MODEL.format(0)} and mp_rank_00_model_states\.pt ")


def test_optimizer_files_of_two_prefixes(kept) -> None:
    tag = kept("z1-dp4-fp32")
    shutil.copy(tag / OPTIMIZER.format(1), tag / f"bf16_{OPTIMIZER.format(1)}")
    refused(tag, MalformedError, f"extra: {OPTIMIZER.format(1)} and bf16_{OPTIMIZER.format(1)} ")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["tensor", "number"])
def test_a_rank_that_stopped_at_another_step(tmp_path: Path, fake_run, stage: int, kind: str) -> None:
    """Steps in tensors are told apart by the checksums of their files: no byte of them is read."""
    run = fake_run(stage, 4)
    for rank, root in enumerate(run.optimizers):
        saved = root["optimizer_state_dict"]
        inner = saved.get("base_optimizer_state") or saved["optimizer_state_dict"]
        for state in inner["state"].values():
            step = 5 if rank == 2 else 7
            state["step"] = step if kind == "number" else torch.tensor(float(step))
    message = refused(run.save(tmp_path), MalformedError)
    assert len(re.findall(rf"\n  {OPTIMIZER.format(2)}: .*: step ", message)) == 2, "one line a bucket"


def test_groups_that_differ(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 3)
    run.optimizers[1]["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = 0.3
    refused(run.save(tmp_path), MalformedError, f"{OPTIMIZER.format(1)}: .*param_groups")


@pytest.mark.parametrize(
    ("key", "value"), [("global_steps", 9), ("dp_world_size", 5), ("ds_version", "0.9.1"), ("param_shapes", [{}])]
)
def test_model_states_that_differ(tmp_path: Path, fake_run, key: str, value: object) -> None:
    run = fake_run(3, 3)
    run.models[1][key] = value
    refused(run.save(tmp_path), MalformedError, rf"{MODEL.format(1)}.*: {key} ")


def test_a_wrong_number_of_groups(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 2)
    run.models[0]["param_shapes"].append({"c": torch.Size([2])})
    refused(run.save(tmp_path), MalformedError, r"\b3\b.* param_shapes .*\n  zero_pp_rank_0_.*: 2\n")
    run = fake_run(3, 2)
    for root in run.models:
        root["param_shapes"] = root["param_shapes"][:1]
    refused(run.save(tmp_path / "b"), MalformedError, r"\b1\b.* param_shapes .*\n  zero_pp_rank_0_.*: 2\n")


@pytest.mark.parametrize(
    ("stage", "key"), [(1, "base_optimizer_state"), (1, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups")]
)
def test_a_key_that_is_missing_or_of_another_kind(tmp_path: Path, fake_run, stage: int, key: str) -> None:
    run = fake_run(stage, 2)
    run.optimizers[1]["optimizer_state_dict"][key] = "what is this"
    refused(run.save(tmp_path), MalformedError, rf"{OPTIMIZER.format(1)} .*: .* {key}; got a str \('what is this'\)")


def test_values_of_another_kind_in_several_files_are_told_together(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 2)
    run.models[0]["shared_params"] = {"tied": 3}
    run.optimizers[0]["optimizer_state_dict"]["partition_count"] = ["two"]
    run.optimizers[1]["optimizer_state_dict"]["param_slice_mappings"] = [{"a.weight": "everywhere"}]
    refused(
        run.save(tmp_path),
        MalformedError,
        "^3 problems ",
        r"mp_rank_00_model_states\.pt .*: .* tied in shared_params; got a int \(3\)",
        rf"{OPTIMIZER.format(0)} .*: .* partition_count; got a str \('two'\)",
        rf"{OPTIMIZER.format(1)} .*: .* a\.weight in param_slice_mappings; got a str \('everywhere'\)",
    )


def test_a_file_without_a_dict(tmp_path: Path, fake_run) -> None:
    path = fake_run(1, 2).save(tmp_path)
    torch.save([1, 2], path / "global_step7" / OPTIMIZER.format(1))
    refused(path, UnsupportedError, rf"{OPTIMIZER.format(1)} .*: .*dict .*; got a list")


@pytest.mark.parametrize("other", ["layer_01-model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_a_file_that_is_no_model_states_under_their_name(kept, other: str) -> None:
    """Of a pipeline's only what is no parameter is read: step, scheduler and client state would be lost."""
    tag = kept("z1-pp2-dp2")
    shutil.copyfile(tag / other, tag / "mp_rank_00_model_states.pt")
    refused(tag, MalformedError, r"mp_rank_00_model_states\.pt .*'module'.*; got .*'")


def test_a_share_that_is_too_short(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 2)
    flats = run.optimizers[0]["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flats[0] = flats[0][:-1].clone()
    refused(run.save(tmp_path), UnsupportedError, r"group 0 \(a\.weight, b\.weight, \.\.\.\): state weight ")


def test_missing_model_states(kept) -> None:
    tag = kept("z1-dp4-fp32")
    (tag / "mp_rank_00_model_states.pt").unlink()
    refused(tag, MissingFileError, r"missing: mp_rank_00_model_states\.pt \(rank 0 of 1\)")
    tag = kept("z3-dp4-fp32")
    (tag / MODEL.format(0)).unlink()
    refused(tag, MissingFileError, rf"missing: {MODEL.format(0)} \(rank 0 of 4\)")
