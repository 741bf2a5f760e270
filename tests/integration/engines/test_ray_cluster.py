"""Two emulated nodes: workers and nodes that are lost, drivers that are killed, nodes that lack what they need."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import ucp
from tests.registry import FIXTURES
from tests.unit.conftest import handmade, shrink
from ucp.contract import registry
from ucp.conversion.options import make_options
from ucp.conversion.prepare import prepare
from ucp.errors import DestinationError, EngineError, MissingFileError, UsageError, WorkerDiedError
from ucp.transfer.engines.ray import cluster as cluster_module
from ucp.transfer.engines.ray import engine as ray_engine
from ucp.transfer.engines.ray import probe
from ucp.transfer.engines.ray.engine import RayEngine
from ucp.transfer.output_files import create_file
from ucp.transfer.worker import Done

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = pytest.mark.integration

STORE = {"object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster():
    """A head node and another one, of one CPU each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **STORE})
    made.add_node(num_cpus=1, **STORE)
    yield made
    made.shutdown()


@pytest.fixture
def settings(cluster):
    return {"address": cluster.address}


@pytest.fixture
def small(monkeypatch):
    shrink(monkeypatch, block=256, task=256)


def tree(root: Path) -> dict[str, bytes]:
    """Every file but the mark, which names the destination's source and time."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def paced(monkeypatch, folder: Path, *, seconds: float, spares_first: bool = False):
    """Have workers report slowly, if wished all but the first of all reports; who does is in `folder`."""
    folder.mkdir()

    def carry_out(run, tasks):
        from ucp.transfer.engines.ray.worker import carry_out as real

        for report in real(run, tasks):
            try:
                (folder / "begun").touch(exist_ok=False)
                is_spared = spares_first
            except FileExistsError:
                is_spared = False
            if not is_spared:
                (folder / str(os.getpid())).touch()
                time.sleep(seconds)
            yield report

    monkeypatch.setattr(ray_engine, "carry_out", carry_out)


def begun(source: Path, root: Path, *, compress: bool = False):
    """A job whose files are created under `root`."""
    job = prepare(source, make_options(layout="" if compress else "per-parameter", compress=compress)).job
    for file in job.target.files:
        create_file(root, file)
    return job


def pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while not (found := [int(path.name) for path in folder.iterdir() if path.name.isdigit()]):
        assert time.monotonic() < deadline, "no worker has begun"
        time.sleep(0.05)
    return found


def wait_for_tasks(dst: Path, count: int) -> None:
    """Until the journal has so many tasks."""
    journal = dst.with_name(f"{dst.name}.ucp-partial") / "journal.jsonl"
    deadline = time.monotonic() + 120
    while not journal.exists() or len(journal.read_text().splitlines()) <= count:
        assert time.monotonic() < deadline, "no task is done"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def check_reports(reports, job):
    """Every task once."""
    assert sorted(own.task for own in reports if isinstance(own, Done)) == [task.number for task in job.tasks]


DEEPSPEED, MEGATRON = FIXTURES / "deepspeed", FIXTURES / "megatron"
CONVERSIONS = {
    "deepspeed to atoms": (DEEPSPEED / "z3-dp2-fp16", {}),
    "deepspeed to another run": (DEEPSPEED / "z1-dp4-bf16", {"to": "deepspeed", "topology": "dp=3,zero=3"}),
    "deepspeed to dcp": (DEEPSPEED / "z2-tp2-dp2", {"to": "dcp"}),
    "megatron to atoms": (MEGATRON / "gpt-tp2-pp2-dp2-full", {}),
    "megatron to another run": (MEGATRON / "llama-tp2-pp2-dp2-full", {"to": "megatron", "topology": "tp=4,pp=1,dp=1"}),
    "megatron, compressed": (MEGATRON / "mixtral-ep4-dp4-full", {"compress": True}),
}


class TestResults:
    @pytest.mark.parametrize("case", CONVERSIONS)
    def test_bytes_are_those_of_the_serial_engine(self, case, settings, small, tmp_path):
        folder, options = CONVERSIONS[case]
        source = folder / "checkpoint"
        ucp.convert(source, tmp_path / "serial", engine="serial", **options)
        report = ucp.convert(source, tmp_path / "ray", engine="ray", settings=settings, verify=True, **options)
        assert tree(tmp_path / "ray") == tree(tmp_path / "serial")
        assert report.nbytes_written
        assert not list(tmp_path.glob("*.ucp-partial"))

    def test_atoms_to_another_framework(self, settings, small, tmp_path):
        ucp.convert(DEEPSPEED / "z1-dp4-bf16" / "checkpoint", tmp_path / "atoms")
        for engine, own in (("serial", {}), ("ray", settings)):
            ucp.convert(tmp_path / "atoms", tmp_path / engine, to="dcp", engine=engine, settings=own)
        assert tree(tmp_path / "ray") == tree(tmp_path / "serial")

    @pytest.mark.parametrize(
        "source", [DEEPSPEED / "z1-dp4-bf16", MEGATRON / "gpt-tp2-pp2-torch"], ids=lambda own: own.name
    )
    def test_paths_are_those_of_the_drivers_folder(self, source, settings, tmp_path, monkeypatch):
        monkeypatch.chdir(source)
        ucp.convert(Path("checkpoint"), os.path.relpath(tmp_path / "out"), engine="ray", settings=settings, verify=True)
        assert ucp.diff(Path("checkpoint"), tmp_path / "out").equal

    def test_both_nodes_work(self, settings, small, tmp_path, monkeypatch):
        """One CPU each: two processes at once are on two nodes."""
        paced(monkeypatch, tmp_path / "pids", seconds=0.05)
        job = begun(handmade(tmp_path / "source"), tmp_path / "out")
        stream = RayEngine().configured(settings).run(job, tmp_path / "out", job.tasks, workers=2, threads=1)
        check_reports(list(stream), job)
        assert len(pids(tmp_path / "pids")) == 2


class TestLosses:
    def test_a_killed_worker_is_replaced(self, settings, small, tmp_path, monkeypatch):
        """What it had reported is not reported again."""
        source = handmade(tmp_path / "source")
        job, wanted = begun(source, tmp_path / "out"), begun(source, tmp_path / "serial")
        paced(monkeypatch, tmp_path / "pids", seconds=0.1)
        monkeypatch.setattr(ray_engine, "_TURNS", 1)
        stream = RayEngine().configured(settings).run(job, tmp_path / "out", job.tasks, workers=2, threads=2)
        reports = [next(stream) for _ in range(3)]
        killed = pids(tmp_path / "pids")
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        reports += stream
        check_reports(reports, job)
        assert set(pids(tmp_path / "pids")) - set(killed)
        list(registry.engine("serial").run(wanted, tmp_path / "serial", wanted.tasks, workers=1, threads=1))
        assert tree(tmp_path / "out") == tree(tmp_path / "serial")

    def test_steps_of_a_task_that_is_repeated_are_told_once(self, settings, small, tmp_path, monkeypatch):
        """A pack of encoded blocks is one task, which tells how far it is."""
        source = handmade(tmp_path / "source")
        job = begun(source, tmp_path / "out", compress=True)
        paced(monkeypatch, tmp_path / "pids", seconds=0.1)
        stream = RayEngine().configured(settings).run(job, tmp_path / "out", job.tasks[:1], workers=1, threads=2)
        reports = [next(stream) for _ in range(3)]
        for pid in pids(tmp_path / "pids"):
            os.kill(pid, signal.SIGKILL)
        *steps, done = [*reports, *stream]
        assert done.task == 0
        assert sum(step.nbytes for step in steps) == job.tasks[0].nbytes
        assert len(pids(tmp_path / "pids")) == 2

    def test_a_worker_that_always_dies_is_an_error(self, settings, small, tmp_path, monkeypatch):
        def carry_out(run, tasks):
            os.kill(os.getpid(), signal.SIGKILL)
            yield

        monkeypatch.setattr(ray_engine, "carry_out", carry_out)
        with pytest.raises(WorkerDiedError, match=r"lost.*--resume"):
            ucp.convert(
                handmade(tmp_path / "source"), tmp_path / "out", engine="ray", settings={**settings, "retries": 1}
            )
        assert not (tmp_path / "out").exists()

    def test_a_lost_node_is_done_without(self, cluster, settings, small, tmp_path, monkeypatch, capsys):
        """And nothing of that is told where results go."""
        extra = cluster.add_node(num_cpus=2, resources={"doomed": 1}, **STORE)
        source = handmade(tmp_path / "source")
        ucp.convert(source, tmp_path / "serial", layout="per-parameter", engine="serial")
        paced(monkeypatch, tmp_path / "pids", seconds=0.1)
        killed = []

        class Watch:
            def begin(self, **stage):
                pass

            def advance(self, nbytes):
                if not killed and len(pids(tmp_path / "pids")) > 2:
                    killed.append(True)
                    cluster.remove_node(extra, allow_graceful=False)

            def end(self):
                pass

        options = {"layout": "per-parameter", "engine": "ray", "settings": settings, "verify": True}
        ucp.convert(source, tmp_path / "out", observer=Watch(), **options)
        assert killed
        told = capsys.readouterr()
        assert not told.out
        assert "Raylet is terminated" in told.err
        assert tree(tmp_path / "out") == tree(tmp_path / "serial")

    def test_a_killed_driver_is_resumed(self, cluster, settings, small, tmp_path):
        source = handmade(tmp_path / "source")
        script = Path(__file__).with_name("slow_worker.py")
        with subprocess.Popen(
            [sys.executable, script, source, tmp_path / "out", cluster.address, tmp_path / "pids"]
        ) as driver:
            wait_for_tasks(tmp_path / "out", 3)
            driver.kill()
        report = ucp.convert(source, tmp_path / "out", resume=True, engine="ray", settings=settings, verify=True)
        assert report.resumed_bytes > 0
        assert report.nbytes_written > 0
        ucp.convert(source, tmp_path / "serial", engine="serial")
        assert tree(tmp_path / "out") == tree(tmp_path / "serial")
        check_gone(pids(tmp_path / "pids"))


def check_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline, "a worker goes on"
        time.sleep(0.05)


class TestGivingUp:
    def test_no_worker_is_left(self, settings, small, tmp_path, monkeypatch):
        """Ray says that they were ended, and the system may take a moment."""
        paced(monkeypatch, tmp_path / "pids", seconds=60, spares_first=True)
        job = begun(handmade(tmp_path / "source"), tmp_path / "out")
        stream = RayEngine().configured(settings).run(job, tmp_path / "out", job.tasks, workers=2, threads=1)
        next(stream)
        working = pids(tmp_path / "pids")
        stream.close()
        check_gone(working)
        assert not list(tmp_path.glob("temporary-*"))

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_the_command(self, cluster, tmp_path, number):
        source = handmade(tmp_path / "source")
        script = Path(__file__).with_name("slow_worker.py")
        arguments = [sys.executable, script, source, tmp_path / "out", cluster.address, tmp_path / "pids", "command"]
        with (
            subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as command,
            ExitStack() as stack,
        ):
            stack.callback(command.kill)
            wait_for_tasks(tmp_path / "out", 1)
            working = pids(tmp_path / "pids")
            command.send_signal(number)
            _, told = command.communicate(timeout=60)
        assert command.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        assert "--resume continues" in told
        assert "Traceback" not in told
        check_gone(working)


class TestRefusals:
    def test_no_cluster_is_there(self, tmp_path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"no Ray .*{address}"):
            ucp.convert(handmade(tmp_path / "source"), tmp_path / "out", engine="ray", settings={"address": address})
        assert not (tmp_path / "out").exists()

    def test_what_listens_there_is_no_cluster(self, tmp_path, monkeypatch):
        """Ray alone would go on trying for ten minutes."""
        monkeypatch.setattr(cluster_module, "_JOINS", 8.0)
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"127.0.0.1:{other.getsockname()[1]}"
            with pytest.raises(EngineError, match=f"{address}.*answer"):
                ucp.convert(
                    handmade(tmp_path / "source"), tmp_path / "out", engine="ray", settings={"address": address}
                )

    def test_the_clients_protocol_is_not_spoken(self, tmp_path):
        with pytest.raises(UsageError, match=r"got 'ray://head:10001'.*`ray job"):
            ucp.convert(
                handmade(tmp_path / "source"), tmp_path / "out", engine="ray", settings={"address": "ray://head:10001"}
            )

    def test_no_node_has_what_is_asked_for(self, settings, tmp_path):
        source = handmade(tmp_path / "source")
        for asked in ({"cpus": 99}, {"resource": "lustre"}):
            with pytest.raises(EngineError, match=r"no node .*\n.*CPU 1,"):
                ucp.convert(source, tmp_path / "out", engine="ray", settings={**settings, **asked})
            assert [path.name for path in tmp_path.iterdir()] == ["source"]

    def test_a_destination_that_another_node_does_not_see(self, settings, tmp_path, monkeypatch):
        """As on a cluster whose nodes mount other disks at the same path."""
        real = probe.look

        def look(token, files):
            return real(token + "-elsewhere", files)

        monkeypatch.setattr(probe, "look", look)
        with pytest.raises(DestinationError, match=r"(?s)out.ucp-partial/data.*: No such file.*same path"):
            ucp.convert(handmade(tmp_path / "source"), tmp_path / "out", engine="ray", settings=settings)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

    def test_a_source_that_is_another_one_on_a_node(self, settings, tmp_path, monkeypatch):
        source = handmade(tmp_path / "source")
        real = probe.look

        def look(token, files):
            return real(token, [(path, nbytes, changed + 1) for path, nbytes, changed in files])

        monkeypatch.setattr(probe, "look", look)
        with pytest.raises(MissingFileError, match=r"(?s)source .*: .*\.bin\n.*same path"):
            ucp.convert(source, tmp_path / "out", engine="ray", settings=settings)

    def test_another_ucp_on_a_node(self, cluster, settings, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)  # workers import from the driver's folder
        (tmp_path / "site" / "ucp").mkdir(parents=True)
        (tmp_path / "site" / "ucp" / "__init__.py").write_text("changed = True")
        path = f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"
        node = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": path}, **STORE)
        try:
            with pytest.raises(EngineError, match=r"ucp .*got\n  .*: .*\(code [0-9a-f]{8}\)\n"):
                ucp.convert(handmade(tmp_path / "source"), tmp_path / "out", engine="ray", settings=settings)
        finally:
            cluster.remove_node(node)
