"""Reliability: where a conversion may write, what it does with damage, with full disks, with copies that differ."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import ucp
from tests.unit.conftest import partial, tree
from ucp.conversion.prepare import SilentObserver
from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box
from ucp.core.tensor import DType
from ucp.errors import (
    BusyError,
    CorruptError,
    DestinationError,
    IncompleteError,
    OverlapError,
    ReplicaError,
    SourceError,
    UnknownFormatError,
    UsageError,
)
from ucp.source.read import index_of
from ucp.testing.handmade import Shards, make_index, write_checkpoint


def look(root: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(p): (p.stat().st_mtime_ns, p.stat().st_mode, p.read_bytes() if p.is_file() else b"")
        for p in [root, *root.rglob("*")]
    }


class TestDestination:
    def test_the_source_is_left_alone(self, source, tmp_path, small_blocks):
        before = look(source)
        ucp.convert(source, tmp_path / "out", verify=True)
        ucp.convert(source, tmp_path / "virtual", virtual=True)
        assert look(source) == before

    @pytest.mark.parametrize("place", [".", "inside", "inside/deeper", "../source", "../link", "../link/inside"])
    def test_the_source_and_what_lies_in_it_are_refused(self, source, tmp_path, place):
        (tmp_path / "link").symlink_to(source)
        before = look(source)
        with pytest.raises(OverlapError, match=f"source {source} or"):
            ucp.convert(source, source / place, overwrite=True)
        assert look(source) == before

    @pytest.mark.parametrize("nbytes", [250, 255, 300])
    def test_a_name_that_leaves_no_room_for_what_grows_beside_it(self, source, tmp_path, nbytes):
        with pytest.raises(DestinationError, match="shorter name"):
            ucp.convert(source, tmp_path / ("d" * nbytes))
        assert [path.name for path in tmp_path.iterdir()] == [source.name]

    def test_a_file_is_refused(self, source, tmp_path):
        (tmp_path / "out").write_text("mine")
        with pytest.raises(DestinationError, match=f"{tmp_path / 'out'}; a file"):
            ucp.convert(source, tmp_path / "out", overwrite=True)
        assert (tmp_path / "out").read_text() == "mine"

    def test_a_folder_that_is_not_there_is_not_made(self, source, tmp_path):
        with pytest.raises(DestinationError, match=f"directory {tmp_path / 'a'} does"):
            ucp.convert(source, tmp_path / "a" / "b")

    def test_a_link_to_an_empty_folder_is_followed(self, source, tmp_path):
        (tmp_path / "disk").mkdir()
        (tmp_path / "disk" / "real").mkdir()
        (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
        ucp.convert(source, tmp_path / "out")
        assert (tmp_path / "out").is_symlink()
        assert (tmp_path / "disk" / "real" / "ucp.json").is_file()

    def test_what_others_wrote_is_never_replaced(self, source, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("mine")
        for overwrite, message in ((False, "not empty"), (True, "not written by ucp")):
            with pytest.raises(DestinationError, match=message):
                ucp.convert(source, tmp_path / "out", overwrite=overwrite)
        assert tree(tmp_path / "out") == {"thesis.tex": b"mine"}
        assert not partial(tmp_path / "out").exists()

    def test_what_can_never_be_finished_is_discarded_when_asked(self, source, tmp_path):
        """What an older version left of a conversion that it could not carry out blocks nothing for good."""
        left = partial(tmp_path / "out")
        (left / "data" / "atoms").mkdir(parents=True)
        (left / "data" / "atoms" / "half").write_bytes(b"half")
        begun = {"fingerprint": "another", "made": {"target": "ucp", "layout": "per-parameter"}}
        (left / "journal.jsonl").write_text(json.dumps(begun) + "\n")
        before = tree(left)
        with pytest.raises(DestinationError, match=r"unfinished conversion .*--resume, .*--overwrite"):
            ucp.convert(source, tmp_path / "out")
        with pytest.raises(DestinationError, match=r"layout: per-parameter then, .*\n.*--overwrite"):
            ucp.convert(source, tmp_path / "out", resume=True)
        assert {path: data for path, data in tree(left).items() if path != "lock"} == before
        ucp.convert(source, tmp_path / "out", overwrite=True)
        assert not left.exists()
        assert "atoms/half" not in tree(tmp_path / "out")
        assert ucp.diff(source, tmp_path / "out").equal

    @pytest.mark.parametrize("place", [".", "..", "../../here"])
    def test_the_current_folder_is_refused(self, source, tmp_path, monkeypatch, place):
        (tmp_path / "here" / "deeper").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "here" / "deeper")
        with pytest.raises(DestinationError, match="current folder"):
            ucp.convert(source, place)

    def test_two_at_once_do_not_mix(self, source, tmp_path, monkeypatch):
        monkeypatch.setattr(import_module("ucp.conversion.destination.staging"), "_PATIENCE", 0.2)

        class Watch(SilentObserver):
            error: Exception | None = None

            def advance(self, nbytes):
                with pytest.raises(BusyError, match=f": process {os.getpid()} on"):
                    ucp.convert(source, tmp_path / "out", resume=True)

        ucp.convert(source, tmp_path / "out", workers=1, observer=Watch())
        assert ucp.diff(source, tmp_path / "out").equal

    def test_one_that_waited_finds_the_other_done(self, source, tmp_path):
        """The second was told to go on; by the time it may, all is done: it must not do it again over the first."""
        results: list[ucp.ConvertReport] = []

        class Watch(SilentObserver):
            started = False

            def advance(self, nbytes):
                if not self.started:
                    self.started = True
                    thread.start()
                    time.sleep(0.3)

        def second():
            results.append(ucp.convert(source, tmp_path / "out", resume=True, workers=1))

        thread = threading.Thread(target=second)
        ucp.convert(source, tmp_path / "out", workers=1, observer=Watch())
        thread.join()
        (found,) = results
        assert found.already_complete
        assert ucp.diff(source, tmp_path / "out").equal
        assert not partial(tmp_path / "out").exists()

    def test_the_lock_is_let_go_after_a_refusal(self, source, tmp_path):
        """In one process: a refused run must not be in the way of the next."""

        class StopError(Exception): ...

        class Watch(SilentObserver):
            def advance(self, nbytes):
                raise StopError

        with pytest.raises(StopError):
            ucp.convert(source, tmp_path / "out", workers=1, observer=Watch())
        with pytest.raises(DestinationError, match=r"dtypes: .*weight=float16 now"):
            ucp.convert(source, tmp_path / "out", resume=True, dtypes={"weight": "float16"})
        start = time.monotonic()
        ucp.convert(source, tmp_path / "out", resume=True)
        assert time.monotonic() - start < 5

    def test_nothing_is_left_of_a_run_that_did_nothing(self, source, tmp_path):
        """There is nothing to continue, and the next try needs no --overwrite."""

        class Watch(SilentObserver):
            def begin(self, *, title, nbytes):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ucp.convert(source, tmp_path / "out", observer=Watch())
        assert [path.name for path in tmp_path.iterdir()] == [source.name]
        ucp.convert(source, tmp_path / "out")

    def test_links_into_what_grows_are_refused(self, source, tmp_path):
        class Watch(SilentObserver):
            def advance(self, nbytes):
                link = tmp_path / "link"
                if not link.exists():
                    link.symlink_to(partial(tmp_path / "out") / "data")
                with pytest.raises(IncompleteError, match="out --resume"):
                    ucp.open(link)

        ucp.convert(source, tmp_path / "out", workers=1, observer=Watch())


class TestDamage:
    def flip(self, path: Path, offset: int) -> None:
        info = path.stat()
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))

    @pytest.fixture
    def damaged(self, source):
        """The source with a flipped bit in the middle of a weight: beyond what its identity looks at? No: tiny."""
        document = (source / "ucp.json").read_text()
        index = index_of(source)
        ref = index.atoms["head"].states["weight"].fragments[0].ref
        self.flip(Path(ref.path), ref.offset + 400)
        del document
        write_checkpoint(replace(index, path=str(source)))
        return source

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_flipped_bit_in_a_shard_is_named(self, damaged, tmp_path, workers, small_blocks):
        with pytest.raises(CorruptError, match=r"1 record: .*\n.*weight\.bin.*head/weight"):
            ucp.convert(damaged, tmp_path / "out", workers=workers)
        assert not (tmp_path / "out").exists()
        assert not partial(tmp_path / "out").exists()

    def test_an_old_destination_survives_a_damaged_source(self, source, damaged, tmp_path):
        ucp.convert(source, tmp_path / "other", include=["norm*"], exclude=["*/exp_avg*"])
        before = tree(tmp_path / "other")
        with pytest.raises(CorruptError):
            ucp.convert(damaged, tmp_path / "other", overwrite=True)
        assert tree(tmp_path / "other") == before


class TestCopies:
    def source(self, tmp_path, copy, *, array=None, **more):
        shards = Shards(tmp_path / "source")
        array = np.linspace(-2, 2, 1200, dtype="float32").reshape(30, 40) if array is None else array
        fragments = (
            Fragment(box=Box.full(array.shape), ref=shards.put(array)),
            Fragment(box=Box.full(array.shape), ref=shards.put(copy(array), file="model.bin", **more), replica=1),
        )
        state = StateIndex(dtype=DType.FLOAT32, global_shape=array.shape, fragments=fragments)
        write_checkpoint(make_index(shards.folder, {("w", "weight"): state}))
        return shards.folder

    @staticmethod
    def bfloat16(array):
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)

    @pytest.mark.parametrize("order", [(), (1, 0)])
    def test_copies_of_less_precision_are_equal_after_the_cast(self, tmp_path, order, small_blocks):
        source = self.source(tmp_path, self.bfloat16, order=order)
        report = ucp.convert(source, tmp_path / "out")
        assert report.copies_checked == 1
        assert ucp.verify(source).ok

    def test_copies_that_drifted_are_named(self, tmp_path, small_blocks):
        def drifted(array):
            copy = self.bfloat16(array)
            copy[17, 3] = 9
            return copy

        source = self.source(tmp_path, drifted)
        with pytest.raises(ReplicaError, match=r"w/weight: 1 of .* bfloat16 .*model\.bin differ"):
            ucp.convert(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        (problem,) = ucp.verify(source).problems
        assert "w/weight" in problem

    def test_nan_is_equal_to_nan_after_a_cast(self, tmp_path):
        def other_nan(array):
            copy = self.bfloat16(array)
            copy.view(np.uint16)[3, 4] = 0xFFC1
            return copy

        array = np.ones((30, 40), dtype="float32")
        array[3, 4] = np.nan
        ucp.convert(self.source(tmp_path, other_nan, array=array), tmp_path / "out")

    def test_terms_of_a_mean_are_not_copies_of_the_mean(self, tmp_path, small_blocks):
        shards = Shards(tmp_path / "source")
        arrays = [np.full((40,), value, dtype="float32") for value in (1.0, 4.0)]
        box = Box.full((40,))
        fragments = [
            Fragment(box=box, ref=shards.put(array), replica=replica, term=term)
            for replica in range(2)
            for term, array in enumerate(arrays)
        ]
        state = StateIndex(dtype=DType.FLOAT32, global_shape=(40,), fragments=tuple(fragments), overlap=Overlap.MEAN)
        write_checkpoint(make_index(shards.folder, {("w", "weight"): state}))
        ucp.convert(shards.folder, tmp_path / "out")
        assert ucp.open(tmp_path / "out").read("w", "weight").tolist() == [2.5] * 40
        assert ucp.verify(shards.folder).ok

    def test_a_copy_of_a_term_that_drifted_is_named(self, tmp_path):
        shards = Shards(tmp_path / "source")
        arrays = [np.full((40,), value, dtype="float32") for value in (1.0, 4.0)]
        box = Box.full((40,))
        fragments = [Fragment(box=box, ref=shards.put(array), term=term) for term, array in enumerate(arrays)]
        fragments.append(Fragment(box=box, ref=shards.put(arrays[0] + 1, file="copy.bin"), replica=1, term=1))
        state = StateIndex(dtype=DType.FLOAT32, global_shape=(40,), fragments=tuple(fragments), overlap=Overlap.MEAN)
        write_checkpoint(make_index(shards.folder, {("w", "weight"): state}))
        with pytest.raises(ReplicaError, match=r"w/weight: .*copy\.bin differ, .* 2\b"):
            ucp.convert(shards.folder, tmp_path / "out")


class TestSelection:
    def test_what_is_kept_is_whole(self, source, tmp_path):
        report = ucp.convert(source, tmp_path / "out", include=["embed", "norm"], exclude=["*/exp_avg_sq"])
        index = index_of(tmp_path / "out")
        assert {(atom.name, state) for atom, state, _ in index.states()} == {
            (name, state) for name in ("embed", "norm") for state in ("weight", "exp_avg", "step")
        }
        assert [group.params for group in index.groups] == [("embed",), ("norm",)]
        assert any("--include" in line for line in report.dropped)


def mounted(folder: Path, *options: str) -> None:
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")


class TestSystem:
    @pytest.fixture
    def small_disk(self, tmp_path):
        folder = tmp_path / "disk"
        folder.mkdir()
        mounted(folder, "-t", "tmpfs", "-o", "size=64k", "tmpfs")
        yield folder
        subprocess.run(["umount", str(folder)], check=True)

    @pytest.fixture
    def large(self, tmp_path):
        shards = Shards(tmp_path / "large")
        array = np.arange(20_000, dtype="float32").reshape(200, 100)
        write_checkpoint(make_index(shards.folder, {("w", "weight"): shards.whole(array)}))
        return shards.folder

    def test_too_little_space_is_seen_before_a_byte_is_written(self, large, small_disk):
        with pytest.raises(DestinationError, match=r"[\d,]+ free bytes"):
            ucp.convert(large, small_disk / "out")
        assert not (small_disk / "out").exists()

    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize("layout", ["packed", "per-parameter"])
    def test_a_disk_that_fills_up_is_one_clear_error(
        self, large, small_disk, monkeypatch, workers, layout, small_blocks
    ):
        monkeypatch.setattr(import_module("ucp.conversion.destination.disk"), "check_space", lambda *_: None)
        with pytest.raises(DestinationError, match=r"no space .*--resume"):
            ucp.convert(large, small_disk / "out", workers=workers, layout=layout)
        assert not (small_disk / "out").exists()
        with pytest.raises(UnknownFormatError):
            ucp.open(small_disk / "out")
        subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
        ucp.convert(large, small_disk / "out", resume=True, layout=layout)
        assert ucp.diff(large, small_disk / "out").equal

    def test_a_short_write_is_continued(self, source, tmp_path, monkeypatch, small_blocks):
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[: max(1, len(data) // 3)], offset))
        ucp.convert(source, tmp_path / "out", workers=1)
        assert ucp.diff(source, tmp_path / "out").equal

    def test_a_write_of_nothing_is_an_error(self, source, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
        with pytest.raises(DestinationError, match="no more"):
            ucp.convert(source, tmp_path / "out", workers=1)

    def test_a_file_that_may_not_grow(self, large, tmp_path):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            with pytest.raises(DestinationError, match="File too large"):
                ucp.convert(large, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not (tmp_path / "out").exists()

    def test_a_folder_without_permission(self, source, tmp_path, monkeypatch):
        def denied(path, *args, **more):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(os, "mkdir", denied)
        with pytest.raises(DestinationError, match=r"cannot write .*out\.ucp-partial: Permission denied; check"):
            ucp.convert(source, tmp_path / "out")

    def test_a_source_without_permission(self, source, tmp_path, monkeypatch):
        real = os.open

        def denied(path, *args, **more):
            if str(path).endswith("exp_avg.bin"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *args, **more)

        monkeypatch.setattr(os, "open", denied)
        with pytest.raises(SourceError, match=r"cannot read .*exp_avg\.bin: Permission denied"):
            ucp.convert(source, tmp_path / "out", workers=1)
        assert not (tmp_path / "out").exists()

    def test_a_mount_point_is_refused(self, source, small_disk):
        with pytest.raises(DestinationError, match="mount point"):
            ucp.convert(source, small_disk)


class TestInterruption:
    @pytest.mark.parametrize("moment", ["begin", "advance"])
    @pytest.mark.parametrize("workers", [1, 2])
    def test_no_worker_writes_on(self, source, tmp_path, moment, workers, small_blocks):
        """Ctrl-C while the bar is drawn: by the time the error arrives, all is quiet and may be continued."""

        class Watch(SilentObserver):
            def begin(self, *, title, nbytes):
                self.happen("begin")

            def advance(self, nbytes):
                self.happen("advance")

            def happen(self, now):
                if now == moment:
                    raise KeyboardInterrupt

        try:
            ucp.convert(source, tmp_path / "out", workers=workers, observer=Watch())
        except KeyboardInterrupt:
            alive = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            ucp.convert(source, tmp_path / "out", resume=True)
        assert alive == []
        assert ucp.diff(source, tmp_path / "out").equal


def test_workers_of_a_thread_of_a_pool(source, tmp_path, small_blocks):
    """Python's own exit of a forked process joins the threads of the pool, the one that forked it among them."""
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(ucp.convert, source, tmp_path / "out", workers=2).result()
    assert report.nbytes_written
    assert ucp.verify(tmp_path / "out", against=source).ok


