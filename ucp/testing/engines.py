"""Tests that every engine passes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ucp.contract.protocols import Engine
from ucp.core.target import TargetOptions
from ucp.errors import MissingFileError, UcpError
from ucp.store.target import StoreTarget
from ucp.testing.handmade import Shards, make_index
from ucp.transfer.engines.serial import SerialEngine
from ucp.transfer.plan.job import Job, make_job
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done

_STATES = 12


class EngineContract:
    """Override `make`; every test runs on an engine that it returns."""

    def make(self) -> Engine:
        """A new engine."""
        raise NotImplementedError

    @pytest.fixture
    def job(self, tmp_path: Path) -> Job:
        """A job of twelve small states, with one task for each and one recorded checksum."""
        shards = Shards(tmp_path / "source")
        arrays = {f"layer.{n}": np.full((n, 3), n, dtype="float32") for n in range(1, _STATES + 1)}
        states = {(name, "weight"): shards.whole(array, file=f"{name}.bin") for name, array in arrays.items()}
        first = states["layer.1", "weight"].fragments[0].ref
        index = make_index(shards.folder, states, records=[shards.record(first)])  # type: ignore[arg-type]  # no inline
        plan = StoreTarget().plan(index, None, TargetOptions(layout="per-parameter"))
        job = make_job(index, plan)
        fills = [fill for task in job.tasks for fill in task.fills]
        tasks = tuple(Task(number=n, fills=(fill,), nbytes=fill.nbytes) for n, fill in enumerate(fills))
        return replace(job, tasks=tasks)

    def test_users_are_told_what_it_is(self) -> None:
        """The engine has a name and a summary; each of its settings, typed as NAME=VALUE, has a description."""
        engine = self.make()
        assert engine.name.strip()
        assert engine.summary.strip()
        assert all(name.isidentifier() and meaning.strip() for name, meaning in engine.settings.items())
        assert engine.configured({}).name == engine.name

    @pytest.mark.parametrize(("workers", "threads"), [(1, 1), (2, 1), (1, 3), (3, 2), (20, 2)])
    def test_every_task_is_reported_once(self, job: Job, tmp_path: Path, workers: int, threads: int) -> None:
        """For any number of workers, fewer or more than there are tasks."""
        done = self._run(job, tmp_path / "out", workers=workers, threads=threads)
        assert sorted(report.task for report in done) == [task.number for task in job.tasks]

    def test_it_writes_what_the_serial_engine_writes(self, job: Job, tmp_path: Path) -> None:
        """The same bytes, and the same reports in any order."""
        done = self._run(job, tmp_path / "out")
        wanted = list(SerialEngine().run(job, _created(job, tmp_path / "serial"), job.tasks, workers=1, threads=1))
        assert _tree(tmp_path / "out") == _tree(tmp_path / "serial")
        assert sorted(done, key=lambda report: report.task) == wanted

    def test_it_does_the_tasks_it_is_given(self, job: Job, tmp_path: Path) -> None:
        """And no others, because these may be done already."""
        chosen = job.tasks[1::3]
        done = self._run(job, tmp_path / "out", tasks=chosen)
        assert sorted(report.task for report in done) == [task.number for task in chosen]

    def test_nothing_to_do_gives_nothing(self, job: Job, tmp_path: Path) -> None:
        """Without tasks there is no report and no error."""
        assert self._run(job, tmp_path / "out", tasks=()) == []

    def test_tasks_may_be_run_twice(self, job: Job, tmp_path: Path) -> None:
        """The second time changes nothing."""
        self._run(job, tmp_path / "out")
        before = _tree(tmp_path / "out")
        root = tmp_path / "out"
        list(self.make().run(job, root, job.tasks, workers=2, threads=1))
        assert _tree(root) == before

    def test_an_expected_error_arrives_as_it_is(self, job: Job, tmp_path: Path) -> None:
        """With its class and its message."""
        (tmp_path / "source" / "layer.5.bin").unlink()
        with pytest.raises(MissingFileError, match=r"layer\.5\.bin"):
            self._run(job, tmp_path / "out")

    def test_an_error_of_the_system_arrives_as_it_is(self, job: Job, tmp_path: Path) -> None:
        """A missing output folder raises an OSError that names the file."""
        root = _created(job, tmp_path / "out")
        shutil.rmtree(root / "atoms")
        with pytest.raises(OSError, match="No such file") as caught:
            list(self.make().run(job, root, job.tasks, workers=2, threads=1))
        assert "atoms" in str(caught.value.filename)

    def test_a_defect_is_never_taken_for_the_end(self, job: Job, tmp_path: Path) -> None:
        """An unexpected exception ends the run with an error: missing bytes must not count as written."""
        broken = replace(job.tasks[3], fills=(replace(job.tasks[3].fills[0], sections=()),))
        tasks = (*job.tasks[:3], broken, *job.tasks[4:])
        with pytest.raises((UcpError, IndexError)):
            self._run(job, tmp_path / "out", tasks=tasks)

    @pytest.mark.parametrize("reports_read", [0, 1, 5])
    def test_a_run_may_be_given_up(self, job: Job, tmp_path: Path, reports_read: int) -> None:
        """Closing the stream of reports stops the work, even before the first report."""
        root = _created(job, tmp_path / "out")
        stream = self.make().run(job, root, job.tasks, workers=2, threads=1)
        for _ in range(reports_read):
            next(stream)
        stream.close()
        assert list(stream) == []

    def _run(
        self, job: Job, root: Path, *, tasks: Sequence[Task] | None = None, workers: int = 2, threads: int = 2
    ) -> list[Done]:
        chosen = job.tasks if tasks is None else tasks
        stream = self.make().run(job, _created(job, root), chosen, workers=workers, threads=threads)
        return [report for report in stream if isinstance(report, Done)]


def _created(job: Job, root: Path) -> Path:
    """Create the files of the destination, without the bytes of its tensors; return `root`."""
    for file in job.target.files:
        path = root / file.path
        path.parent.mkdir(parents=True)
        data = bytearray(file.nbytes)
        for part in file.literals:
            data[part.offset : part.offset + len(part.data)] = part.data
        path.write_bytes(data)
    return root


def _tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
