"""SGLang's own code reads the placements that `ucp place` writes, and ours reads what its balancer chooses.

The released wheel is downloaded without what it depends on (`UCP_SGLANG` names one that is there). Only its `eplb`
package runs; the configuration of the server, which it asks for sizes, is stated here.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import ucp
from ucp.placement.forms import read_placement, write_placement

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

VERSION = "0.5.23"
EXPERTS, LAYERS, NODES, GPUS, SLOTS = 16, 4, 2, 2, 10


@pytest.fixture(scope="module")
def eplb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, SimpleNamespace]]:
    """SGLang's module `expert_location`, and the settings that it sees."""
    folder = tmp_path_factory.mktemp("sglang")
    wheel = os.environ.get("UCP_SGLANG", "")
    if not wheel:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"sglang=={VERSION}"]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"sglang {VERSION} cannot be downloaded: {done.stderr[-200:]}")
        (wheel,) = map(str, folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("sglang/srt/eplb/")])
    moe = SimpleNamespace(
        init_expert_location="",
        ep_num_redundant_experts=0,
        ep_join_mode=None,
        moe_a2a_backend="none",
        ep_dispatch_algorithm=None,
    )
    settings = {
        "get_exec": SimpleNamespace(moe=moe),
        "get_parallel": SimpleNamespace(ep_size=NODES * GPUS, elastic_ep_initial_size=None, nnodes=NODES),
        "get_device": SimpleNamespace(device="cpu"),
        "get_resources": SimpleNamespace(),
    }
    sizes = SimpleNamespace(num_layers=LAYERS, num_logical_experts=EXPERTS, num_groups=None)
    stated: dict[str, dict[str, Any]] = {
        "sglang": {"__path__": [str(folder / "sglang")]},
        "sglang.srt": {"__path__": [str(folder / "sglang" / "srt")]},
        "sglang.srt.runtime_context": {name: lambda value=value: value for name, value in settings.items()},
        "sglang.srt.model_loader": {
            "get_model_architecture": lambda config: (
                SimpleNamespace(get_model_config_for_expert_location=lambda hf_config: sizes),
                "",
            )
        },
        "sglang.srt.elastic_ep": {"__path__": []},
        "sglang.srt.elastic_ep.elastic_ep": {"elastic_expanded_world_enabled": lambda: False},
    }
    before = {name for name in sys.modules if name.partition(".")[0] == "sglang"}
    assert not before
    for name, members in stated.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
    try:
        yield importlib.import_module("sglang.srt.eplb.expert_location"), moe
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]


def loads(seed: int) -> dict[int, list[float]]:
    """Tokens of the experts of layers 1 to 3; layer 0 is dense."""
    return {
        n: (torch.rand(EXPERTS, generator=torch.manual_seed(seed + n)) ** 4 * 1e4).tolist() for n in range(1, LAYERS)
    }


@pytest.mark.parametrize("seed", range(3))
def test_sglang_holds_the_experts_where_the_file_puts_them(seed: int, eplb: Any, tmp_path: Path) -> None:
    module, moe = eplb
    placement = ucp.place(loads(seed), nodes=NODES, gpus=GPUS, slots=SLOTS)
    write_placement(placement, tmp_path / "placement.json", "sglang")
    moe.init_expert_location = str(tmp_path / "placement.json")
    moe.ep_num_redundant_experts = placement.cluster.num_slots - EXPERTS
    found = module.compute_initial_expert_location_metadata(SimpleNamespace(hf_config=None), 0)
    assert found.num_physical_experts == placement.cluster.num_slots
    assert found.num_logical_experts == EXPERTS
    for layer, slots in placement.layers.items():
        assert tuple(found.physical_to_logical_map[layer].tolist()) == slots
        for expert in range(EXPERTS):
            assert {slots[slot] for slot in found.logical_to_all_physical(layer, expert)} == {expert}


@pytest.mark.parametrize("algorithm", ["deepseek", "deepseek_vec"])
def test_what_its_balancer_chooses_is_a_placement(algorithm: str, eplb: Any, tmp_path: Path) -> None:
    algorithms = importlib.import_module("sglang.srt.eplb.eplb_algorithms")
    tokens = loads(7)
    count = torch.tensor([[1.0] * EXPERTS, *tokens.values()])
    chosen, _, replicas = algorithms.rebalance_experts(
        tokens_per_expert=count[None],
        num_physical_experts=NODES * GPUS * SLOTS,
        num_local_physical_experts=SLOTS,
        num_groups=1,
        num_nodes=NODES,
        algorithm=algorithms.EplbAlgorithm[algorithm],
    )
    (tmp_path / "theirs.json").write_text(json.dumps({"physical_to_logical_map": chosen.tolist()}))
    placement = read_placement(tmp_path / "theirs.json", nodes=NODES, gpus=GPUS, moe_layers=list(tokens))
    assert sorted(placement.layers) == list(tokens)
    for layer, slots in placement.layers.items():
        assert slots == tuple(chosen[layer].tolist())
        assert [slots.count(expert) for expert in range(EXPERTS)] == replicas[layer].tolist()


def test_yaml_reads_the_file_for_tensorrt_llm(tmp_path: Path) -> None:
    """With the types that `MoeLoadBalancerConfig` demands: {int: [int]}."""
    yaml = pytest.importorskip("yaml")
    placement = ucp.place(loads(3), nodes=NODES, gpus=GPUS, slots=SLOTS)
    write_placement(placement, tmp_path / "placement.yaml", "trtllm")
    document = yaml.safe_load((tmp_path / "placement.yaml").read_text())
    assert document == {
        "num_slots": placement.cluster.num_slots,
        "initial_global_assignments": {layer: list(slots) for layer, slots in placement.layers.items()},
        "layer_updates_per_iter": 0,
    }
    for style in (True, False, None):
        (tmp_path / "theirs.yaml").write_text(yaml.dump(document, default_flow_style=style))
        assert read_placement(tmp_path / "theirs.yaml", nodes=NODES, gpus=GPUS).layers == placement.layers
