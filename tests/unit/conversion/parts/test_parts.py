"""Parts in one process after another: the same bytes as one run, whatever their order, number and luck."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import ucp
from tests.unit.conftest import partial, tree
from tests.unit.conversion.test_crash import OPTIONS, run_until
from ucp.conversion.destination.existing import ConversionId
from ucp.conversion.destination.staging import Staging
from ucp.conversion.parts.journals import PartJournal, list_runs
from ucp.conversion.prepare import SilentObserver
from ucp.core.index import Fragment, StateIndex
from ucp.core.region import Box
from ucp.core.tensor import DType
from ucp.errors import BusyError, CorruptError, DestinationError, ReplicaError, UnfinishedError, UsageError
from ucp.source.read import index_of
from ucp.testing.handmade import Shards, make_index, write_checkpoint
from ucp.transfer.plan.tasks import Share

FIXTURES = Path(__file__).parents[4] / "fixtures"


class Titles(SilentObserver):
    """Observer that notes stages."""

    def __init__(self, events):
        self.events = events

    def begin(self, *, title, nbytes):
        self.events.append(title)

    def end(self):
        self.events.append("end")


def in_parts(src, dst, parts, **options):
    for number in range(parts, 0, -1):
        ucp.convert(src, dst, part=(number, parts), workers=1, **options)
        assert not dst.exists()
    return ucp.convert(src, dst, finalize=True, workers=1, **options)


@pytest.mark.parametrize(("parts", "name"), [(1, "packed"), *((3, name) for name in OPTIONS), (100, "compressed")])
def test_parts_are_one_run(source, tmp_path, dst, small_blocks, parts, name):
    """Parts of all that there is, of some, and of nothing: there are more of them than tasks."""
    options = OPTIONS[name]
    ucp.convert(source, tmp_path / "whole", workers=1, **options)
    report = in_parts(source, dst, parts, **options)
    assert tree(dst) == tree(tmp_path / "whole")
    assert (report.nbytes_written, report.part) == (0, "")
    assert not partial(dst).exists()


def test_a_part_again_has_nothing_to_write(source, dst, small_blocks):
    first = ucp.convert(source, dst, part="2/3", workers=1)
    again = ucp.convert(source, dst, part="2/3", workers=1)
    assert (first.resumed_bytes, again.nbytes_written, again.resumed_bytes) == (0, 0, first.nbytes_written)
    assert first.nbytes_written > 0
    assert (first.part, first.files_out, first.nbytes_last) == ("2/3", 0, 0)


def test_numbers_of_parts_may_differ(source, dst, wanted):
    """What counts is which tasks are done, by whomever."""
    ucp.convert(source, dst, part="1/2", workers=1)
    ucp.convert(source, dst, part="3/4", workers=1)
    report = ucp.convert(source, dst, part="7/7", workers=1)
    assert report.nbytes_written > 0
    with pytest.raises(UnfinishedError, match=r"(?s)part 6/7: .*--part 6/7"):
        ucp.convert(source, dst, finalize=True)
    ucp.convert(source, dst, part="4/4", workers=1)
    ucp.convert(source, dst, finalize=True)
    assert tree(dst) == wanted


class TestWhatIsMissing:
    def test_it_says_which_parts_and_why(self, source, dst, wanted):
        done = ucp.convert(source, dst, part="1/4", workers=1)
        assert run_until(45, source, dst, part="3/4") < 0
        ucp.convert(source, dst, part="4/4", workers=1, fsync=False)
        (journal,) = (run for run in list_runs(Staging(dst)) if run.share.number == 4)
        noted = [own for own in journal.read_lines() if "task" in own]
        file = partial(dst) / "data" / "packs" / "00000.safetensors"
        data = bytearray(file.read_bytes())
        data[-8:] = bytes(byte ^ 1 for byte in data[-8:])
        file.write_bytes(data)
        with pytest.raises(UnfinishedError) as caught:
            ucp.convert(source, dst, finalize=True)
        said = str(caught.value)
        total = sum(len(own) for own in map(bytes, (data,)))
        reasons = r"\n +part 2/4: .*never run\n +part 3/4: .*cut off.*\n +part 4/4: 1 task .*no longer"
        assert re.search(f" to {dst} .*:{reasons}.*\n.* --part 2/4, --part 3/4, --part 4/4 .*--finalize", said)
        assert "part 1/4" not in said
        assert noted
        assert done.nbytes_written < total
        assert partial(dst).exists()
        assert not dst.exists()
        for number in (2, 3, 4):
            ucp.convert(source, dst, part=(number, 4), workers=1)
        ucp.convert(source, dst, finalize=True)
        assert tree(dst) == wanted

    def test_nothing_at_all(self, source, dst):
        with pytest.raises(UnfinishedError, match="--part 1/N, "):
            ucp.convert(source, dst, finalize=True)
        assert not partial(dst).exists()

    def test_what_one_run_left(self, source, dst, wanted):
        run_until(150, source, dst)
        with pytest.raises(UnfinishedError, match=r"--resume .*--finalize"):
            ucp.convert(source, dst, finalize=True)


class TestBesideOtherRuns:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch):
        monkeypatch.setattr(import_module("ucp.conversion.destination.staging"), "_PATIENCE", 0.1)

    @pytest.fixture
    def running(self, source, dst, small_blocks):
        """Part 1 of 2, which has done its work and does not end."""
        ucp.convert(source, dst, part="1/2", workers=1)
        staging = Staging(dst)
        first = json.loads((partial(dst) / "journal.jsonl").read_text().splitlines()[0])
        staging.join(ConversionId(first["fingerprint"], first["made"]), overwrite=False)
        journal = PartJournal(staging, Share(1, 2))
        yield journal
        journal.close()
        staging.release()

    @pytest.mark.parametrize("options", [{}, {"finalize": True}, {"resume": True}, {"overwrite": True}])
    def test_what_needs_the_place_for_itself_is_refused(self, source, dst, running, options):
        before = tree(partial(dst))
        with pytest.raises(BusyError, match=rf"1 part .*\n +part 1/2 on .*process {os.getpid()}"):
            ucp.convert(source, dst, **options)
        assert tree(partial(dst)) == before

    def test_other_parts_and_the_same_are_not(self, source, dst, running, wanted):
        ucp.convert(source, dst, part="2/2", workers=1)
        ucp.convert(source, dst, part="1/2", workers=1)
        running.close()

    def test_a_part_waits_for_who_has_the_place_for_itself(self, source, dst, small_blocks):
        staging = Staging(dst)
        staging.open(ConversionId("f", {}), resume=False, overwrite=False)
        events: list[str] = []
        with pytest.raises(BusyError, match=rf"is running: process {os.getpid()} on"):
            ucp.convert(source, dst, part="1/2", observer=Titles(events))
        assert events == [f"waiting for process {os.getpid()} on {socket.gethostname()}", "end"]
        staging.release()


class TestAfterwards:
    @pytest.fixture
    def finished(self, source, dst, wanted):
        in_parts(source, dst, 2)
        return {path: path.stat().st_mtime_ns for path in dst.rglob("*")}

    @pytest.mark.parametrize("options", [{"part": "1/2"}, {"part": "3/5"}, {"finalize": True}, {"resume": True}])
    def test_nothing_is_left_to_do(self, source, dst, finished, options):
        report = ucp.convert(source, dst, **options)
        assert report.already_complete
        assert "nothing was written" in str(report)
        assert {path: path.stat().st_mtime_ns for path in dst.rglob("*")} == finished
        assert not partial(dst).exists()

    def test_what_is_finished_between_two_looks(self, source, dst, finished, monkeypatch):
        """The place is gone, and the destination there, when a part gets its turn."""
        run = import_module("ucp.conversion.parts.run")
        real, looks = run.is_complete, []

        def is_complete(dst, fingerprint, *, overwrite):
            looks.append(1)
            return len(looks) > 1 and real(dst, fingerprint, overwrite=overwrite)

        monkeypatch.setattr(run, "is_complete", is_complete)
        assert ucp.convert(source, dst, part="1/2").already_complete
        assert not partial(dst).exists()

    def test_another_conversion_does_not_replace_it_unasked(self, source, dst, finished):
        with pytest.raises(DestinationError, match=r"made differently:\n +compress"):
            ucp.convert(source, dst, part="1/2", compress=True)
        before = tree(dst)
        ucp.convert(source, dst, part="1/1", compress=True, overwrite=True, workers=1)
        assert tree(dst) == before
        with pytest.raises(DestinationError, match=r"made differently:\n +compress"):
            ucp.convert(source, dst, finalize=True, compress=True)
        ucp.convert(source, dst, finalize=True, compress=True, overwrite=True)
        assert (dst / "packs" / "00000.zst").exists()

    def test_the_rest_by_one_run(self, source, dst, wanted):
        done = ucp.convert(source, dst, part="2/3", workers=1)
        report = ucp.convert(source, dst, resume=True, workers=1)
        assert report.resumed_bytes == done.nbytes_written
        assert tree(dst) == wanted

    def test_the_rest_of_one_run_by_parts(self, source, dst, wanted):
        run_until(150, source, dst)
        reports = [ucp.convert(source, dst, part=(number, 2), workers=1) for number in (1, 2)]
        assert sum(report.resumed_bytes for report in reports) > 0
        ucp.convert(source, dst, finalize=True)
        assert tree(dst) == wanted


class TestWhatDoesNotGoTogether:
    def test_other_options(self, source, dst, small_blocks):
        ucp.convert(source, dst, part="1/2")
        before = tree(partial(dst))
        plans = len(list(partial(dst).glob("plan-*")))
        for asked in ({"part": "2/2"}, {"finalize": True}):
            with pytest.raises(DestinationError, match=r"(?s)dtypes: .*weight=float16 now.*remove \S+partial"):
                ucp.convert(source, dst, dtypes={"weight": "float16"}, **asked)
        after = tree(partial(dst))
        assert {name: after[name] for name in before} == before
        assert len(after) - len(before) == plans, "the plan of the other, which takes the place of none"

    def test_a_source_that_was_saved_again(self, dst, tmp_path, small_blocks):
        src = shutil.copytree(FIXTURES / "deepspeed" / "z1-dp4-bf16" / "checkpoint", tmp_path / "copy")
        ucp.convert(src, dst, part="1/2")
        os.utime(next(src.rglob("*optim_states.pt")))
        with pytest.raises(DestinationError, match="than then"):
            ucp.convert(src, dst, part="2/2")

    @pytest.mark.parametrize("again", [{"finalize": True}, {"resume": True}, {"part": "1/1"}])
    def test_rules_that_were_edited(self, tmp_path, dst, small_blocks, again):
        """Tensors of one shape under exchanged names: each is as long, and where the other was."""
        shards, rules = Shards(tmp_path / "two"), tmp_path / "rules.toml"
        states = {(name, "weight"): shards.whole(np.full((4, 4), n, "float32")) for n, name in enumerate("ab")}
        write_checkpoint(make_index(shards.folder, states))
        src = shards.folder
        asked = {"to": "huggingface", "settings": {"config": "none"}, "rename": rules}
        _write_rules(rules, a="x", b="y")
        ucp.convert(src, dst, part="1/1", **asked)
        _write_rules(rules, a="y", b="x")
        with pytest.raises(DestinationError, match="--rename"):
            ucp.convert(src, dst, **again, **asked)
        _write_rules(rules, a="x", b="y")
        ucp.convert(src, dst, finalize=True, **asked)
        _write_rules(rules, a="y", b="x")
        with pytest.raises(DestinationError, match="made differently"):
            ucp.convert(src, dst, resume=True, **asked)

    @pytest.mark.parametrize("more", [{"finalize": True}, {"verify": True}])
    def test_options_of_the_end_and_a_part(self, source, dst, more):
        with pytest.raises(UsageError, match=f"--{next(iter(more))} .*drop --part"):
            ucp.convert(source, dst, part="1/2", **more)

    @pytest.mark.parametrize("asked", [{"finalize": True}, {"resume": True}, {"part": "1/2"}])
    @pytest.mark.parametrize("is_gone", [False, True])
    def test_what_parts_did_outlasts_a_damaged_journal(self, source, dst, small_blocks, asked, is_gone):
        """Nothing else says which conversion they worked on: their bytes may be those of other options."""
        ucp.convert(source, dst, part="1/1", dtypes={"weight": "float16"})
        journal = partial(dst) / "journal.jsonl"
        journal.unlink() if is_gone else journal.write_text("garb")
        before = {name: data for name, data in tree(partial(dst)).items() if "data" in name or "parts" in name}
        with pytest.raises(DestinationError, match=rf"journal\.jsonl .*Remove {partial(dst)}"):
            ucp.convert(source, dst, **asked)
        assert before.items() <= tree(partial(dst)).items()

    @pytest.mark.parametrize(
        ("asked", "said"), [({"part": "2/2"}, "this part"), ({"finalize": True}, "--finalize again")]
    )
    def test_a_full_disk(self, source, dst, small_blocks, monkeypatch, asked, said):
        for number in (1, 2):
            ucp.convert(source, dst, part=(number, 2))

        def full(*words, **named):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Staging, "join", full)
        monkeypatch.setattr(Staging, "open", full)
        with pytest.raises(DestinationError, match=f"no space .*{said}"):
            ucp.convert(source, dst, **asked)

    def test_links_in_the_place(self, source, dst, tmp_path, small_blocks):
        ucp.convert(source, dst, part="1/2")
        (tmp_path / "elsewhere").mkdir()
        shutil.rmtree(partial(dst) / "parts")
        (partial(dst) / "parts").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(DestinationError, match=f"link in {partial(dst)}"):
            ucp.convert(source, dst, part="2/2")


class TestDamage:
    @pytest.fixture(autouse=True)
    def damaged(self, source):
        """A bit of a weight is not as the record of its checksum says."""
        index = index_of(source)
        ref = index.atoms["head"].states["weight"].fragments[0].ref
        file = Path(ref.path)
        status = file.stat()
        data = bytearray(file.read_bytes())
        data[ref.offset + 400] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        write_checkpoint(replace(index, path=str(source)))

    def test_of_the_source_is_found_by_a_part_that_read_a_record_whole(self, source, dst, small_blocks):
        with pytest.raises(CorruptError, match="CRC-32 differs"):
            ucp.convert(source, dst, part="1/1", workers=1)
        assert partial(dst).exists(), "others may be at work"
        assert not any(run.is_sealed for run in list_runs(Staging(dst)))

    def test_of_the_source_is_found_at_the_end_where_parts_read_some_of_a_record_each(self, source, dst, small_blocks):
        failed = 0
        for number in range(1, 31):
            try:
                ucp.convert(source, dst, part=(number, 30), workers=1)
            except CorruptError:
                failed += 1
        assert failed == 0
        with pytest.raises(CorruptError, match="CRC-32 differs"):
            ucp.convert(source, dst, finalize=True)
        assert not dst.exists()
        assert not partial(dst).exists()


def test_copies_that_differ(tmp_path, dst, small_blocks):
    """Told by every part that compares them, and at the end."""
    shards, array = Shards(tmp_path / "drifted"), np.arange(240, dtype="float32").reshape(30, 8)
    box = Box.full(array.shape)
    pieces = [Fragment(box=box, ref=shards.put(array + n, file=f"{n}.bin"), replica=n) for n in (0, 1)]
    state = StateIndex(dtype=DType.FLOAT32, global_shape=array.shape, fragments=tuple(pieces))
    write_checkpoint(make_index(shards.folder, {("w", "weight"): state}))
    for number in (1, 2, 1):
        with pytest.raises(ReplicaError, match="w/weight"):
            ucp.convert(shards.folder, dst, part=(number, 2), workers=1)
    assert partial(dst).exists(), "others may be at work"
    with pytest.raises(ReplicaError, match="w/weight"):
        ucp.convert(shards.folder, dst, finalize=True)
    assert not partial(dst).exists()
    in_parts(shards.folder, dst, 2, drift="first")
    ucp.convert(shards.folder, tmp_path / "whole", drift="first")
    assert tree(dst) == tree(tmp_path / "whole")


@pytest.mark.parametrize(("fsync", "expected"), [(True, True), (False, False)])
def test_a_part_waits_for_the_disk_as_no_other_machine_can(source, dst, small_blocks, monkeypatch, fsync, expected):
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    ucp.convert(source, dst, part="1/1", fsync=fsync, workers=1)
    assert (str(partial(dst) / "data" / "packs" / "00000.safetensors") in synced) is expected


@pytest.mark.parametrize(
    ("options", "compress"), [({"part": "2/3"}, True), ({"finalize": True}, False)], ids=["part", "finalize"]
)
def test_killed_at_many_steps(source, tmp_path, dst, small_blocks, options, compress):
    """What is left is never taken for whole, and the same command again, by itself, does the rest.

    Every step: tests/integration/conversion/test_every_call.py.
    """
    assert check_part_killed(source, tmp_path, dst, compress=compress, dense=3, **options) > 6


def check_part_killed(source, tmp_path, dst, *, compress, dense, **options):
    """Number of steps at which one of three parts, or the end of all, was killed and run again."""
    ucp.convert(source, tmp_path / "whole", workers=1, compress=compress)
    wanted, step, killed = tree(tmp_path / "whole"), 0, 0
    while True:
        for number in (1, 3) if "part" in options else (1, 2, 3):
            ucp.convert(source, dst, part=(number, 3), workers=1, compress=compress)
        status = run_until(step, source, dst, compress=compress, **options)
        killed += status != 0
        assert not dst.exists() or tree(dst) == wanted
        if "part" in options:
            ucp.convert(source, dst, workers=1, compress=compress, **options)
        ucp.convert(source, dst, workers=1, compress=compress, finalize=True)
        assert tree(dst) == wanted, f"killed at step {step}"
        assert not partial(dst).exists()
        shutil.rmtree(dst)
        if status == 0:
            return killed
        step += 1 + step // dense


def test_the_first_of_all_killed_at_many_steps(source, dst, wanted):
    """However far it came with the place, the next part finds its way; here at one step of five of the first 40."""
    check_first_killed(source, dst, wanted, steps=range(0, 40, 5))


def check_first_killed(source, dst, wanted, *, steps):
    for step in steps:
        run_until(step, source, dst, part="1/2")
        ucp.convert(source, dst, part="2/2", workers=1)
        ucp.convert(source, dst, part="1/2", workers=1)
        ucp.convert(source, dst, finalize=True)
        assert tree(dst) == wanted, f"killed at step {step}"
        shutil.rmtree(dst)


def _write_rules(path: Path, **names: str) -> None:
    """Rules that write parameters under other names."""
    path.write_text("".join(f'[[rename]]\nfrom = "{old}"\nto = "{new}"\n' for old, new in names.items()))
