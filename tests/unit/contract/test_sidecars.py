"""Files beside a checkpoint, and its tag, from the folder it was saved in to the one it is written to."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import ucp
from ucp.contract.protocols import SourceOptions
from ucp.contract.sidecars import MOST_SMALL, SidecarPolicy, add_sidecars, list_sidecars, select_sidecars, sidecar_extra
from ucp.conversion.convert import verify_written
from ucp.conversion.options import ConvertOptions
from ucp.conversion.prepare import SilentObserver, prepare
from ucp.core.index import TAG, Extra
from ucp.core.target import OutputFile, TargetPlan
from ucp.core.topology import Topology
from ucp.errors import CorruptError, MalformedError, TagError, UnknownFormatError, UsageError

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINER = FIXTURES / "deepspeed" / "z2-dp2-hf-trainer" / "checkpoint-3"
MEGATRON = FIXTURES / "megatron" / "gpt-tp2-pp2-torch" / "checkpoint"
BESIDE = {
    "config.json": b'{"model_type": "llama"}',
    "scheduler.pt": bytes(range(256)) * 3,
    "empty.txt": b"",
    "rng_state_0.pth": b"rank 0",
    "rng_state_1.pth": b"rank 1",
    "random_states_1.pkl": b"rank 1 of accelerate",
}
OF_RANKS = {"rng_state_0.pth", "rng_state_1.pth", "random_states_1.pkl"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A `checkpoint-3` of the Trainer, with files beside its tag folder."""
    shutil.copytree(TRAINER, tmp_path / "checkpoint-3")
    for name, data in BESIDE.items():
        (tmp_path / "checkpoint-3" / name).write_bytes(data)
    return tmp_path / "checkpoint-3"


def beside(folder: Path) -> dict[str, bytes]:
    """Files beside the tag folder, but for those of the format and of ucp."""
    own = {"latest", "latest_universal", "ucp-conversion.json", "latest_checkpointed_iteration.txt"}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in own}


def wanted(saved: Path, *, without: set[str] = frozenset()) -> dict[str, bytes]:
    return {name: data for name, data in beside(saved).items() if name not in without}


@pytest.mark.parametrize("passed", ["", "global_step3"], ids=["save folder", "tag folder"])
@pytest.mark.parametrize("by_atoms", [False, True], ids=["direct", "by atoms"])
def test_files_beside_the_tag_are_carried_along_byte_for_byte(saved, tmp_path, passed, by_atoms):
    assert "trainer_state.json" in beside(saved)
    source = saved / passed
    if by_atoms:
        ucp.convert(source, tmp_path / "atoms", virtual=True)
        source = tmp_path / "atoms"
    report = ucp.convert(source, tmp_path / "out", to="deepspeed", topology="dp=2,zero=1", verify=True)
    assert beside(tmp_path / "out") == wanted(saved)
    (note,) = (note for note in report.notes if note.startswith("carried along"))
    assert all(name in note for name in wanted(saved))


@pytest.mark.parametrize(("to", "topology"), [("deepspeed", "dp=1,zero=3"), ("deepspeed-universal", None)])
def test_those_of_single_ranks_are_named_and_left_where_there_will_be_others(saved, tmp_path, to, topology):
    report = ucp.convert(saved, tmp_path / "out", to=to, topology=topology)
    assert beside(tmp_path / "out") == wanted(saved, without=OF_RANKS)
    (line,) = (line for line in report.dropped if "of single ranks" in line)
    assert all(name in line for name in OF_RANKS)
    assert not any("values of single ranks" in note for note in report.notes)


def test_a_run_of_one_rank_has_a_name_of_its_own_for_its_random_states():
    assert [sidecar_extra(name, name, 1).rank for name in ("rng_state.pth", "rng_state_12.pth", "rng.pth")] == [
        0,
        12,
        None,
    ]


def test_none_are_carried_along_where_none_are_wanted(saved, tmp_path):
    for to in ("ucp", "deepspeed"):
        report = ucp.convert(saved, tmp_path / to, to=to, companions="none")
        (line,) = (line for line in report.dropped if "--companions none" in line)
        assert "scheduler.pt (768 bytes)" in line
    assert beside(tmp_path / "deepspeed") == {}
    assert not list(list_sidecars(ucp.inspect(tmp_path / "ucp")))


def test_large_ones_are_left_unless_asked_for(saved):
    with (saved / "model.safetensors").open("wb") as file:
        file.truncate(MOST_SMALL + 1)
    (saved / "tokenizer.json").write_bytes(b"{}")
    index = ucp.inspect(saved)
    kept = {own.name for own in list_sidecars(select_sidecars(index, SidecarPolicy.SMALL))}
    assert "model.safetensors" not in kept
    assert {"tokenizer.json", *BESIDE} <= kept
    assert "model.safetensors (67,108,865 bytes)" in select_sidecars(index, SidecarPolicy.SMALL).dropped[-1]
    assert select_sidecars(index, SidecarPolicy.ALL) is index


