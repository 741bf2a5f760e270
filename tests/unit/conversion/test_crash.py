"""kill -9 at every step: what is left is refused by every reader, and completed by --resume to the same bytes.

A conversion runs in a forked child that kills itself at its n-th call of the system (open, write, rename, ...), for
numbers n that lie the farther apart the larger they are: preparing differs from call to call, and tasks do not. Every
n there is: tests/integration/conversion/test_every_call.py. Power failure is another matter: it is covered as far as
digests of what an earlier run wrote are compared before they are believed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import ucp
from tests.unit.conftest import handmade, tree
from ucp.conversion.prepare import SilentObserver
from ucp.errors import DestinationError, IncompleteError, UnknownFormatError

CALLS = ("open", "pwrite", "rename", "replace", "fsync", "ftruncate", "truncate", "mkdir", "unlink", "rmdir", "close")
OPTIONS = {
    "packed": {},
    "per-parameter": {"layout": "per-parameter"},
    "compressed": {"compress": True},
    "virtual": {"virtual": True},
}


def run_until(step: int, src: Path, dst: Path, *, after: Path | None = None, **options) -> int:
    """Convert in a child that is killed at its call number `step`; its exit status, 0 when it got to the end.

    `after`: only once this file is there.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        left = [step]

        def counting(call):
            def counted(*args, **more):
                left[0] -= 1
                if left[0] < 0 and (after is None or after.exists()):
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **more)

            return counted

        for name in CALLS:
            setattr(os, name, counting(getattr(os, name)))
        ucp.convert(src, dst, workers=1, **options)
        os._exit(0)
    finally:
        os._exit(1)


def check_refused(dst: Path) -> None:
    """Nobody takes what is left for a checkpoint."""
    partial = dst.with_name(f"{dst.name}.ucp-partial")
    for path in (partial, partial / "data", partial / "data" / "ucp.json"):
        if path.exists():
            with pytest.raises((IncompleteError, UnknownFormatError)):
                ucp.open(path)
    if (partial / "data").is_dir() and any((partial / "data").iterdir()):
        with pytest.raises(IncompleteError, match="--resume"):
            ucp.open(partial / "data")


DENSE, COARSE = 6, 2
"""Calls up to which each is the last one; beyond, one in so many of what was made before."""


@pytest.mark.parametrize(
    ("name", "dense"), [(name, DENSE if name == "packed" else COARSE) for name in OPTIONS], ids=OPTIONS
)
def test_a_run_killed_at_many_steps_is_completed(source, tmp_path, name, dense, small_blocks):
    assert check_killed(source, tmp_path, dense=dense, **OPTIONS[name]) > 8


