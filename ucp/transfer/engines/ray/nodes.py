"""Checks, before work begins, that the nodes that will get it run the same ucp and see source and destination."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ucp.core.index import Index
from ucp.errors import DestinationError, EngineError, MissingFileError, UcpError, format_list
from ucp.io.folder import url_scheme
from ucp.transfer.engines.ray import probe
from ucp.transfer.engines.ray.worker import RayRun

_ANSWER = 120.0
"""Seconds to wait for the nodes' answers: each must start a process."""

_LOOKED_AT = 64
"""The most source files that a node is asked about."""

_SHARE = 0.001
"""Amount of a custom resource that a batch reserves: so little that the resource only selects nodes."""

_Node: TypeAlias = Mapping[str, Any]
"""A node as `ray.nodes` describes it."""
_File: TypeAlias = tuple[str, int, int]
"""Path, bytes, and time of the last change in nanoseconds."""
_Answer: TypeAlias = tuple[str, str, list[str]]
"""What `probe.look` returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Resources of a node that a batch reserves while it runs."""

    cpus: float
    """CPUs, as Ray counts them."""
    memory: int
    """Bytes."""
    resource: str
    """Custom resource that the node must have; empty for none."""

    @property
    def custom(self) -> dict[str, float]:
        """Amounts of custom resources."""
        return {self.resource: _SHARE} if self.resource else {}

    def are_met_by(self, node: _Node) -> bool:
        """Whether a node has these resources when it is idle."""
        wanted = {"CPU": self.cpus, "memory": self.memory, **self.custom}
        return bool(node["Alive"]) and all(node["Resources"].get(name, 0) >= amount for name, amount in wanted.items())


def check_nodes(run: RayRun, index: Index, needs: Needs) -> None:
    """Ask every node that can get work what it sees. Raises EngineError, DestinationError, MissingFileError."""
    answers = list(_collect_answers(_fit_nodes(needs), run, _some_files(index)))
    _refuse(
        EngineError,
        f"expected ucp {run.program} on every node, as on this one, because another version can write other bytes; got",
        [f"{node}: {program or 'not installed'}" for node, (program, _, _) in answers if program != run.program],
        "Install the same version on all nodes",
    )
    elsewhere = (
        "that all nodes mount at the same path; or restrict the run to nodes with a custom Ray resource: --set "
        "resource=NAME"
    )
    _refuse(
        DestinationError,
        f"expected every node to be able to write to the folder {run.root}; got",
        [f"{node}: {fault}" for node, (_, fault, _) in answers if fault],
        f"Choose a destination on storage {elsewhere}",
    )
    _refuse(
        MissingFileError,
        f"expected every node to see the same files of {index.path} as this one; these are missing or differ:",
        [f"{node}: {paths[0]}" for node, (_, _, paths) in answers if paths],
        f"Copy the source to storage {elsewhere}",
    )


def _refuse(kind: type[UcpError], expected: str, faults: Sequence[str], remedy: str) -> None:
    if faults:
        raise kind(f"{expected}\n{format_list(faults)}\n{remedy}")


def _fit_nodes(needs: Needs) -> list[_Node]:
    """Nodes that can get work. Raises EngineError if there are none, because Ray would wait for one."""
    import ray

    nodes = ray.nodes()
    fit = [node for node in nodes if needs.are_met_by(node)]
    if fit:
        return fit
    custom = f" and the custom resource {needs.resource}" if needs.resource else ""
    shown = []
    for node in (node for node in nodes if node["Alive"]):
        resources = sorted((name, amount) for name, amount in node["Resources"].items() if ":" not in name)
        shown.append(f"{_name(node)}: {', '.join(f'{name} {amount:.15g}' for name, amount in resources)}")
    raise EngineError(
        f"no node of the Ray cluster has {needs.cpus:g} CPUs, {needs.memory >> 20} MiB of memory{custom}:\n"
        f"{format_list(shown)}\nAsk for less (--set cpus=0.5) or another resource, or wait until such a node has joined"
    )


def _name(node: _Node) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _some_files(index: Index) -> list[_File]:
    """A sample of the source's files on a file system, evenly spread over all of them."""
    files = [
        (f.path, f.nbytes, f.mtime_ns) for f in index.files if not url_scheme(Path(f.path)) and Path(f.path).exists()
    ]
    return files[:: -(-len(files) // _LOOKED_AT) or 1]


def _collect_answers(nodes: Sequence[_Node], run: RayRun, files: list[_File]) -> Iterator[tuple[str, _Answer]]:
    """The answer of each node, with the node's name; nodes that are lost meanwhile are skipped. Raises EngineError."""
    import ray

    nodes_by_ref = _start_probes(nodes, run, files)
    ready, silent = ray.wait(list(nodes_by_ref), num_returns=len(nodes_by_ref), timeout=_ANSWER)
    faults = [(nodes_by_ref[ref], f"no answer within {_ANSWER:.0f} seconds") for ref in silent]
    for ref in ready:
        try:
            yield _name(nodes_by_ref[ref]), ray.get(ref)
        except ray.exceptions.RayError as error:
            faults.append((nodes_by_ref[ref], str(error)))
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    lines = [f"{_name(node)}: {fault}" for node, fault in faults if node["NodeID"] in alive]
    _refuse(EngineError, "expected every node of the Ray cluster to answer; got", lines, "Remove it, or try again")


def _start_probes(nodes: Sequence[_Node], run: RayRun, files: list[_File]) -> dict[Any, _Node]:
    """Start a task on each node, even a busy one, that calls `probe.look` there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(probe)  # a node without ucp can say so
    try:
        look = ray.remote(num_cpus=0, max_retries=0)(probe.look)
        strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        refs = [look.options(scheduling_strategy=strategy).remote(str(run.token), files) for strategy in strategies]
    finally:
        ray.cloudpickle.unregister_pickle_by_value(probe)
    return dict(zip(refs, nodes, strict=True))
