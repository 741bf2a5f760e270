"""What `ucp place` refuses: placements with gaps, loads of other forms, files that contradict themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import nan
from pathlib import Path

import pytest
import torch

from ucp.errors import MalformedError, UsageError
from ucp.placement.forms import read_placement
from ucp.placement.loads import read_loads
from ucp.placement.migrate import plan_migration
from ucp.placement.place import place
from ucp.placement.placement import Cluster, Placement
from ucp.placement.tasks import allot_gpus

TWO = Cluster(nodes=2, slots=2)
WHOLE = Placement(cluster=TWO, layers={0: (0, 1, 1, 0)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cluster(nodes=0, slots=1),
        lambda: Cluster(nodes=1, slots=True),
        lambda: Cluster(nodes=1, gpus=-1, slots=1),
        lambda: Cluster(nodes=1000, slots=1),
        lambda: Cluster(nodes=2, slots=10**9),
        lambda: Placement(cluster=TWO, layers={0: (0, 1, 1, 10**12)}),
        lambda: Placement(cluster=TWO, layers={}),
        lambda: Placement(cluster=TWO, layers={0: (0, 1, 1)}),
        lambda: Placement(cluster=TWO, layers={0: (0, 1, 1, -2)}),
        lambda: Placement(cluster=TWO, layers={0: (0, 0, 1, 1)}, threshold=2),
        lambda: Placement(cluster=TWO, layers={0: (0, 0, 0, 0)}, loads={0: (1.0, 2.0)}),
        lambda: place({}, TWO),
        lambda: place({0: (1.0, -1.0)}, TWO),
        lambda: place({0: (1.0, 1.0)}, TWO, threshold=0),
        lambda: place({0: (1.0, 1.0)}, TWO, threshold=True),
        lambda: place({0: ()}, TWO),
        lambda: plan_migration(WHOLE, WHOLE, lost={2}),
        lambda: plan_migration(WHOLE, WHOLE, lost={-1}),
        lambda: plan_migration(WHOLE, WHOLE, lost=(), tolerance=nan),
        lambda: plan_migration(WHOLE, Placement(cluster=TWO, layers={0: (0, 1, 1, 2)}), lost=()),
        lambda: allot_gpus([1e308, 1e308], gpus=2),
        lambda: allot_gpus([1, 2], gpus=10**9),
        lambda: plan_migration(WHOLE, Placement(cluster=TWO, layers={1: (0, 1, 1, 0)}), lost=()),
    ],
)  # fmt: skip
def test_values_that_are_no_placement(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        make()


def test_layers_without_loads_have_no_balance() -> None:
    assert WHOLE.balance(0) is None


SLOTS = torch.tensor([[0, 1, 1, 2]])


@pytest.mark.parametrize(
    "saved",
    [
        [1, 2],
        {"rank": 0},
        {"records": []},
        {"logical_count": 3},
        {"logical_count": torch.tensor([1, 2])},
        {"records": [{"global_physical_count": torch.ones(1, 3)}], "last_physical_to_logical_map": SLOTS},
        {"records": [{"global_physical_count": torch.ones(1, 4)}], "last_physical_to_logical_map": SLOTS - 1},
        {"records": [{"global_physical_count": torch.ones(1, 4)}], "last_physical_to_logical_map": SLOTS + 4},
        {"records": [{}], "last_physical_to_logical_map": SLOTS},
    ],
)
def test_recorder_files_that_are_none(saved: object, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "stat.pt")
    with pytest.raises((UsageError, MalformedError)):
        read_loads(tmp_path / "stat.pt")


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"record_type": "eplb_load_meta"}],
        [{"record_type": "eplb_load_stats", "expert_load": [[1, 1]], "p2l_map": [[0, 1]]},
         {"record_type": "eplb_load_stats", "expert_load": [[1, 1, 1]], "p2l_map": [[0, 1, 2]]}],
        [{"record_type": "eplb_load_stats", "expert_load": [[1, 1]], "p2l_map": [[0, 9]]}],
        [{"record_type": "eplb_load_stats", "expert_load": [[1, 1]], "p2l_map": [[0, 0.5]]}],
        [{"record_type": "eplb_load_stats", "expert_load": [[1, 1]], "p2l_map": [[0, 10**20]]}],
        [{"record_type": "eplb_load_stats", "expert_load": [[1, "x"]], "p2l_map": [[0, 1]]}],
    ],
)  # fmt: skip
def test_logs_that_are_none(records: list[object], tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.raises((UsageError, MalformedError)):
        read_loads(tmp_path / "log.jsonl")


def _record(**changes: object) -> dict[str, object]:
    ranks = [{"rank": 0, "experts": [0, 1]}, {"rank": 1, "experts": [1, 0]}]
    return {"version": 1, "num_experts": 2, "ep_size": 2, "ranks": ranks, **changes}


def _ascend_layer(*experts: list[int]) -> dict[str, object]:
    devices = [{"device_id": number, "device_expert": held} for number, held in enumerate(experts)]
    return {"layer_id": 0, "device_count": len(devices), "device_list": devices}


@pytest.mark.parametrize(
    "document",
    [
        {"0": _record(version=2)},
        {"0": _record(ep_size=3)},
        {"0": _record(num_experts=1)},
        {"0": _record(num_experts=3)},
        {"0": _record(num_experts=10**15)},
        {"0": _record(ranks=[{"rank": 0, "experts": [0, 1]}, {"rank": 0, "experts": [1, 0]}])},
        {"0": _record(ranks=[{"rank": 0, "experts": [0, 0]}, {"rank": 1, "experts": [1, 0]}])},
        {"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 2, "device_list": [
            {"device_id": 0, "device_expert": [0, 1]}, {"device_id": 2, "device_expert": [1, 0]}]}]},
        {"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 10**12, "device_list": []}]},
        {"moe_layer_count": 2, "layer_list": [_ascend_layer([0, 1], [1, 0]), _ascend_layer([1, 0], [1, 0])]},
        {"physical_to_logical_map": [[0, 1, 1, 10**12]]},
        {"record_type": "eplb_initial_mapping", "version": 1, "num_redundant_experts": 2, "num_slots": 8,
         "initial_global_assignments": {"0": [0, 1, 1, 0]}},
    ],
)  # fmt: skip
def test_files_of_placements_that_contradict_themselves(document: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "placement.json").write_text(json.dumps(document))
    with pytest.raises((MalformedError, UsageError)):
        read_placement(tmp_path / "placement.json", nodes=2)


@pytest.mark.parametrize(
    "text",
    [
        f'{{"0": {json.dumps(_record())}, "0": {json.dumps(_record())}}}',
        "initial_global_assignments:\n  0: [0, 1, 1, 0]\n  0: [0, 1, 0, 1]\n",
        "num_slots: 8\ninitial_global_assignments:\n  0: [0, 1, 1, 0]\n",
    ],
)
def test_a_layer_comes_once_and_has_the_slots_that_are_stated(text: str, tmp_path: Path) -> None:
    (tmp_path / "placement").write_text(text)
    with pytest.raises(MalformedError):
        read_placement(tmp_path / "placement", nodes=2)


def test_comments_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("initial_global_assignments:\n  0: [0, 1, 1, 0]\n  # 0: [0, 0, 0, 1]\n")
    assert read_placement(tmp_path / "p.yaml", nodes=2).layers == {0: (0, 1, 1, 0)}


@pytest.mark.parametrize("layer", ["-3", "1_0", "99999999999", " 3"])
def test_loads_of_what_is_no_layer(layer: str, tmp_path: Path) -> None:
    (tmp_path / "loads.json").write_text(json.dumps({layer: [1, 2]}))
    with pytest.raises(UsageError):
        read_loads(tmp_path / "loads.json")


def test_loads_that_list_a_layer_twice(tmp_path: Path) -> None:
    (tmp_path / "loads.json").write_text('{"3": [1, 2], "3": [9, 1]}')
    with pytest.raises(MalformedError):
        read_loads(tmp_path / "loads.json")


def test_a_placement_for_other_nodes_and_an_unknown_form(tmp_path: Path) -> None:
    (tmp_path / "placement.json").write_text(json.dumps({"0": _record()}))
    with pytest.raises(UsageError):
        read_placement(tmp_path / "placement.json", nodes=3)
    with pytest.raises(UsageError):
        read_placement(tmp_path / "placement.json", "deepspede", nodes=2)
