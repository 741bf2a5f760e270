"""The order of ranks against real megatron-core: dense and expert groups of its RankGenerator, in two releases."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.megatron.megatron_jobs import environment
from ucp.core.topology import Topology
from ucp.live.run.mesh import RunMesh

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

TOPOLOGIES = ["dp=2,tp=2,pp=2", "dp=2,tp=2,cp=2", "dp=4,tp=2,ep=2", "dp=4,tp=2,ep=2,etp=1,pp=2", "dp=2,tp=4,ep=4,etp=2"]
PROGRAM = """
import json, sys
from megatron.core.parallel_state import RankGenerator
found = []
for own in json.loads(sys.argv[1]):
    dense = {axis: own[axis] for axis in ("tp", "dp", "pp", "cp")}
    experts = {"tp": own["etp"], "ep": own["ep"], "dp": own["edp"], "pp": own["pp"], "cp": 1}
    made = RankGenerator(ep=1, order="tp-cp-ep-dp-pp", **dense), RankGenerator(order="tp-cp-ep-dp-pp", **experts)
    found.append([{axis: sorted(one.get_ranks(axis)) for axis in ("tp", "ep", "dp", "pp", "cp")} for one in made])
print(json.dumps(found))
"""


def degrees(topology: Topology) -> dict[str, int]:
    own = {axis: getattr(topology, axis) for axis in ("dp", "tp", "pp", "cp", "ep")}
    etp = topology.expert_tp
    return {**own, "etp": etp, "edp": topology.dp * topology.cp * topology.tp // (topology.ep * etp)}


def groups(topology: Topology, axis: str, others: tuple[str, ...]) -> list[list[int]]:
    """Ranks that differ along one axis alone."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(topology.ranks):
        at = RunMesh.from_topology(topology, rank=rank).coords
        found.setdefault(tuple(at[own] for own in others if own != axis), []).append(rank)
    return sorted(found.values())


@pytest.mark.parametrize("version", ["0.13.1", "0.16.1"])
def test_ranks_stand_where_megatron_puts_them(version: str) -> None:
    topologies = [Topology.parse(text) for text in TOPOLOGIES]
    asked = json.dumps([degrees(own) for own in topologies])
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, asked]
    done = subprocess.run(command, env=environment(version), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for own, (dense, experts) in zip(topologies, json.loads(done.stdout.splitlines()[-1]), strict=True):
        for axis in ("tp", "cp", "dp", "pp"):
            assert groups(own, axis, ("tp", "cp", "dp", "pp")) == dense[axis], (str(own), axis)
        for theirs, axis in {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}.items():
            assert groups(own, axis, ("etp", "ep", "edp", "pp")) == experts[theirs], (str(own), axis)
