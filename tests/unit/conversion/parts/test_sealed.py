"""What `--finalize` takes as parts noted it, and what it reads back: nothing that may be wrong is believed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import ucp
from tests.unit.conftest import partial, tree
from tests.unit.conversion.test_crash import OPTIONS, run_until
from ucp.conversion.destination.existing import ConversionId
from ucp.conversion.destination.staging import Staging
from ucp.conversion.journal import parse_done
from ucp.conversion.options import make_options
from ucp.conversion.parts.journals import PartJournal, list_runs
from ucp.conversion.prepare import prepare
from ucp.core.text.units import nbytes_text
from ucp.errors import DestinationError, UnfinishedError
from ucp.transfer.plan.tasks import Share
from ucp.transfer.worker import Worker

PACK = "packs/00000.safetensors"
WATCHED: list[str] = []
OPENED: list[str] = []


def _hook(event: str, args: tuple[object, ...]) -> None:
    """Files below what grows that are opened to be read, while there is one that is watched."""
    if event == "open" and WATCHED and str(args[0]).startswith(WATCHED[0]):
        flags = int(str(args[2]))
        if flags & os.O_ACCMODE != os.O_WRONLY and not Path(str(args[0])).is_dir():
            OPENED.append(str(args[0]))


sys.addaudithook(_hook)


@pytest.fixture
def read(monkeypatch):
    """Bytes of what grows that were read back; by whoever finalizes, in no other way than the one that is counted."""
    module, counted = import_module("ucp.conversion.journal"), [0]
    real = module._holds_bytes

    def stands(root, task, done):
        answer = real(root, task, done)
        for path, section in ((str(root / fill.path), section) for fill in task.fills for section in fill.sections):
            if path in OPENED:
                OPENED.remove(path)
            counted[0] += section.nbytes
        return answer

    def amount():
        assert OPENED == []
        return counted[0]

    OPENED.clear()
    monkeypatch.setattr(module, "_holds_bytes", stands)
    return amount


def part(source, dst, number, parts=3, **options):
    return ucp.convert(source, dst, part=(number, parts), workers=1, **options).nbytes_written


def finalize(source, dst, **options):
    OPENED.clear()
    WATCHED.append(str(partial(dst) / "data"))
    try:
        return ucp.convert(source, dst, finalize=True, workers=1, fsync=False, **options)
    finally:
        WATCHED.clear()


def journal_of(dst, number):
    (run,) = (run for run in list_runs(Staging(dst)) if run.share.number == number)
    return run.path


def cut_off(path: Path) -> None:
    """As if the run had been killed after its last task."""
    lines = path.read_bytes().splitlines(keepends=True)
    assert b'"end"' in lines[-1]
    path.write_bytes(b"".join(lines[:-1]))


def scribble(source, dst, number, parts=3) -> None:
    """Damage a byte of the last task of a part."""
    task = prepare(source, make_options(part=f"{number}/{parts}")).job.tasks[-1]
    with (partial(dst) / "data" / task.fills[-1].path).open("r+b") as file:
        file.seek(task.fills[-1].offset)
        byte = file.read(1)
        file.seek(task.fills[-1].offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_is_read_that_sealed_parts_noted(source, tmp_path, dst, small_blocks, read, options):
    ucp.convert(source, tmp_path / "whole", workers=1, **options)
    total = sum(part(source, dst, number, **options) for number in (3, 1, 2))
    assert read() == 0
    report = finalize(source, dst, **options)
    assert (report.believed_bytes, report.resumed_bytes, read()) == (total, total, 0)
    assert tree(dst) == tree(tmp_path / "whole")


def test_what_was_not_synced_is_read(source, dst, wanted, read):
    own = [part(source, dst, number, fsync=number != 2) for number in (1, 2, 3)]
    report = finalize(source, dst)
    assert (read(), report.believed_bytes, report.resumed_bytes) == (own[1], own[0] + own[2], sum(own))
    assert f"{nbytes_text(own[0] + own[2])} trusted from the journal, {nbytes_text(own[1])} read back" in str(report)
    assert tree(dst) == wanted


class TestCutOff:
    def test_the_run_that_follows_vouches_for_both(self, source, dst, wanted, read):
        """It looks at what the first did; nobody has to look again."""
        own = [part(source, dst, number) for number in (1, 2, 3)]
        cut_off(journal_of(dst, 2))
        assert part(source, dst, 2) == 0
        assert read() == own[1]
        assert finalize(source, dst).believed_bytes == sum(own)
        assert read() == own[1]
        assert tree(dst) == wanted

    def test_a_second_run_that_is_cut_off_puts_the_first_in_doubt(self, source, dst, wanted, read):
        """It may have been at work on bytes that it saw were wrong."""
        own = [part(source, dst, number) for number in (1, 2, 3)]
        assert run_until(20, source, dst, part="2/3") < 0
        assert len([run for run in list_runs(Staging(dst)) if run.share.number == 2]) == 2
        assert finalize(source, dst).believed_bytes == own[0] + own[2]
        assert read() == own[1]
        assert tree(dst) == wanted

    def test_one_beside_it_that_began_before_puts_it_in_doubt(self, source, dst, wanted, read):
        own = [part(source, dst, 1)]
        staging = Staging(dst)
        head = json.loads((partial(dst) / "journal.jsonl").read_text().splitlines()[0])
        staging.join(ConversionId(head["fingerprint"], head["made"]), overwrite=False)
        other = PartJournal(staging, Share(2, 3))
        own += [part(source, dst, number) for number in (2, 3)]
        other.close()
        staging.release()
        assert finalize(source, dst).believed_bytes == own[0] + own[2]
        assert read() == own[1]
        assert tree(dst) == wanted

    def test_at_any_step_nothing_of_it_is_believed(self, source, dst, wanted, read):
        step, killed = 0, 0
        while True:
            for number in (1, 3):
                part(source, dst, number)
            done = run_until(step, source, dst, part="2/3")
            if done == 0 or any(run.is_sealed for run in list_runs(Staging(dst)) if run.share.number == 2):
                break  # killed after its seal, it had come to its end
            killed += 1
            scribble(source, dst, 2)
            with pytest.raises(UnfinishedError):
                finalize(source, dst)
            part(source, dst, 2)
            finalize(source, dst)
            assert tree(dst) == wanted, f"killed at step {step}"
            shutil.rmtree(dst)
            step += 3 + step // 2
        assert killed > 5


@pytest.mark.parametrize("edit", ["last line", "half", "changed", "missing", "added", "head", "all"])
def test_a_journal_that_is_not_as_it_was_written_is_not_believed(source, dst, wanted, read, edit):
    """As after a crash: the seal is of all lines above it."""
    own = [part(source, dst, number) for number in (1, 2, 3)]
    path = journal_of(dst, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        {
            "last line": b"".join(lines)[:-3],
            "half": b"".join([*lines[:3], lines[3][:9], *lines[4:]]),
            "changed": b"".join([lines[0].replace(b'"host"', b'"hosts"'), *lines[1:]]),
            "missing": b"".join([*lines[:2], *lines[3:]]),
            "added": b"".join([*lines, lines[2]]),
            "head": b"".join(lines[1:]),
            "all": b"",
        }[edit]
    )
    if edit in ("half", "missing", "all"):  # notes are missing, and so are their tasks
        with pytest.raises(UnfinishedError, match=r"part 2/3: .*it (was|ran)"):
            finalize(source, dst)
        assert 0 <= read() < own[1]
        part(source, dst, 2)
    else:
        assert finalize(source, dst).believed_bytes == own[0] + own[2]
        assert read() == own[1]
    finalize(source, dst)
    assert tree(dst) == wanted


class TestFiles:
    @pytest.fixture
    def sealed(self, source, dst, wanted):
        """All parts of three are done."""
        return [part(source, dst, number) for number in (1, 2, 3)]

    @pytest.mark.parametrize("how", ["removed", "cut", "emptied"])
    def test_what_was_lost_is_missing(self, source, dst, sealed, how):
        damage(partial(dst) / "data" / PACK, how)
        with pytest.raises(UnfinishedError, match=r"part 3/3: .*no longer"):
            finalize(source, dst)

    @pytest.mark.parametrize("how", ["removed", "cut", "emptied"])
    def test_what_another_part_made_again_is_not_believed(self, source, dst, sealed, wanted, how):
        damage(partial(dst) / "data" / PACK, how)
        assert part(source, dst, 3) > 0
        if how != "cut":
            with pytest.raises(UnfinishedError, match=r"part 1/3: .*no longer"):
                finalize(source, dst)
        for number in (1, 2):
            part(source, dst, number)
        assert finalize(source, dst).believed_bytes < sum(sealed)
        assert tree(dst) == wanted

    def test_what_was_lost_while_a_part_ran_is_not_believed(self, source, dst, wanted, monkeypatch):
        """One that began before, and sealed its journal after another had made the file again."""
        real = PartJournal.end

        def end(journal, *, fsync):
            monkeypatch.setattr(PartJournal, "end", real)
            (partial(dst) / "data" / PACK).unlink()
            part(source, dst, 2)
            real(journal, fsync=fsync)

        monkeypatch.setattr(PartJournal, "end", end)
        for number in (1, 3):
            part(source, dst, number)
        with pytest.raises(UnfinishedError, match=r"part 1/3: "):
            finalize(source, dst)

    def test_a_pack_of_another_length_is_not_believed(self, source, dst, small_blocks):
        for number in (1, 2, 3):
            part(source, dst, number, compress=True)
        with (partial(dst) / "data" / "packs" / "00000.zst").open("r+b") as file:
            file.truncate(20)
        with pytest.raises(UnfinishedError):
            finalize(source, dst, compress=True)


def damage(path: Path, how: str) -> None:
    if how == "removed":
        path.unlink()
    else:
        os.truncate(path, 0 if how == "emptied" else path.stat().st_size - 8)


class TestOtherRuns:
    @pytest.mark.parametrize("how", ["removed", "emptied"])
    def test_a_resume_that_was_cut_off_puts_everything_in_doubt(self, source, dst, wanted, monkeypatch, how):
        """It has made the files again that it found lost, and written nothing yet."""
        for number in (1, 2, 3):
            part(source, dst, number)
        damage(partial(dst) / "data" / PACK, how)

        def killed(worker, task):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "carry_out", killed)
            with pytest.raises(KeyboardInterrupt):
                ucp.convert(source, dst, workers=1, resume=True)
        assert (partial(dst) / "data" / PACK).stat().st_size == len(wanted[PACK])
        with pytest.raises(UnfinishedError, match=r"(?s)part 1/3: .*part 2/3: .*part 3/3: "):
            finalize(source, dst)
        ucp.convert(source, dst, workers=1, resume=True)
        assert tree(dst) == wanted

    @pytest.mark.parametrize("step", [10, 20, 40, 70])
    def test_a_resume_killed_at_any_step(self, source, dst, wanted, step):
        own = [part(source, dst, number) for number in (1, 2)]
        assert run_until(step, source, dst, resume=True) < 0
        is_reopened = "resumed" in (partial(dst) / "journal.jsonl").read_text()
        part(source, dst, 3)
        believed = finalize(source, dst).believed_bytes
        assert (believed < sum(own)) is is_reopened
        assert tree(dst) == wanted

    def test_parts_again_after_it_are_believed(self, source, dst, wanted, read):
        own = [part(source, dst, number) for number in (1, 2)]
        assert run_until(25, source, dst, resume=True) < 0
        for number in (1, 2, 3):
            part(source, dst, number)
        before = read()
        assert finalize(source, dst).believed_bytes > sum(own)
        assert read() == before
        assert tree(dst) == wanted

    def test_a_journal_of_a_folder_that_was_begun_anew_is_not_believed(self, source, dst, wanted):
        for number in (1, 2, 3):
            part(source, dst, number)
        left = journal_of(dst, 2)
        kept = left.read_bytes()
        shutil.rmtree(partial(dst))
        for number in (1, 3):
            part(source, dst, number)
        left.write_bytes(kept)
        with pytest.raises(UnfinishedError, match=r"part 2/3: .*no longer"):
            finalize(source, dst)

    def test_a_part_whose_folder_was_removed_stops(self, source, dst, small_blocks, monkeypatch):
        """It must not write to what takes the folder's place."""
        real = PartJournal.note

        def note(journal, done):
            monkeypatch.setattr(PartJournal, "note", real)
            shutil.rmtree(partial(dst))
            part(source, dst, 1, dtypes={"weight": "float16"})
            real(journal, done)

        monkeypatch.setattr(PartJournal, "note", note)
        with pytest.raises(DestinationError, match="begun anew"):
            part(source, dst, 1)
        own = sum(part(source, dst, number, dtypes={"weight": "float16"}) for number in (1, 2, 3))
        assert finalize(source, dst, dtypes={"weight": "float16"}).believed_bytes > own