def test_an_unknown_policy_is_refused(saved):
    with pytest.raises(UsageError, match="small, all, none; got 'some'"):
        ucp.plan(saved, companions="some")


def test_links_are_not_followed_and_folders_not_entered(saved, tmp_path):
    (tmp_path / "secret").write_bytes(b"of somebody else")
    (saved / "link.json").symlink_to(tmp_path / "secret")
    (saved / "inside.json").symlink_to(saved / "config.json")
    (saved / "runs").mkdir()
    (saved / "runs" / "events").write_bytes(b"")
    (saved / "two\nlines").write_bytes(b"")
    os.mkfifo(saved / "pipe")
    shutil.copytree(saved / "global_step3", saved / "global_step2")
    report = ucp.convert(saved, tmp_path / "out", to="deepspeed")
    assert beside(tmp_path / "out") == wanted(saved, without={"link.json", "inside.json", "two\nlines"})
    assert [line for line in report.dropped if "beside the checkpoint" in line] == [
        "inside.json, link.json, beside the checkpoint: links are not followed",
        "pipe, beside the checkpoint: not regular files",
        "runs, beside the checkpoint: folders are not carried along",
        "two\\nlines, beside the checkpoint: their names are not printable text",
    ]


def test_what_lies_beside_belongs_to_the_checkpoint_saved_last(saved, tmp_path):
    shutil.copytree(saved / "global_step3", saved / "global_step2")
    report = ucp.convert(saved / "global_step2", tmp_path / "out", to="deepspeed")
    assert beside(tmp_path / "out") == {}
    (line,) = report.dropped
    assert "scheduler.pt" in line
    assert line.endswith("beside the checkpoint: saved with global_step3, the newest checkpoint")


def test_destinations_beside_the_checkpoint_are_no_part_of_it(saved):
    ucp.convert(saved / "global_step3", saved / "atoms")
    ucp.convert(saved / "global_step3", saved / "again", to="deepspeed")
    assert beside(saved / "again") == wanted(saved)
    assert ucp.inspect(saved).dropped == ()


def test_a_megatron_run_has_them_too(tmp_path):
    shutil.copytree(MEGATRON, tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "source" / "latest").write_bytes(b"nothing of Megatron's")
    report = ucp.convert(tmp_path / "source", tmp_path / "out", to="megatron", topology="tp=1")
    assert beside(tmp_path / "out") == {"tokenizer.json": b"{}"}
    assert (tmp_path / "out" / "latest").read_bytes() == b"nothing of Megatron's"
    assert not any("companion" in note for note in report.notes)


def test_a_file_of_a_name_that_the_target_writes_itself_is_left(saved):
    index = ucp.inspect(saved)
    files = (OutputFile(path="config.json/x", nbytes=0), OutputFile(path="global_step3/y", nbytes=0))
    plan = TargetPlan(files=files, placements=(), topology=index.topology)
    placed = add_sidecars(index, plan, reserved=("scheduler.pt",))
    assert {"config.json", "scheduler.pt"}.isdisjoint(file.path for file in placed.files)
    assert placed.dropped == (
        "config.json, scheduler.pt, beside the checkpoint: the target writes a file of that name itself",
    )


@pytest.mark.parametrize(
    "extra",
    [
        *(sidecar_extra(name, "config.json", 1) for name in ("../x", "a/b", "", ".", "a\0b", "\ud800")),
        Extra(name="companion/x", value={"a": 1}),
    ],
    ids=lambda extra: ascii(extra.name),
)
def test_a_store_that_names_a_path_or_keeps_something_else_under_a_name_is_damaged(saved, extra):
    index = ucp.inspect(saved)
    with pytest.raises(MalformedError, match=re.escape(f"extra {extra.name!r} of")):
        add_sidecars(replace(index, extras=(*index.extras, extra)), TargetPlan(files=(), placements=()), reserved=())


def test_verify_reads_them_back(saved, tmp_path):
    options = ConvertOptions(to="deepspeed")
    ucp.convert(saved, tmp_path / "out", to="deepspeed")
    job = prepare(saved, options).job
    told = {"source": SourceOptions(), "observer": SilentObserver(), "threads": 1}
    verify_written(job, tmp_path / "out", **told)
    (tmp_path / "out" / "scheduler.pt").write_bytes(bytes(768))
    with pytest.raises(CorruptError, match=r"companion/scheduler\.pt/ values: "):
        verify_written(job, tmp_path / "out", **told)