class TestReport:
    @pytest.mark.parametrize("compress", [False, True])
    def test_progress_adds_up(self, source, tmp_path, small_blocks, compress):
        events: list[tuple[str, int]] = []

        class Watch(SilentObserver):
            def begin(self, *, title, nbytes):
                events.append((title, nbytes))

            def advance(self, nbytes):
                events.append(("", nbytes))

            def end(self):
                events.append(("end", 0))

        ucp.convert(source, tmp_path / "out", observer=Watch(), workers=1, compress=compress)
        assert events[0][0] == "convert"
        assert events[-1] == ("end", 0)
        told = [nbytes for title, nbytes in events if not title]
        assert sum(told) == events[0][1]
        assert max(told) <= 256  # a task: not a file


def test_nothing_stays_open(source, tmp_path, small_blocks):
    ucp.convert(source, tmp_path / "warm", workers=1)
    ucp.verify(tmp_path / "warm", against=source)
    before = sorted(os.listdir("/proc/self/fd"))
    ucp.convert(source, tmp_path / "out", workers=1)
    ucp.verify(tmp_path / "out", against=source)
    ucp.diff(source, tmp_path / "out")
    ucp.open(tmp_path / "out").read("embed", "weight")
    assert sorted(os.listdir("/proc/self/fd")) == before


