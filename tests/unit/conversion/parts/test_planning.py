"""The plan that parts share: each reads what is its own, and what cannot be trusted is as if it were not there."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

import ucp
from tests.unit.conftest import shrink
from tests.unit.conversion.test_crash import tree
from ucp.conversion.options import make_options
from ucp.conversion.parts import plan_file, planning
from ucp.conversion.parts.plan_file import read_plan, write_plan
from ucp.conversion.prepare import prepare
from ucp.conversion.source.read import index_of
from ucp.core.target import OutputFile
from ucp.errors import DestinationError, UnknownFormatError

FIXTURES = Path(__file__).parents[4] / "fixtures"
ZERO = FIXTURES / "deepspeed" / "z1-dp4-bf16" / "checkpoint"


def planned(src, folder, **asked):
    options = make_options(**asked)
    prepared = prepare(src, options)
    folder.mkdir(exist_ok=True)
    write_plan(folder, "key", prepared)
    return prepared


def used(job):
    """What the tasks of a job refer to."""
    base = len(job.target.placements)
    numbers = {section.placement for task in job.tasks for fill in task.fills for section in fill.sections}
    placements = {own: job.target.placements[own] for own in numbers if own < base}
    raw = {own: job.target.raw[own - base] for own in numbers if own >= base}
    slices = [own.slice for own in placements.values()]
    states = {(own.param, own.state): job.index.atoms[own.param].states[own.state] for own in slices}
    return placements, raw, {key: replace(own, digests=(), digest_nbytes=0) for key, own in states.items()}, numbers


@pytest.mark.parametrize(
    ("kept", "asked", "parts"),
    [
        ("deepspeed/z1-dp4-bf16", {}, 64),
        ("deepspeed/z1-pp2-tp2-dp2-bf16", {"to": "dcp", "topology": "dp_shard=4"}, 3),
        ("deepspeed/z3-dp4-fp32", {"compress": True}, 3),
        ("deepspeed/z0-fp16", {"layout": "virtual"}, 64),
        ("megatron/llama-tp2-dp2-dp", {"to": "megatron", "topology": "tp=4,dp=2"}, 3),
        ("megatron/mixtral-ep4-dp4-full", {"layout": "per-parameter", "drift": "first"}, 64),
    ],
)
def test_a_piece_is_what_the_part_would_plan(tmp_path, monkeypatch, kept, asked, parts):
    """All pieces are read; the first, one in the middle and the last are planned anew."""
    shrink(monkeypatch, block=256, task=512)
    whole = planned(FIXTURES / kept / "checkpoint", tmp_path / "shared", **asked)
    seen = set()
    for number in range(1, parts + 1):
        options = make_options(**asked, part=(number, parts))
        read = read_plan(tmp_path / "shared", "key", options)
        assert read is not None
        seen |= {task.number for task in read.job.tasks}
        if number not in {1, (parts + 1) // 2, parts}:
            continue
        own = prepare(FIXTURES / kept / "checkpoint", options)
        assert list(read.job.tasks) == list(own.job.tasks)
        numbers = used(own.job)[-1]
        assert used(read.job) == used(own.job)
        assert (read.fingerprint, read.facts, read.warnings) == (own.fingerprint, own.facts, own.warnings)
        assert (read.workers, read.threads, read.target) == (own.workers, own.threads, own.target)
        assert read.job.checking & numbers == own.job.checking & numbers
        assert read.job.crosswise & numbers == own.job.crosswise & numbers
        assert len(read.job.target.placements) == len(own.job.target.placements)
        paths = {fill.path for task in own.job.tasks for fill in task.fills}
        files = {file.path: file.nbytes for file in own.job.target.files if file.path in paths}
        assert {file.path: file.nbytes for file in read.job.target.files if file.path in paths} == files
        assert all(isinstance(file, OutputFile) and not file.literals for file in read.job.target.files)
        told = ("casts", "notes", "topology", "compress")
        assert [getattr(read.job.target, name) for name in told] == [getattr(own.job.target, name) for name in told]
        for name in ("path", "format", "files", "notes", "dropped"):
            assert getattr(read.job.index, name) == getattr(own.job.index, name)
        known = {ref for state in used(own.job)[2].values() for ref in (piece.ref for piece in state.fragments)}
        met = {r for r in own.job.index.records for ref in known if _lies_in(ref, r)}
        assert met <= set(read.job.index.records) <= set(own.job.index.records)
    assert seen == {task.number for task in whole.job.tasks}


def _lies_in(ref, record):
    return getattr(ref, "path", None) == record.path and record.offset <= ref.offset < record.offset + record.nbytes


def test_a_part_holds_no_more_than_is_its_own(tmp_path, small_blocks):
    options = {"to": "dcp", "topology": "dp_shard=4"}
    src = FIXTURES / "megatron" / "mixtral-ep4-dp4-full" / "checkpoint"
    planned(src, tmp_path / "shared", **options)

    def held(part):
        asked = make_options(**options, part=part)
        tracemalloc.start()
        try:
            read = read_plan(tmp_path / "shared", "key", asked)
            return tracemalloc.get_traced_memory()[0], len(read.job.tasks)
        finally:
            tracemalloc.stop()

    (own, tasks), (whole, all_tasks) = held("17/32"), held("1/1")
    assert 0 < tasks < all_tasks / 16
    assert own < whole / 8


class TestWhatIsNotTrusted:
    @pytest.fixture
    def shared(self, tmp_path, small_blocks):
        planned(ZERO, tmp_path / "shared")
        return tmp_path / "shared"

    def read(self, shared, key="key"):
        return read_plan(shared, key, make_options(part="1/2"))

    def test_what_is_there_is(self, shared):
        assert self.read(shared) is not None

    def test_none_and_another(self, shared):
        assert self.read(shared, "other") is None
        os.rename(shared / "plan-key", shared / "plan-other")
        assert self.read(shared, "other") is None, "of another conversion, by the name of this"

    def test_any_damage(self, shared):
        """A flipped bit, a cut, a byte more: in chunks of this part, or in the head."""
        data = (shared / "plan-key").read_bytes()
        whole = self.read(shared)
        for at in range(0, len(data), 197):
            (shared / "plan-key").write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            read = self.read(shared)
            assert read is None or list(read.job.tasks) == list(whole.job.tasks), f"byte {at}"
        for cut in (b"", data[:-1], data[1:], data[: len(data) // 2], data + b"x", b"\0" * len(data)):
            (shared / "plan-key").write_bytes(cut)
            assert self.read(shared) is None

    def test_nothing_of_it_is_run(self, shared, tmp_path):
        class Evil:
            def __reduce__(self):
                return (os.mkdir, (str(tmp_path / "evil"),))

        (shared / "plan-key").write_bytes(pickle.dumps(Evil()))
        assert self.read(shared) is None
        assert not (tmp_path / "evil").exists()

    @pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
    def test_what_others_may_write_to(self, shared, mode):
        (shared / "plan-key").chmod(mode)
        assert self.read(shared) is None

    def test_what_another_user_wrote(self, shared, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert self.read(shared) is None

    def test_a_link_and_a_folder(self, shared):
        os.rename(shared / "plan-key", shared / "real")
        (shared / "plan-key").symlink_to("real")
        assert self.read(shared) is None
        (shared / "plan-key").unlink()
        (shared / "plan-key").mkdir()
        assert self.read(shared) is None

    @pytest.mark.parametrize("change", ["time", "length", "gone"])
    def test_of_a_source_that_was_changed(self, tmp_path, small_blocks, change):
        src = shutil.copytree(ZERO, tmp_path / "copy")
        planned(src, tmp_path / "shared")
        assert self.read(tmp_path / "shared") is not None
        file = next(src.rglob("*optim_states.pt"))
        if change == "time":
            os.utime(file)
        elif change == "length":
            status = file.stat()
            file.write_bytes(file.read_bytes() + b"x")
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        else:
            file.unlink()
        assert self.read(tmp_path / "shared") is None


class TestTheFirstPlans:
    @pytest.fixture
    def plans(self, monkeypatch):
        """Sources that were planned."""
        made, real = [], planning.prepare
        monkeypatch.setattr(planning, "prepare", lambda src, *more: (made.append(src), real(src, *more))[1])
        return made

    @pytest.fixture
    def dst(self, tmp_path):
        return tmp_path / "out"

    def partial(self, dst):
        return dst.with_name("out.ucp-partial")

    def test_once_for_all(self, tmp_path, dst, small_blocks, plans):
        for number in range(1, 6):
            ucp.convert(ZERO, dst, part=(number, 5), workers=1)
        ucp.convert(ZERO, dst, part=(2, 3), workers=2)
        assert len(plans) == 1
        ucp.convert(ZERO, dst, finalize=True)
        ucp.convert(ZERO, tmp_path / "whole")
        assert tree(dst) == tree(tmp_path / "whole")

    def test_once_for_all_at_once(self, dst, small_blocks, plans):
        failed = []

        def run(number):
            try:
                ucp.convert(ZERO, dst, part=(number, 4), workers=1)
            except BaseException as error:
                failed.append(error)
                raise

        team = [threading.Thread(target=run, args=(number,)) for number in range(1, 5)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        assert (failed, len(plans)) == ([], 1)
        ucp.convert(ZERO, dst, finalize=True)

    def test_other_options_are_other_plans(self, tmp_path, dst, small_blocks, plans):
        ucp.convert(ZERO, dst, part="1/2")
        ucp.convert(ZERO, dst, part="1/2", memory="256M", workers=1, fsync=False, overwrite=True)
        ucp.convert(ZERO, dst, part="1/2", engine="serial")
        assert len(plans) == 1
        with pytest.raises(DestinationError, match="other options"):
            ucp.convert(ZERO, dst, part="1/2", exclude=["*/exp_avg"])
        assert len(plans) == 2

    def test_a_copy_of_the_source_is_another(self, tmp_path, dst, small_blocks, plans):
        ucp.convert(ZERO, dst, part="1/2")
        with pytest.raises(DestinationError, match="another source"):
            ucp.convert(shutil.copytree(ZERO, tmp_path / "copy"), dst, part="1/2")
        assert len(plans) == 2

    def test_rules_that_were_edited(self, tmp_path, dst, small_blocks, plans):
        rules = tmp_path / "rules.toml"
        rule = '[[rename]]\nfrom = "{name}"\norder = [1, 0]\nto = "turned"\n'
        first, second = [name for name, atom in index_of(ZERO).atoms.items() if len(atom.global_shape) == 2][:2]
        rules.write_text(rule.format(name=first))
        ucp.convert(ZERO, dst, part="1/2", rename=rules)
        rules.write_text(rule.format(name=second))
        with pytest.raises(DestinationError, match="those of --rename"):
            ucp.convert(ZERO, dst, part="2/2", rename=rules)
        assert len(plans) == 2

    def test_a_damaged_plan_is_made_again(self, dst, small_blocks, plans):
        ucp.convert(ZERO, dst, part="1/2")
        (plan,) = (path for path in self.partial(dst).glob("plan-*") if path.suffix != ".lock")
        plan.write_bytes(b"damaged")
        ucp.convert(ZERO, dst, part="2/2")
        assert len(plans) == 2
        assert plan.stat().st_size > 100
        ucp.convert(ZERO, dst, finalize=True)

    def test_a_plan_that_cannot_be_written(self, dst, small_blocks, plans, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(plan_file, "_packed", full)
        for number in (1, 2):
            ucp.convert(ZERO, dst, part=(number, 2))
        assert len(plans) == 2
        assert not [path for path in self.partial(dst).glob("plan-*") if path.suffix != ".lock"]
        ucp.convert(ZERO, dst, finalize=True)

    def test_what_fails_leaves_nothing(self, tmp_path, dst):
        (tmp_path / "empty").mkdir()
        with pytest.raises(UnknownFormatError):
            ucp.convert(tmp_path / "empty", dst, part="1/2")
        with pytest.raises(ucp.UcpError):
            ucp.convert(ZERO, dst, part="1/2", settings={"no_such": 1})
        assert not self.partial(dst).exists()

    def test_who_waits_for_one_that_fails_plans_for_itself(self, dst, small_blocks, plans):
        """The first is killed with its plan unmade."""
        key = planning._key(ZERO, make_options())
        self.partial(dst).mkdir()
        lock = (self.partial(dst) / f"plan-{key}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        release = threading.Timer(0.3, lock.close)
        release.start()
        ucp.convert(ZERO, dst, part="1/1")
        release.join()
        assert len(plans) == 1
        ucp.convert(ZERO, dst, finalize=True)

    def test_nobody_waits_for_good(self, dst, small_blocks, plans, monkeypatch):
        """The machine of the first stands still."""
        monkeypatch.setattr(planning, "_PATIENCE", 0.0)
        self.partial(dst).mkdir()
        with (self.partial(dst) / f"plan-{planning._key(ZERO, make_options())}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for number in (1, 2):
                ucp.convert(ZERO, dst, part=(number, 2))
            assert len(plans) == 2
        ucp.convert(ZERO, dst, finalize=True)

    def test_afterwards_nothing_is_left_of_it(self, dst, small_blocks):
        ucp.convert(ZERO, dst, part="1/1")
        ucp.convert(ZERO, dst, finalize=True)
        assert ucp.convert(ZERO, dst, part="1/1").already_complete
        assert [path.name for path in dst.parent.iterdir()] == ["out"]