def tagged(saved: Path, tag: str) -> Path:
    """`saved` under another tag, as accelerate calls it."""
    (saved / tag).parent.mkdir(exist_ok=True)
    (saved / "global_step3").rename(saved / tag)
    (saved / "latest").write_text(tag)
    return saved


@pytest.mark.parametrize("tag", ["pytorch_model", "1", "a/b"])
@pytest.mark.parametrize(("to", "pointer"), [("deepspeed", "latest"), ("deepspeed-universal", "latest_universal")])
def test_the_tag_of_the_source_is_kept(saved, tmp_path, tag, to, pointer):
    tagged(saved, tag)
    ucp.convert(saved, tmp_path / "atoms")
    for source in (saved, saved / tag, tmp_path / "atoms"):
        out = tmp_path / f"from-{source.name}"
        ucp.convert(source, out, to=to)
        kept = source.name if source == saved / tag and "/" in tag else tag
        assert (out / pointer).read_text() == kept
        assert (out / kept / "mp_rank_00_model_states.pt").is_file()
        assert not any(TAG in note for note in ucp.inspect(out).notes)


def test_a_universal_folder_has_a_tag_and_files_beside_it_too(tmp_path):
    shutil.copytree(FIXTURES / "deepspeed" / "z1-dp4-fp32" / "universal", tmp_path / "source")
    (tmp_path / "source" / "trainer_state.json").write_bytes(b"{}")
    for number, passed in enumerate(("source", "source/global_step3_universal")):
        out = tmp_path / str(number)
        ucp.convert(tmp_path / passed, out, to="deepspeed", topology="dp=2,zero=1")
        assert (out / "latest").read_text() == "global_step3_universal"
        assert beside(out) == {"trainer_state.json": b"{}"}


def test_another_tag_may_be_chosen(saved, tmp_path):
    ucp.convert(saved, tmp_path / "atoms", tag="first")
    ucp.convert(tmp_path / "atoms", tmp_path / "first", to="deepspeed")
    ucp.convert(tmp_path / "atoms", tmp_path / "second", to="deepspeed", tag="second")
    assert [(tmp_path / name / "latest").read_text() for name in ("first", "second")] == ["first", "second"]
    made = json.loads((tmp_path / "second" / "ucp-conversion.json").read_text())["made"]
    assert made["tag"] == "second"


def test_without_a_tag_the_step_names_the_folder(tmp_path):
    ucp.convert(MEGATRON, tmp_path / "out", to="deepspeed-universal")
    assert (tmp_path / "out" / "latest").read_text() == f"global_step{ucp.inspect(MEGATRON).step}"


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ("../outside", r"part '\.\.' cannot"),
        ("/absolute", "part '' cannot"),
        ("a//b", "part '' cannot"),
        (".", r"part '\.' cannot"),
        ("a\0b", "NUL"),
        ("two\nlines", "unprintable"),
        (" blank", "blanks"),
        ("x" * 300, "takes 300 bytes"),
        ("latest", "latest.* checkpoint itself"),
        ("latest_universal/x", "latest_universal/x.* checkpoint itself"),
        ("ucp-conversion.json", "ucp-conversion.json.* checkpoint itself"),
        ("mp_rank_00_model_states.pt", "a file of"),
    ],
)
def test_a_tag_that_is_no_folder_of_the_destination_is_refused(saved, tag, why):
    for to in ("deepspeed", "deepspeed-universal"):
        with pytest.raises(TagError, match=f"(?s){why}.*--tag"):
            ucp.plan(saved, to=to, tag=tag)


def test_an_empty_tag_is_no_tag(saved):
    with pytest.raises(UsageError, match=r"a tag .*; got ''"):
        ucp.plan(saved, tag="")


def test_megatron_names_its_folder_by_the_iteration(tmp_path):
    with pytest.raises(UsageError, match=r"iter_\d{7}; drop --tag"):
        ucp.plan(MEGATRON, to="megatron", topology=Topology(tp=1), tag="best")


def test_checkpoints_of_a_trainer_are_listed_where_their_parent_is_passed(saved):
    shutil.copytree(saved, saved.with_name("checkpoint-10"))
    with pytest.raises(UnknownFormatError, match=r"\n.*checkpoint-10\n.*checkpoint-3\n"):
        ucp.inspect(saved.parent)


def test_a_store_is_equal_to_its_source_whatever_of_its_files_was_taken(saved, tmp_path):
    for number, asked in enumerate([{}, {"companions": "none"}, {"tag": "best"}]):
        ucp.convert(saved, tmp_path / str(number), **asked)
        assert ucp.verify(tmp_path / str(number), against=saved).ok
    (saved / "scheduler.pt").write_bytes(bytes(768))
    (change,) = ucp.verify(tmp_path / "0", against=saved).changes
    assert change.param == "extra/companion/scheduler.pt"
