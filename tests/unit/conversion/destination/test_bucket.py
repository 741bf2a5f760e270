"""What is written to a bucket equals what is written to a disk, whatever happens on the way; on memory:// here."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

import ucp
from tests.unit.conftest import shrink, tree
from ucp.conversion.prepare import SilentObserver
from ucp.errors import CorruptError, DestinationError, IncompleteError, OverlapError, UcpError, UsageError

FIXTURES = Path(__file__).parents[4] / "fixtures"
SOURCES = {
    "deepspeed": "deepspeed/z2-dp2-client-state/checkpoint",
    "megatron": "megatron/llama-tp2-pp2-dp2-full/checkpoint",
    "dcp": "torch/fsdp2-dp2-tp2/checkpoint",
    "huggingface": "huggingface/llama-sharded/model",
}
TARGETS = {
    "ucp": {},
    "virtual": {"virtual": True},
    "compressed": {"compress": True},
    "per-parameter": {"layout": "per-parameter"},
    "deepspeed": {"to": "deepspeed", "topology": "dp=3,zero=2"},
    "deepspeed-universal": {"to": "deepspeed-universal"},
    "dcp": {"to": "dcp", "topology": "dp=6"},
    "torch": {"to": "torch"},
    "huggingface": {"to": "huggingface", "settings": {"max_shard_size": "20KB"}},
    "megatron": {"to": "megatron", "topology": "tp=2"},
}
DST = "memory://bucket/run/out"
SMALL = 4 << 10
"""Bytes of a round, so that there are several."""


def objects(memory, url=DST):
    """What is stored below a URL."""
    prefix = url.removeprefix("memory:/") + "/"
    return {key.removeprefix(prefix): own.getvalue() for key, own in memory.fs.store.items() if key.startswith(prefix)}


@pytest.fixture
def scratch(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def small(monkeypatch):
    shrink_rounds(monkeypatch)


def shrink_rounds(monkeypatch):
    shrink(monkeypatch, block=1024, task=2048)
    monkeypatch.setattr(import_module("ucp.transfer.plan.rounds"), "ROUND", SMALL)


@pytest.fixture
def source():
    return FIXTURES / SOURCES["deepspeed"]


def converted(source, scratch, dst=DST, **asked):
    return ucp.convert(source, dst, scratch=scratch, workers=1, **asked)


CELLS = [
    *((tuple(SOURCES)[number % len(SOURCES)], target) for number, target in enumerate(TARGETS)),
    *((kind, target) for kind in SOURCES for target in ("dcp",)),
]
"""Every target from a source, and one of them from all; one cannot be written from its source."""


@pytest.mark.parametrize(("kind", "target"), sorted(set(CELLS)))
def test_it_equals_what_is_written_to_a_disk(kind, target, memory, scratch, tmp_path, small):
    src = FIXTURES / SOURCES[kind]
    try:
        ucp.convert(src, tmp_path / "disk", fsync=False, workers=1, **TARGETS[target])
    except UcpError as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            converted(src, scratch, **TARGETS[target])
        assert not objects(memory)
        return
    report = converted(src, scratch, verify=True, **TARGETS[target])
    assert objects(memory) == tree(tmp_path / "disk")
    assert not list(scratch.iterdir()), "nothing is left in the scratch folder"
    largest = max((len(own) for own in objects(memory).values()), default=0)
    if target not in ("compressed", "virtual"):
        assert report.scratch_bytes <= 2 * max(SMALL, largest)
        assert report.nbytes_out == ucp.plan(src, **TARGETS[target]).nbytes_out


class Killed(BaseException):
    """In place of kill -9: nothing reaches the store afterwards."""


class Mortal:
    """Ends the run at the n-th operation that changes the store, before or after it is done."""

    def __init__(self, monkeypatch, memory, *, at, done):
        self.at = self.left = at
        self.is_dead = False
        kind = type(memory.fs)
        for name in ("put_file", "pipe_file", "rm_file"):
            real = getattr(kind, name)
            monkeypatch.setattr(kind, name, self._mortal(real, done))

    @property
    def calls(self):
        """Operations that were asked for."""
        return self.at - self.left

    def _mortal(self, real, done):
        def call(*words, **named):
            self.left -= 1
            if self.is_dead or (self.left < 0 and not done):
                self.is_dead = True
                raise Killed
            result = real(*words, **named)
            if self.left < 0:
                self.is_dead = True
                raise Killed
            return result

        return call


@pytest.mark.parametrize(
    ("target", "replaces", "done"), [("ucp", False, False), ("dcp", False, True), ("deepspeed", True, False)]
)
def test_killed_at_many_moments_it_is_refused_or_complete_and_resumed(
    target, replaces, done, memory, source, tmp_path, small
):
    """One operation on the store of five is the last one, and each of the few that publish.

    Every operation: tests/integration/conversion/test_every_call.py.
    """
    check_killed(memory, source, tmp_path, target, replaces=replaces, done=done, stride=5)


def check_killed(memory, source, tmp_path, target, *, replaces, done, stride):
    ucp.convert(source, tmp_path / "disk", fsync=False, workers=1, **TARGETS[target])
    wanted = tree(tmp_path / "disk")
    with pytest.MonkeyPatch.context() as patch:
        unharmed = run_until(memory, patch, source, tmp_path / "unharmed", target, replaces, at=1 << 30, done=done)
    assert objects(memory) == wanted
    assert unharmed.calls > len(wanted)
    for at in sorted({*range(0, unharmed.calls, stride), *range(unharmed.calls - 4, unharmed.calls)}):
        with pytest.MonkeyPatch.context() as patch:
            assert run_until(memory, patch, source, tmp_path / f"{at}", target, replaces, at=at, done=done).is_dead
        if ".ucp-partial/conversion.json" in objects(memory):
            with pytest.raises(IncompleteError, match="--resume"):
                ucp.inspect(DST)
            assert ucp.api.is_unfinished(DST)
        elif replaces and objects(memory) != wanted:
            assert ucp.inspect(DST).format == "torch"
        other = tmp_path / f"other-{at}"
        other.mkdir()
        converted(source, other, resume=True, overwrite=replaces, **TARGETS[target])
        assert objects(memory) == wanted, at


def run_until(memory, patch, source, scratch, target, replaces, *, at, done):
    """Convert anew, or in place of another checkpoint, up to an operation on the store."""
    memory.fs.store.clear()
    scratch.mkdir()
    if replaces:
        converted(source, scratch, **TARGETS["torch"])
    mortal = Mortal(patch, memory, at=at, done=done)
    with suppress(Killed):
        converted(source, scratch, overwrite=replaces, **TARGETS[target])
    return mortal


class Interrupt(SilentObserver):
    """Observer that stops a run after so many bytes."""

    def __init__(self, after):
        self.left = after

    def advance(self, nbytes):
        self.left -= nbytes
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.fixture
def interrupted(memory, scratch, source, small):
    with pytest.raises(KeyboardInterrupt):
        converted(source, scratch, observer=Interrupt(3_000), **TARGETS["dcp"])
    assert not list(scratch.iterdir())
    return source


def test_what_was_uploaded_is_not_done_again(interrupted, memory, tmp_path):
    before = objects(memory)
    report = converted(interrupted, tmp_path, resume=True, **TARGETS["dcp"])
    assert report.resumed_bytes > 0
    assert report.nbytes_written > 0
    assert {name for name in before if name.endswith(".distcp")} < set(objects(memory))
    assert ucp.diff(DST, interrupted, extras=True).equal or ucp.verify(DST).ok
    again = converted(interrupted, tmp_path, resume=True, **TARGETS["dcp"])
    assert again.already_complete


def test_objects_that_changed_are_written_again(interrupted, memory, tmp_path):
    name = next(name for name in objects(memory) if name.endswith(".distcp"))
    memory.fs.pipe_file(f"{DST}/{name}", b"something else")
    ucp.convert(interrupted, tmp_path / "disk", fsync=False, **TARGETS["dcp"])
    converted(interrupted, tmp_path, resume=True, **TARGETS["dcp"])
    assert objects(memory) == tree(tmp_path / "disk")


def test_an_unfinished_conversion_is_not_begun_over_by_accident(interrupted, memory, tmp_path):
    with pytest.raises(DestinationError, match=rf"process {os.getpid()} on .*--resume.*--overwrite"):
        converted(interrupted, tmp_path, **TARGETS["dcp"])
    with pytest.raises(DestinationError, match=r"target: dcp then, ucp now"):
        converted(interrupted, tmp_path, resume=True)
    with pytest.raises(IncompleteError):
        ucp.convert(f"{DST}/__0_0.distcp", tmp_path / "out")
    converted(interrupted, tmp_path, overwrite=True)
    ucp.convert(interrupted, tmp_path / "disk", fsync=False)
    assert objects(memory) == tree(tmp_path / "disk")


@pytest.mark.parametrize("asked", [{"resume": True, **TARGETS["dcp"]}, {"overwrite": True}])
def test_what_others_put_into_an_unfinished_one(asked, interrupted, memory, tmp_path):
    """Readers would take it for a part of what is completed beside it."""
    memory.fs.pipe_file(f"{DST}/__9_9.distcp", b"x")
    before = objects(memory)
    with pytest.raises(DestinationError, match=r"1 file .*\n +__9_9"):
        converted(interrupted, tmp_path, **asked)
    assert objects(memory) == before
    memory.fs.rm_file(f"{DST}/__9_9.distcp")
    converted(interrupted, tmp_path, **asked)


def test_one_that_began_between_two_looks(memory, scratch, source, monkeypatch):
    bucket = import_module("ucp.conversion.destination.bucket")
    real = bucket.forget

    def meanwhile(url):
        real(url)
        memory.fs.pipe_file(f"{DST}/.ucp-partial/conversion.json", b"{}")

    monkeypatch.setattr(bucket, "forget", meanwhile)
    with pytest.raises(DestinationError, match="just begun"):
        converted(source, scratch)


def test_a_finished_one_is_replaced_only_when_asked(memory, scratch, source, tmp_path, small):
    converted(source, scratch)
    with pytest.raises(DestinationError, match=r"not empty; .*--overwrite"):
        converted(source, scratch, **TARGETS["torch"])
    with pytest.raises(DestinationError, match="made differently"):
        converted(source, scratch, resume=True, **TARGETS["torch"])
    memory.fs.pipe_file(f"{DST}/mine", b"x")
    with pytest.raises(DestinationError, match=r"1 file .*\n +mine"):
        converted(source, scratch, overwrite=True, **TARGETS["torch"])
    memory.fs.rm_file(f"{DST}/mine")
    converted(source, scratch, overwrite=True, **TARGETS["torch"])
    ucp.convert(source, tmp_path / "disk", fsync=False, **TARGETS["torch"])
    assert objects(memory) == tree(tmp_path / "disk")


def test_who_comes_later_takes_the_place(memory, scratch, source, small):
    class Other(SilentObserver):
        def advance(self, nbytes):
            memory.fs.pipe_file(f"{DST}/.ucp-partial/owner", b"another")

    with pytest.raises(DestinationError, match="began after"):
        converted(source, scratch, observer=Other())
    assert ".ucp-partial/owner" in objects(memory), "it is the other's now: nothing is removed"


def test_objects_that_somebody_else_replaced(memory, scratch, source, tmp_path, monkeypatch):
    bucket = import_module("ucp.conversion.destination.bucket")
    real = bucket.BucketDestination.finish

    def meanwhile(self, job, sums):
        result = real(self, job, sums)
        name = next(name for name in objects(memory) if name.startswith("packs/"))
        memory.fs.pipe_file(f"{DST}/{name}", b"of another")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(bucket.BucketDestination, "finish", meanwhile)
        with pytest.raises(DestinationError, match=r"1 object .*\n +packs/"):
            converted(source, scratch)
    ucp.convert(source, tmp_path / "disk", fsync=False)
    converted(source, scratch, resume=True)
    assert objects(memory) == tree(tmp_path / "disk")


def test_one_at_a_time_on_a_machine(memory, scratch, source):
    class Again(SilentObserver):
        said = ""

        def advance(self, nbytes):
            with pytest.raises(DestinationError, match=rf"process {os.getpid()} on .*{scratch}"):
                converted(source, scratch, resume=True)

    converted(source, scratch, observer=Again())


def test_two_that_begin_at_once(memory, scratch, source, monkeypatch):
    """Neither saw the other; the store lets one of them begin."""
    bucket = import_module("ucp.conversion.destination.bucket")
    real = bucket.read_mark

    def meanwhile(path):
        memory.fs.pipe_file(f"{DST}/.ucp-partial/conversion.json", b"{}")
        return real(path)

    monkeypatch.setattr(bucket, "read_mark", meanwhile)
    with pytest.raises(DestinationError, match="just begun"):
        converted(source, scratch)


def test_what_does_not_read_back_is_removed(memory, scratch, source, monkeypatch, small):
    def differs(job, path, **_):
        assert (path / "ucp.json").exists(), "what will be there is seen"
        assert not (path / ".ucp-partial").exists()
        assert "ucp.json" not in objects(memory), "and is not there for others"
        raise CorruptError("differs")

    monkeypatch.setattr(import_module("ucp.conversion.convert"), "verify_written", differs)
    with pytest.raises(CorruptError):
        converted(source, scratch, verify=True)
    assert not objects(memory)


def test_a_scratch_folder_that_is_too_small(memory, scratch, source, monkeypatch):
    bucket = import_module("ucp.conversion.destination.bucket")
    free = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(bucket.shutil, "disk_usage", lambda _: free)
    with pytest.raises(DestinationError, match=r"[\d,]+ free bytes .* 1,000.*--scratch or UCP_SCRATCH"):
        converted(source, scratch)
    assert not objects(memory)


def test_a_scratch_disk_that_is_full(memory, scratch, source, monkeypatch, small):
    bucket = import_module("ucp.conversion.destination.bucket")

    def full(*_, **__):
        raise OSError(28, "No space left on device", str(scratch))

    with monkeypatch.context() as patch:
        patch.setattr(bucket, "create_file", full)
        with pytest.raises(DestinationError, match=r"--scratch .*no space"):
            converted(source, scratch)
    assert not list(scratch.iterdir())
    converted(source, scratch, resume=True)
    assert ucp.diff(DST, source, extras=True).equal


def test_the_environment_names_the_scratch_folder(memory, scratch, source, monkeypatch):
    monkeypatch.setenv("UCP_SCRATCH", str(scratch / "absent"))
    with pytest.raises(DestinationError, match=f"folder at {scratch}/absent"):
        ucp.convert(source, DST)
    with pytest.raises(UsageError, match="drop --scratch"):
        ucp.convert(source, scratch / "out", scratch=scratch)


def test_what_a_killed_run_left_in_scratch_is_removed(memory, scratch, source):
    own = import_module("ucp.conversion.destination.uploads").Scratch(scratch, DST)
    (own.root / "big").write_bytes(b"x" * 100)
    import os

    os.close(own._lock)  # as when it is killed
    converted(source, scratch)
    assert not list(scratch.iterdir())


def test_stores_that_are_only_read(scratch, source):
    with pytest.raises(UsageError, match="read-only"):
        converted(source, scratch, dst="hf://owner/model")
    with pytest.raises(UsageError, match="s3://bucket/run; got memory://"):
        converted(source, scratch, dst="memory://")


def test_source_and_destination_apart(memory, scratch, source):
    url = memory.put(source, "memory://bucket/src")
    for dst in (url, f"{url}/below", "memory://bucket"):
        with pytest.raises(OverlapError):
            converted(url, scratch, dst=dst)


def test_a_second_conversion_of_the_process_takes_its_turn(memory, scratch, tmp_path, source):
    events: list[str] = []

    class Titles(SilentObserver):
        def begin(self, *, title, nbytes):
            events.append(title)
            waits.set()

    class First(Titles):
        """Has the second begin while it is at work, and goes on once that waits."""

        def begin(self, *, title, nbytes):
            if title == "convert":
                later.append(pool.submit(converted, source, tmp_path, f"{DST}2", verify=True, observer=Titles()))
                assert waits.wait(20)

    waits, later = threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        converted(source, scratch, verify=True, observer=First())
    assert later[0].result().nbytes_written
    assert events[:2] == ["waiting for another conversion of this process that uses a bucket", "convert"]
    assert objects(memory).keys() == objects(memory, f"{DST}2").keys()