def check_killed(source: Path, tmp_path: Path, *, dense: int, **options) -> int:
    """Number of steps at which a run was killed, refused and completed; `dense`: as that of `DENSE`."""
    whole = tmp_path / "whole"
    ucp.convert(source, whole, workers=1, **options)
    wanted, before = tree(whole), tree(source)
    step, killed = 0, 0
    while True:
        dst = tmp_path / "out"
        status = run_until(step, source, dst, **options)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
        check_refused(dst)
        if dst.exists():
            assert tree(dst) == wanted, f"killed at step {step}: looks complete and is not"
        ucp.convert(source, dst, workers=1, resume=True, **options)
        assert tree(dst) == wanted, f"killed at step {step}"
        assert not dst.with_name("out.ucp-partial").exists()
        for path in sorted(dst.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        dst.rmdir()
        step += 1 + step // dense
    assert tree(source) == before
    return killed


def test_overwriting_keeps_the_old_until_the_new_is_whole(source, tmp_path, small_blocks):
    dst = tmp_path / "out"
    ucp.convert(source, tmp_path / "new", workers=1, layout="per-parameter")
    ucp.convert(source, tmp_path / "old", workers=1)
    old, new = tree(tmp_path / "old"), tree(tmp_path / "new")
    step = 0
    while True:
        ucp.convert(source, dst, workers=1, overwrite=True)
        status = run_until(step, source, dst, overwrite=True, layout="per-parameter")
        if status == 0:
            break
        if dst.exists():
            assert tree(dst) in (old, new)
        else:
            (kept,) = dst.with_name("out.ucp-partial").glob("old-*")
            assert tree(kept) == old
        ucp.convert(source, dst, workers=1, overwrite=True, resume=True, layout="per-parameter")
        assert tree(dst) == new
        step += 1 + step // 2
    assert tree(dst) == new


def test_what_was_put_aside_is_put_back(source, tmp_path, small_blocks):
    """Between the two renames of a commit the destination is nowhere; another conversion must not lose it."""
    dst, partial = tmp_path / "out", tmp_path / "out.ucp-partial"
    ucp.convert(source, dst)
    old = tree(dst)
    partial.mkdir()
    os.rename(dst, partial / "old-1")
    with pytest.raises(DestinationError, match=r"made differently:\n +compress"):
        ucp.convert(source, dst, resume=True, compress=True)
    assert tree(dst) == old


@pytest.mark.parametrize(("lines", "workers"), [(0, 2), (7, 3)])
def test_a_parent_killed_with_its_workers_at_work(source, tmp_path, lines, workers, small_blocks):
    ucp.convert(source, tmp_path / "whole", workers=1)
    dst = tmp_path / "out"
    pid = os.fork()
    if not pid:
        _killed_after(lines, source, dst, workers)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not dst.exists()
    check_refused(dst)
    report = ucp.convert(source, dst, workers=workers, resume=True)
    assert report.resumed_bytes + report.nbytes_written == sum(
        len(data) for data in (array.tobytes() for array in _arrays().values())
    )
    assert tree(dst) == tree(tmp_path / "whole")


def _arrays():
    from tests.unit.conftest import sample_arrays

    return sample_arrays()


def _killed_after(lines: int, source: Path, dst: Path, workers: int) -> None:
    class Watch(SilentObserver):
        left = lines

        def advance(self, nbytes):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1

    try:
        ucp.convert(source, dst, workers=workers, observer=Watch())
    finally:
        os._exit(1)


class TestWhatAnEarlierRunLeft:
    def killed(self, source, dst, **options):
        assert run_until(150, source, dst, **options) == -signal.SIGKILL
        return dst.with_name("out.ucp-partial")

    @pytest.fixture
    def wanted(self, source, tmp_path, small_blocks):
        ucp.convert(source, tmp_path / "whole", workers=1)
        return tree(tmp_path / "whole")

    def test_bytes_that_were_lost_are_written_again(self, source, tmp_path, wanted):
        """As after a power failure: the journal is there, what it speaks of is not."""
        partial = self.killed(source, tmp_path / "out")
        pack = partial / "data" / "packs" / "00000.safetensors"
        pack.write_bytes(bytes(pack.stat().st_size))
        ucp.convert(source, tmp_path / "out", workers=1, resume=True)
        assert tree(tmp_path / "out") == wanted

    def test_encoded_blocks_that_were_lost_are_written_again(self, source, tmp_path, small_blocks):
        ucp.convert(source, tmp_path / "whole", workers=1, compress=True)
        partial = self.killed_before_commit(source, tmp_path / "out", compress=True)
        pack = partial / "data" / "packs" / "00000.zst"
        pack.write_bytes(bytes(pack.stat().st_size))
        report = ucp.convert(source, tmp_path / "out", workers=1, resume=True, compress=True)
        assert report.resumed_bytes == 0
        assert tree(tmp_path / "out") == tree(tmp_path / "whole")

    def killed_before_commit(self, source, dst, **options):
        """What is left where all tasks are done: the child is killed at its first call once the index is there."""
        partial = dst.with_name("out.ucp-partial")
        assert run_until(0, source, dst, after=partial / "data" / "ucp.json", **options) == -signal.SIGKILL
        return partial

    @pytest.mark.parametrize(
        "tail",
        [b"{", b'{"task": 3', b"null\n", b"[]\n", b'{"task": -1, "sums": [], "spans": [], "drift": []}\n', b"\xff\n"],
    )
    def test_a_journal_that_ends_in_rubbish(self, source, tmp_path, wanted, tail):
        partial = self.killed(source, tmp_path / "out")
        with (partial / "journal.jsonl").open("ab") as journal:
            journal.write(tail)
        report = ucp.convert(source, tmp_path / "out", workers=1, resume=True)
        assert report.resumed_bytes > 0
        assert tree(tmp_path / "out") == wanted

    @pytest.mark.parametrize("text", [b"", b"{", b"[]\n", b"\xff"])
    def test_a_journal_without_a_beginning_starts_over(self, source, tmp_path, wanted, text):
        partial = self.killed(source, tmp_path / "out")
        (partial / "journal.jsonl").write_bytes(text)
        report = ucp.convert(source, tmp_path / "out", workers=1, resume=True)
        assert report.resumed_bytes == 0
        assert tree(tmp_path / "out") == wanted

    def test_lines_may_be_added_after_a_line_cut_short(self, source, tmp_path, wanted):
        """Else a second resume would do the work of the first again."""
        partial = self.killed(source, tmp_path / "out")
        journal = partial / "journal.jsonl"
        journal.write_bytes(journal.read_bytes()[:-5])
        run_until(150, source, tmp_path / "out", resume=True)
        lines = journal.read_bytes().splitlines()
        assert all(line.startswith(b"{") and line.endswith(b"}") for line in lines[:-1])
        ucp.convert(source, tmp_path / "out", workers=1, resume=True)
        assert tree(tmp_path / "out") == wanted

    def test_another_source_is_not_continued(self, source, tmp_path, small_blocks):
        self.killed(source, tmp_path / "out")
        other = handmade(tmp_path / "other")
        with pytest.raises(DestinationError, match=rf"source: {source} then, {other} now"):
            ucp.convert(other, tmp_path / "out", resume=True)
        ucp.convert(other, tmp_path / "out", overwrite=True)
        assert ucp.diff(other, tmp_path / "out").equal

    def test_it_is_not_overwritten_unasked(self, source, tmp_path, small_blocks):
        self.killed(source, tmp_path / "out")
        with pytest.raises(DestinationError, match=r"unfinished conversion.*--resume"):
            ucp.convert(source, tmp_path / "out")


def test_resuming_what_is_complete_does_nothing(source, tmp_path):
    ucp.convert(source, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    report = ucp.convert(source, tmp_path / "out", resume=True)
    assert report.already_complete
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