class TestFsync:
    @pytest.fixture
    def disk(self, monkeypatch):
        """What the system is asked to bring to the disk."""
        asked: list[str] = []
        monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append("fsync"))
        monkeypatch.setattr(
            import_module("ucp.transfer.worker"), "start_writeback", lambda *place: asked.append("writeback")
        )
        return asked

    def test_bytes_begin_to_reach_the_disk_early_and_are_waited_for(self, source, tmp_path, disk):
        ucp.convert(source, tmp_path / "out", workers=1)
        assert set(disk) == {"writeback", "fsync"}
        assert disk[-1] == "fsync"

    def test_without_it_the_same_bytes_are_left_to_the_system(self, source, tmp_path, disk):
        ucp.convert(source, tmp_path / "out", workers=1, fsync=False)
        assert disk == []
        ucp.convert(source, tmp_path / "waited", workers=1)
        assert {name: data for name, data in tree(tmp_path / "out").items() if name.startswith("packs")} == {
            name: data for name, data in tree(tmp_path / "waited").items() if name.startswith("packs")
        }


def test_a_path_with_nul_is_refused(source, tmp_path):
    for src, dst in ((source, tmp_path / "a\0b"), (f"{source}\0", tmp_path / "out")):
        with pytest.raises(UsageError, match=r"NUL.*got '.*\\x00"):
            ucp.convert(src, dst)
