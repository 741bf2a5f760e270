"""What every target does with the checkpoints it is given."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ucp.contract.registry import recognise
from ucp.conversion.convert import carry_out
from ucp.conversion.options import ConvertOptions
from ucp.conversion.prepare import Silent, index_of, prepare
from ucp.transfer.differences import compare

__all__ = ["TargetContract"]

Case = tuple[Path, ConvertOptions]


class TargetContract:
    """Override `cases`; every test runs on each. The target is found by entry point, as users find it."""

    def cases(self, folder: Path) -> Sequence[Case]:
        """Source checkpoints, kept or made below `folder`, with what is asked of the target."""
        raise NotImplementedError

    @pytest.fixture
    def sources(self, tmp_path: Path) -> Sequence[Case]:
        """What `cases` gives."""
        folder = tmp_path / "sources"
        folder.mkdir()
        return self.cases(folder)

    def test_planning_writes_nothing(self, sources: Sequence[Case], tmp_path: Path) -> None:
        """And gives the same plan again."""
        assert sources
        before = sorted(tmp_path.rglob("*"))
        for path, options in sources:
            first, second = prepare(path, options), prepare(path, options)
            assert first.job.target == second.job.target
            assert first.fingerprint == second.fingerprint
        assert sorted(tmp_path.rglob("*")) == before

    def test_a_job_travels(self, sources: Sequence[Case]) -> None:
        """It can be sent to another process."""
        for path, options in sources:
            job = prepare(path, options).job
            copy = pickle.loads(pickle.dumps(job))  # noqa: S301  # our own bytes
            assert copy.target == job.target
            assert copy.tasks == job.tasks

    def test_files_are_told_apart(self, sources: Sequence[Case]) -> None:
        """No path is planned twice."""
        for path, options in sources:
            paths = [file.path for file in prepare(path, options).job.target.files]
            assert len(paths) == len(set(paths))

    def test_what_is_written_reads_back(self, sources: Sequence[Case], tmp_path: Path) -> None:
        """Bit for bit, after the casts that were asked for; the source stays as it was."""
        for number, (path, options) in enumerate(sources):
            before = _tree(path)
            written = _converted(path, tmp_path / f"out-{number}", options)
            fmt, _ = recognise(written)
            assert fmt.name == options.to
            source, back = index_of(path, options.names), index_of(written)
            held = {name: atom for name, atom in source.atoms.items() if name in back.atoms}
            assert compare(replace(source, atoms=held), back, Silent(), cast=True) == []
            assert _tree(path) == before

    def test_it_writes_the_same_bytes_again(self, sources: Sequence[Case], tmp_path: Path) -> None:
        """In another folder, with another engine."""
        for number, (path, options) in enumerate(sources):
            one = _converted(path, tmp_path / f"one-{number}", replace(options, workers=1))
            two = _converted(path, tmp_path / f"two-{number}", replace(options, workers=2))
            assert _tree(one) == _tree(two)

    def test_an_interrupted_run_is_completed(self, sources: Sequence[Case], tmp_path: Path) -> None:
        """To the same bytes as if nothing had happened; until then nobody takes it for a checkpoint."""
        for number, (path, options) in enumerate(sources):
            whole = _converted(path, tmp_path / f"whole-{number}", options)
            goal = tmp_path / f"resumed-{number}"
            with pytest.raises(_InterruptedRunError):
                carry_out(path, goal, replace(options, workers=1), _Impatient())
            assert not goal.exists()
            _converted(path, goal, replace(options, resume=True))
            assert _tree(goal) == _tree(whole)


class _InterruptedRunError(Exception):
    """What stands in for a user who gave up."""


class _Impatient(Silent):
    """Observer that interrupts a run as soon as something is written."""

    def advance(self, nbytes: int) -> None:
        """Interrupt."""
        raise _InterruptedRunError


def _converted(src: Path, dst: Path, options: ConvertOptions) -> Path:
    carry_out(src, dst, options, Silent())
    return dst


def _tree(root: Path) -> dict[str, bytes]:
    files = root.rglob("*") if root.is_dir() else [root]
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(files) if path.is_file()}
