"""Tests that every target passes, on checkpoints that it can write."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ucp.contract.registry import recognise
from ucp.conversion.convert import carry_out
from ucp.conversion.options import ConvertOptions
from ucp.conversion.prepare import SilentObserver, prepare
from ucp.source.read import index_of
from ucp.testing.formats import class_stash
from ucp.transfer.differences import compare

Case = tuple[Path, ConvertOptions]


_SOURCES = pytest.StashKey[Sequence[Case]]()
_WRITTEN = pytest.StashKey[Sequence[Path]]()


class TargetContract:
    """Override `cases`; every test runs on each case. The target is found by its entry point, as for users.

    `cases` is called once for all tests of a class. Tests that only look at the outcome share one conversion per case.
    """

    def cases(self, folder: Path) -> Sequence[Case]:
        """Source checkpoints, existing ones or made below `folder`, each with the options of a conversion."""
        raise NotImplementedError

    @pytest.fixture
    def sources(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Case]:
        """What `cases` returns."""
        stash = class_stash(request)
        if _SOURCES not in stash:
            stash[_SOURCES] = self.cases(tmp_path_factory.mktemp("sources"))
        return stash[_SOURCES]

    @pytest.fixture
    def written(
        self, request: pytest.FixtureRequest, sources: Sequence[Case], tmp_path_factory: pytest.TempPathFactory
    ) -> Sequence[Path]:
        """The outcome of each case, written by one worker; checks that the source is unchanged."""
        stash = class_stash(request)
        if _WRITTEN not in stash:
            folder, paths = tmp_path_factory.mktemp("written"), []
            for number, (path, options) in enumerate(sources):
                before = _tree(path)
                paths.append(_converted(path, folder / str(number), replace(options, workers=1)))
                assert _tree(path) == before
            stash[_WRITTEN] = paths
        return stash[_WRITTEN]

    def test_planning_writes_nothing(self, sources: Sequence[Case]) -> None:
        """And planning again gives the same plan."""
        assert sources
        before = [sorted(path.parent.rglob("*")) for path, _ in sources]
        for path, options in sources:
            first, second = prepare(path, options), prepare(path, options)
            assert first.job.target == second.job.target
            assert first.fingerprint == second.fingerprint
        assert [sorted(path.parent.rglob("*")) for path, _ in sources] == before

    def test_a_job_travels(self, sources: Sequence[Case]) -> None:
        """It can be pickled for another process."""
        for path, options in sources:
            job = prepare(path, options).job
            copy = pickle.loads(pickle.dumps(job))  # noqa: S301  # our own bytes
            assert copy.target == job.target
            assert copy.tasks == job.tasks

    def test_files_are_told_apart(self, sources: Sequence[Case]) -> None:
        """No two planned files have the same path."""
        for path, options in sources:
            paths = [file.path for file in prepare(path, options).job.target.files]
            assert len(paths) == len(set(paths))

    def test_what_is_written_reads_back(self, sources: Sequence[Case], written: Sequence[Path]) -> None:
        """Bit for bit, after the requested casts."""
        for (path, options), written_path in zip(sources, written, strict=True):
            fmt, _ = recognise(written_path)
            assert fmt.name == options.to
            source, back = index_of(path, options.selection), index_of(written_path)
            common = {name: atom for name, atom in source.atoms.items() if name in back.atoms}
            assert compare(replace(source, atoms=common), back, SilentObserver(), cast=True) == []

    def test_it_writes_the_same_bytes_again(
        self, sources: Sequence[Case], written: Sequence[Path], tmp_path: Path
    ) -> None:
        """In another folder, with another number of workers."""
        for number, ((path, options), written_path) in enumerate(zip(sources, written, strict=True)):
            again = _converted(path, tmp_path / str(number), replace(options, workers=2))
            assert _tree(again) == _tree(written_path)

    def test_an_interrupted_run_is_completed(
        self, sources: Sequence[Case], written: Sequence[Path], tmp_path: Path
    ) -> None:
        """To the same bytes as without the interruption; before that, the destination does not exist."""
        for number, ((path, options), written_path) in enumerate(zip(sources, written, strict=True)):
            goal = tmp_path / f"resumed-{number}"
            with pytest.raises(_InterruptedRunError):
                carry_out(path, goal, replace(options, workers=1), _Impatient())
            assert not goal.exists()
            _converted(path, goal, replace(options, resume=True))
            assert _tree(goal) == _tree(written_path)


class _InterruptedRunError(Exception):
    """Simulates a user who interrupts the run."""


class _Impatient(SilentObserver):
    """Observer that interrupts a run as soon as something is written."""

    def advance(self, nbytes: int) -> None:
        """Interrupt."""
        raise _InterruptedRunError


def _converted(src: Path, dst: Path, options: ConvertOptions) -> Path:
    carry_out(src, dst, options, SilentObserver())
    return dst


def _tree(root: Path) -> dict[str, bytes]:
    files = root.rglob("*") if root.is_dir() else [root]
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(files) if path.is_file()}