def test_notes_of_one_task_that_differ_are_not_believed(source, dst, wanted, read):
    """As of nodes whose libraries compress otherwise: the bytes say which is right."""
    own = sum(part(source, dst, number) for number in (1, 2, 3))
    (run,) = (run for run in list_runs(Staging(dst)) if run.share.number == 2)
    noted = [done for line in run.read_lines() if (done := parse_done(line))]
    for at in (0, 1):
        journal = PartJournal(Staging(dst), Share(2, 3))
        for number, done in enumerate(noted):
            journal.note(
                replace(done, sums=[one._replace(digest="0" * 16) for one in done.sums]) if number == at else done
            )
        journal.end(fsync=True)
        journal.close()
    report = finalize(source, dst)
    doubted = sum(one.nbytes for done in noted[:2] for one in done.sums)
    assert (report.believed_bytes, report.resumed_bytes) == (own - doubted, own)
    assert read() >= doubted
    assert tree(dst) == wanted


def test_files_are_on_the_disk_with_their_names_before_it_is_noted(source, dst, small_blocks, monkeypatch):
    synced: list[tuple[str, bool]] = []

    def sync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((path, any(b'"end"' in own.read_bytes() for own in partial(dst).glob("parts/*.jsonl"))))

    monkeypatch.setattr(os, "fsync", sync)
    part(source, dst, 1, 1)
    data = partial(dst) / "data"
    for path in (data / PACK, data / "packs", data):
        assert (str(path), False) in synced
    assert [path for path, ended in synced if ended] == [str(journal_of(dst, 1)), str(partial(dst) / "parts")]


def test_a_disk_that_fails_leaves_no_seal_and_puts_others_in_doubt(source, dst, wanted, monkeypatch):
    def sync(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(PACK):
            raise OSError(5, "Input/output error")

    part(source, dst, 2, 2)
    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(DestinationError, match="Input/output error"):
        part(source, dst, 1, 2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    assert [(run.has_ended, run.is_sealed) for run in list_runs(Staging(dst))] == [(False, False), (True, True)]
    assert finalize(source, dst).believed_bytes == 0, "the system says to one of them that bytes of the file are lost"
    assert tree(dst) == wanted


def test_with_verify_nothing_is_believed(source, dst, wanted, read):
    own = sum(part(source, dst, number) for number in (1, 2, 3))
    scribble(source, dst, 2)
    with pytest.raises(UnfinishedError, match="part 2/3: 1 task"):
        finalize(source, dst, verify=True)
    assert read() == own
    part(source, dst, 2)
    assert finalize(source, dst, verify=True).believed_bytes == 0
    assert tree(dst) == wanted
