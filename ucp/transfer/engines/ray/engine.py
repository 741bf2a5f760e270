"""The Ray engine: this process plans and keeps the journal, and Ray runs batches of tasks on the nodes of a cluster.

1. `connected` connects to the cluster.
2. `check_nodes` checks that every node that can get work runs the same ucp and sees the destination and the source.
3. The job, without its tasks, is put into Ray's object store once; each worker process fetches and unpacks it once.
4. Tasks are bundled into batches by bytes, neighbours in a file together. At most `workers` batches are in flight.
5. Ray runs a batch on a node with free resources, and runs it again elsewhere if its process or its node is lost.

Batches are Ray tasks, not actors. An actor is tied to one node; if the node is lost, the actor and all work given to it
wait until another node has room. A task goes to whichever node has room next, and clusters grow and shrink.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from ucp.contract.protocols import Engine
from ucp.errors import UsageError, WorkerDiedError
from ucp.io.writing import TEMPORARY
from ucp.transfer.engines.ray.cluster import check_address, check_installed, connected
from ucp.transfer.engines.ray.nodes import Needs, check_nodes
from ucp.transfer.engines.ray.probe import program
from ucp.transfer.engines.ray.worker import RayRun, carry_out
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.tasks import TASK, Task, bundle, interleave
from ucp.transfer.worker import Done, Step

_BATCH = 8 * TASK
"""The most bytes of a batch, which take about a second; a call takes Ray some milliseconds."""

_TURNS = 4
"""The least number of batches for each worker, so that all workers end at about the same time."""

_DIGITS = 4
"""Number of decimals with which Ray counts CPUs."""

_ENDING = 30.0
"""Seconds to wait until cancelled batches have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Values of the settings."""

    address: str = "auto"
    cpus: float = 1.0
    resource: str = ""
    retries: int = 3

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> _Settings:
        """The values of settings that the user states. Raises UsageError."""
        usual = cls()
        check_address(settings.get("address", usual.address))
        cpus = _number(settings, "cpus", float, usual.cpus)
        if round(cpus, _DIGITS) != cpus:
            raise UsageError(
                f"expected --set cpus=1 or another number with at most {_DIGITS} decimals; got {settings['cpus']!r}"
            )
        return cls(
            address=settings.get("address", usual.address),
            cpus=cpus,
            resource=settings.get("resource", usual.resource),
            retries=int(_number(settings, "retries", int, usual.retries)),
        )


def _number(settings: Mapping[str, str], name: str, kind: type[float], default: float) -> float:
    try:
        number = kind(settings.get(name, default))
        if 0 <= number < float("inf"):
            return number
    except ValueError:
        pass
    raise UsageError(f"expected --set {name}={default:g} or another number, 0 or more; got {settings[name]!r}")


class RayEngine(Engine):
    """Batches of tasks on a Ray cluster: `workers` of them at once, with `threads` threads each."""

    name = "ray"
    summary = "nodes of a Ray cluster"
    settings = MappingProxyType(
        {
            "address": "the cluster: auto (default: `RAY_ADDRESS`, or the cluster that this machine is a node of), "
            "`HOST:PORT` of its head node, or local (starts Ray on this machine for the run)",
            "cpus": "CPUs of a node that each worker reserves in Ray: 1 by default, fractions allowed",
            "resource": "custom resource: only nodes that have it get work, for example those that mount the storage",
            "retries": "how often work is repeated after its process or node was lost: 3 by default",
        }
    )
    spans_machines = True

    def __init__(self, values: _Settings | None = None) -> None:
        self._settings = values or _Settings()

    def configured(self, settings: Mapping[str, str]) -> RayEngine:
        """The engine with these values of its `settings`. Raises UsageError, MissingLibraryError."""
        check_installed()
        return RayEngine(_Settings.parse(settings))

    def run(
        self, job: Job, root: Path, tasks: Sequence[Task], *, workers: int, threads: int
    ) -> Generator[Done | Step, None, None]:
        """Reports of `tasks`, in the order in which they finish. Connects when the first report is asked for."""
        if not tasks:
            return
        room = threads * max(task.projected_bytes for task in tasks)
        needs = Needs(cpus=self._settings.cpus, memory=room, resource=self._settings.resource)
        with connected(self._settings.address), _publish(job, root, threads) as run:
            check_nodes(run, job.index, needs)
            batches = deque(_batches(tasks, workers))
            with closing(_reports(run, _submitter(run, needs, self._settings.retries), batches, workers)) as stream:
                yield from stream


@contextmanager
def _publish(job: Job, root: Path, threads: int) -> Iterator[RayRun]:
    """Yield what workers need to know about a run. After the `with` block, no worker begins to write any more."""
    import ray

    token = root.parent / f"{TEMPORARY}{uuid4().hex}"
    token.write_text(token.name, encoding="ascii")
    try:
        # leave out what workers do not need: literal bytes of files, extras, and the tasks, which batches bring
        index = replace(job.index, extras=(), groups=(), files=())
        slim = replace(job, index=index, target=replace(job.target, files=()), tasks=())
        yield RayRun(job=ray.put(slim), root=root, token=token, threads=threads, program=program())
    finally:
        token.unlink(missing_ok=True)


def _batches(tasks: Sequence[Task], workers: int) -> list[list[Task]]:
    """Bundles of tasks of about equal bytes: a worker gets neighbours, and different workers different files."""
    limit = min(_BATCH, sum(task.nbytes for task in tasks) // (_TURNS * workers))
    return interleave(list(bundle(tasks, limit=limit)), key=lambda batch: batch[0].fills[0].path)


def _submitter(run: RayRun, needs: Needs, retries: int) -> Any:
    """A function that submits a batch to Ray and returns the stream of its reports."""
    import ray

    remote = ray.remote(carry_out).options(
        num_returns="streaming",
        num_cpus=needs.cpus,
        memory=needs.memory,
        resources=needs.custom,
        max_retries=retries,
        scheduling_strategy="SPREAD",
    )
    return lambda batch: remote.remote(run, batch)


def _reports(run: RayRun, submit: Any, waiting: deque[list[Task]], workers: int) -> Generator[Done | Step, None, None]:
    """Submit batches, and yield what the workers report; closing the generator ends the workers."""
    import ray

    running: dict[Any, Sequence[Task]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                batch = waiting.popleft()
                running[submit(batch)] = batch
            (stream, *_), _ = ray.wait(list(running), num_returns=1, fetch_local=False)
            match _next(stream):
                case Step() as step:
                    yield step
                case Exception() as error:
                    raise error
                case tuple() as done:
                    del running[stream]
                    yield from done
    finally:
        run.token.unlink(missing_ok=True)  # a batch that Ray starts from now on sees that the run is over
        _cancel(list(running))


def _next(stream: Any) -> Any:
    """The next report of a batch. Raises WorkerDiedError if there is none."""
    import ray

    try:
        return ray.get(next(stream))
    except StopIteration:
        raise WorkerDiedError("a worker ended before its tasks were done; try again with --resume") from None
    except ray.exceptions.RayError as error:
        raise WorkerDiedError(
            f"a worker was lost or failed, and so did all its retries ({type(error).__name__}: {error}). Its "
            "node may be out of memory. Try again with --resume, and with fewer --workers or --set retries=10"
        ) from error


def _cancel(running: Sequence[Any]) -> None:
    """End the processes that carry out these batches, and wait until they have ended."""
    import ray

    for stream in running:
        ray.cancel(stream, force=True)
    if running:
        ray.wait([stream.completed() for stream in running], num_returns=len(running), timeout=_ENDING)
