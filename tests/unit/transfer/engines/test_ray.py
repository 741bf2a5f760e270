"""What the Ray engine decides and does without Ray; with it: tests/integration/engines."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.unit.conftest import handmade
from ucp.conversion.options import make_options
from ucp.conversion.prepare import prepare
from ucp.errors import DestinationError, MissingFileError, UsageError, WorkerDiedError
from ucp.transfer.engines.ray import cluster, probe, worker
from ucp.transfer.engines.ray.engine import RayEngine, _batches
from ucp.transfer.engines.ray.nodes import Needs, _some_files
from ucp.transfer.engines.ray.worker import RayRun, carry_out
from ucp.transfer.engines.serial import SerialEngine
from ucp.transfer.output_files import create_file
from ucp.transfer.worker import Step, Worker


@pytest.fixture
def job(tmp_path, small_blocks):
    return prepare(handmade(tmp_path / "source"), make_options(layout="per-parameter")).job


@pytest.fixture
def run(job, tmp_path, monkeypatch):
    """A run whose job this process holds already."""
    for file in job.target.files:
        create_file(tmp_path / "out", file)
    token = tmp_path / "temporary-1"
    token.write_text(token.name)
    monkeypatch.setitem(worker._cached_jobs, token, job)
    return RayRun(job=None, root=tmp_path / "out", token=token, threads=3, program=probe.program())


class TestSettings:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch):
        monkeypatch.setattr(cluster, "find_spec", lambda name: True)

    @pytest.mark.parametrize("address", ["auto", "local", "head:6379", "10.0.0.1:6379", "[::1]:6379"])
    def test_addresses(self, address):
        assert RayEngine().configured({"address": address})._settings.address == address

    @pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265", "head:", ":6379", "head:x", ""])
    def test_what_is_no_address(self, address):
        with pytest.raises(UsageError, match=rf"address=.*; got '{address}'"):
            RayEngine().configured({"address": address})

    @pytest.mark.parametrize(
        ("name", "value"), [("cpus", "many"), ("cpus", "-1"), ("cpus", "nan"), ("cpus", "0.00001"), ("retries", "1.5")]
    )
    def test_what_is_no_number(self, name, value):
        with pytest.raises(UsageError, match=f"--set {name}=.* got '{value}'"):
            RayEngine().configured({name: value})

    def test_numbers(self):
        asked = RayEngine().configured({"cpus": "0.5", "retries": "0", "resource": "lustre"})._settings
        assert (asked.cpus, asked.retries, asked.resource) == (0.5, 0, "lustre")


class TestBatches:
    @pytest.mark.parametrize("workers", [1, 2, 7, 1000])
    def test_every_task_is_in_one(self, job, workers):
        batches = _batches(job.tasks, workers)
        assert sorted(task.number for batch in batches for task in batch) == [task.number for task in job.tasks]
        assert len(batches) >= min(4 * workers, len(job.tasks))

    def test_neighbours_are_together_and_files_in_turn(self, job):
        batches = _batches(job.tasks, 2)
        assert all(b.number - a.number == 1 for batch in batches for a, b in pairwise(batch))
        assert any(len(batch) > 1 for batch in batches)
        paths = [batch[0].fills[0].path for batch in batches]
        assert len(set(paths[: len(set(paths))])) == len(set(paths))


class TestWorker:
    def test_reports_come_in_the_order_of_the_tasks(self, job, run, tmp_path, monkeypatch):
        """However threads take turns: Ray counts the reports of a batch that it repeats."""
        real = Worker.carry_out
        ended = threading.Event()

        def slow_first(own, task):
            if task.number == 0:
                assert ended.wait(30)
            yield from real(own, task)
            if task.number == 2:
                ended.set()

        monkeypatch.setattr(Worker, "carry_out", slow_first)
        (done,) = carry_out(run, job.tasks)
        assert list(done) == list(SerialEngine().run(job, run.root, job.tasks, workers=1, threads=1))

    def test_one_task_reports_on_its_way(self, tmp_path, small_blocks, monkeypatch):
        """Packs of encoded blocks take long."""
        job = prepare(handmade(tmp_path / "source"), make_options(compress=True)).job
        for file in job.target.files:
            create_file(tmp_path / "out", file)
        token = tmp_path / "temporary-1"
        token.write_text(token.name)
        monkeypatch.setitem(worker._cached_jobs, token, job)
        run = RayRun(job=None, root=tmp_path / "out", token=token, threads=3, program="")
        *steps, done = carry_out(run, job.tasks[:1])
        assert len(steps) > 2
        assert sum(step.nbytes for step in steps) == job.tasks[0].nbytes
        assert [own.task for own in done] == [0]

    @pytest.mark.parametrize("fsync", [True, False])
    def test_done_means_on_the_disk(self, job, run, monkeypatch, fsync):
        synced = []
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
        monkeypatch.setitem(worker._cached_jobs, run.token, replace(job, fsync=fsync))
        paths = {str(run.root / fill.path) for task in job.tasks for fill in task.fills}
        for report in carry_out(run, job.tasks):
            assert isinstance(report, Step) or set(synced) == (paths if fsync else set())

    def test_an_expected_error_is_a_report(self, job, run, tmp_path):
        for path in (tmp_path / "source").glob("*.bin"):
            path.unlink()
        *_, error = carry_out(run, job.tasks)
        assert isinstance(error, MissingFileError)
        arrived = pickle.loads(pickle.dumps(error))
        assert arrived.args == error.args
        assert arrived.__notes__ == [f"on {probe.host()}"]

    def test_a_defect_tells_where_it_came_from(self, job, run):
        broken = replace(job.tasks[0], fills=())
        *_, error = carry_out(run, [broken, job.tasks[1]])
        assert isinstance(error, WorkerDiedError)
        assert "Traceback" in str(error)

    def test_nothing_is_written_for_a_run_that_is_over(self, job, run):
        before = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
        run.token.unlink()
        (error,) = carry_out(run, job.tasks)
        assert isinstance(error, DestinationError)
        assert {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()} == before


class TestProbe:
    def test_the_folder_of_the_token(self, tmp_path):
        token = tmp_path / "temporary-1"
        assert probe.describe_fault(str(token)) == "No such file or directory"
        token.write_text("temporary-2")
        assert probe.describe_fault(str(token)) == "there is another folder at this path"
        token.write_text("temporary-1")
        assert probe.describe_fault(str(token)) == ""

    def test_files_of_the_source(self, tmp_path):
        path = tmp_path / "shard.bin"
        path.write_bytes(b"abc")
        stat = path.stat()
        assert probe.find_changed_files([(str(path), 3, stat.st_mtime_ns)]) == []
        assert probe.find_changed_files([(str(path), 4, stat.st_mtime_ns)]) == [str(path)]
        assert probe.find_changed_files([(str(path), 3, stat.st_mtime_ns + 1)]) == [str(path)]
        assert probe.find_changed_files([(str(tmp_path / "none"), 3, stat.st_mtime_ns)]) == [str(tmp_path / "none")]

    def test_the_program(self, monkeypatch):
        assert probe.program().endswith(")")
        monkeypatch.setattr(probe, "find_spec", lambda name: None)
        assert probe.program() == ""

    def test_a_change_in_the_code_is_another_program(self, tmp_path, monkeypatch):
        (tmp_path / "ucp").mkdir()
        code = tmp_path / "ucp" / "__init__.py"
        code.write_text("")
        monkeypatch.setattr(probe, "find_spec", lambda name: type("Spec", (), {"origin": str(code)}))
        before = probe.program()
        code.write_text("x = 1")
        assert probe.program() != before

    def test_a_few_of_many_files(self, job):
        file = job.index.files[0]
        for count in (1, 63, 64, 65, 1000):
            some = _some_files(replace(job.index, files=(file,) * count))
            assert min(count, 32) <= len(some) <= 64


class TestNeeds:
    def test_of_a_node(self):
        node = {"Alive": True, "Resources": {"CPU": 2.0, "memory": 1e9, "lustre": 1.0}}
        assert Needs(cpus=2, memory=10**9, resource="lustre").are_met_by(node)
        assert not Needs(cpus=3, memory=0, resource="").are_met_by(node)
        assert not Needs(cpus=1, memory=10**10, resource="").are_met_by(node)
        assert not Needs(cpus=1, memory=0, resource="gpfs").are_met_by(node)
        assert not Needs(cpus=1, memory=0, resource="").are_met_by({**node, "Alive": False})
