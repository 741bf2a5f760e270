"""Checkpoints of pipeline, tensor and expert parallelism, compared bit for bit with what each rank of the run held.

The truth of a run is kept per model-parallel rank (`truth-mp00`), per expert-parallel rank (`truth-ep00`), or both
(`truth-mp00-ep00`), with the rank's own names and shapes. Here the wholes are made from it with torch, by rules of this
test alone: a tensor that is as large on a rank as the atom is the whole, any other is a cut of the dim that is shorter.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from ucp_formats.deepspeed.read.source import DeepSpeedFormat

import ucp
from tests.golden.truth import FIXTURES, check_copies, is_same, plain, read_states
from ucp.core.index import Index, Kind
from ucp.io.torch_file.archive import read_archive

ROOT = FIXTURES / "deepspeed"
CASES = sorted(path.name for path in ROOT.iterdir() if list(path.glob("truth-*.json")))
CONVERTED = [name for name in CASES if (ROOT / name / "universal").is_dir()]
EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")
BLOCKS = {"gate_up": (1, 1), "qkv.weight": (2, 1, 1)}
"""Part of a name to the relative lengths of blocks of dim 0, each cut on its own."""
AVERAGED = re.compile(r"\d+\.scale/")
"""Parameters that every tensor-parallel rank trains on its own."""


@cache
def index_of(case: str) -> Index:
    return DeepSpeedFormat().read(ROOT / case / "checkpoint")


@cache
def states_of(case: str) -> dict[str, Tensor]:
    return read_states(index_of(case))


@cache
def reports(case: str) -> dict[Path, dict[str, Any]]:
    """What each rank reported, in the order of the ranks, by its file."""
    return {path: json.loads(path.read_text()) for path in sorted((ROOT / case).glob("truth-*.json"))}


@cache
def truths(case: str) -> list[dict[str, Tensor]]:
    """What each rank held, experts by their global numbers."""
    files = sorted((ROOT / case).glob("truth-*.safetensors"))
    return [{_global(path, key): tensor for key, tensor in load_file(path).items()} for path in files]


def _global(truth: Path, key: str) -> str:
    """The name with the global number of an expert, as that rank of the run would count it."""
    expert, rank = EXPERT.fullmatch(key), re.search(r"-ep(\d+)", truth.stem)
    if expert is None or rank is None:
        return key
    groups = [group["names"] for group in reports(truth.parent.name)[truth.with_suffix(".json")]["groups"]]
    names = [name for group in groups for name in group if name.startswith(expert[1])]
    local = 1 + max(int(match[2]) for name in names if (match := EXPERT.fullmatch(name)))
    return f"{expert[1]}{int(rank[1]) * local + int(expert[2])}{expert[3]}"


def wholes(case: str, key: str, shape: torch.Size) -> list[Tensor]:
    """The whole as several sets of ranks hold it: one, or one per copy."""
    held = [rank[key] for rank in truths(case) if key in rank]
    if AVERAGED.match(key) and index_of(case).topology.tp > 1:
        return [(a + b) / 2 for a, b in zip(held[::2], held[1::2], strict=True)]
    if all(part.shape == shape for part in held):
        return held
    (dim,) = {dim for part in held for dim, (n, whole) in enumerate(zip(part.shape, shape, strict=True)) if n != whole}
    degree = shape[dim] // held[0].shape[dim]
    blocks = next((lengths for part, lengths in BLOCKS.items() if part in key), (1,))
    sizes = [held[0].shape[dim] // sum(blocks) * length for length in blocks]
    found = []
    for at in range(0, len(held), degree):
        cut = [part.split(sizes, dim) for part in held[at : at + degree]]
        found.append(torch.cat([part for block in zip(*cut, strict=True) for part in block], dim))
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_state_of_every_rank_is_read_bit_for_bit(case: str) -> None:
    found, keys = states_of(case), {key for rank in truths(case) for key in rank}
    wanted = {key.replace("/module", "/weight"): key for key in keys if key.endswith("/module")}
    wanted |= {key: key for key in keys if not key.endswith("/module")}
    assert {key for key in found if not key.endswith("/step")} == {key for key in wanted if not key.endswith("/step")}
    for name, key in wanted.items():
        for whole in wholes(case, key, found[name].shape):
            assert is_same(found[name], whole), name
    check_copies(index_of(case))


@pytest.mark.parametrize("case", CASES)
def test_topology_and_step(case: str) -> None:
    index, report = index_of(case), next(iter(reports(case).values()))
    topology = index.topology
    assert topology.dp * topology.tp * topology.pp == report["world_size"]
    assert topology.tp * topology.pp == report["model_parallel_size"]
    assert index.step == report["step"]
    assert len(reports(case)) == topology.ep * topology.tp * topology.pp


@pytest.mark.parametrize("case", CASES)
def test_groups_have_every_trained_parameter_once(case: str) -> None:
    index = index_of(case)
    listed = [name for group in index.groups for name in group.params]
    trained = [atom.name for atom in index.atoms.values() if atom.kind is Kind.PARAMETER]
    assert sorted(listed) == sorted(trained)
    hyper = {name: group.hyper for group in index.groups for name in group.params}
    for truth, report in reports(case).items():
        for group in report["groups"]:
            for name in group["names"]:
                found = plain(hyper[_global(truth, f"{name}/x")[:-2]])
                left = {"param_names", *(["name"] if group["hyperparameters"].get("moe") else [])}
                assert found == {key: own for key, own in group["hyperparameters"].items() if key not in left}


@pytest.mark.parametrize("case", CASES)
def test_every_file_is_named(case: str) -> None:
    index = index_of(case)
    assert {file.path for file in index.files} == {str(path) for path in Path(index.path).rglob("*.pt")}
    assert len({file.role for file in index.files}) == len(index.files)


@pytest.mark.parametrize("case", CONVERTED)
def test_deepspeeds_own_converter_makes_the_same_of_it(case: str) -> None:
    index = index_of(case)
    (zero,) = (ROOT / case / "universal").glob("*/zero")
    folders = [path for path in zero.iterdir() if path.is_dir() and path.name not in index.aliases]
    assert {path.name for path in folders} == {name for group in index.groups for name in group.params}
    for folder in folders:
        for stem, state in (("fp32", "weight"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            saved = read_archive(str(folder / f"{stem}.pt")).root
            view = saved["param"] if isinstance(saved, dict) else saved
            state_values = states_of(case)[f"{folder.name}/{state}"]
            if isinstance(saved, dict):  # a flat tensor under ZeRO-3
                assert view.shape[1:] == tuple(state_values.shape[1:])
            with Path(view.path).open("rb") as file:
                file.seek(view.offset)
                expected = file.read(view.nbytes)
            state_bytes = state_values[: view.shape[0]].contiguous().reshape(-1).view(torch.uint8)
            assert state_bytes.numpy().tobytes() == expected


def test_rules_of_the_user_overrule_the_recorded_ones(tmp_path):
    """What the files say is kept, under a name of its own."""
    source = Path("fixtures/deepspeed/z1-tp2-dp2/checkpoint").resolve()
    cuts = {
        '"replicate"': [
            "emb.weight",
            "block.norm{n}.weight",
            "block.norm{n}.bias",
            "block.o.bias",
            "block.down.bias",
            "head.weight",
        ],
        '{ pattern = "shard", dim = 0 }': [
            f"block.{name}.{part}" for name in ("q", "k", "v", "up") for part in ("weight", "bias")
        ],
        '{ pattern = "shard", dim = 1 }': ["block.o.weight", "block.down.weight"],
    }
    rules = [f'[[rule]]\nname = "{name}"\ntp = {cut}\n' for cut, names in cuts.items() for name in names]
    (tmp_path / "rules.toml").write_text('name = "mine"\n' + "".join(rules))
    ucp.convert(source, tmp_path / "atoms", patterns=tmp_path / "rules.toml", verify=True)
    assert ucp.diff(source, tmp_path / "atoms").equal
    names = [extra.name for extra in ucp.inspect(tmp_path / "atoms").extras]
    assert names.count("universal_checkpoint_info") == names.count("universal_checkpoint_info.overruled") == 1
