"""Checkpoints of pipeline, tensor and expert parallelism, compared bit for bit with what each rank of the run held.

The truth of a run is kept per model-parallel rank (`truth-mp00`), per expert-parallel rank (`truth-ep00`), or both
(`truth-mp00-ep00`), with the rank's own names and shapes. Here the wholes are made from it with numpy, by rules of this
test alone: a tensor that is as large on a rank as the atom is the whole, any other is a cut of the dim that is shorter.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from ucp_formats.deepspeed.read.source import DeepSpeedFormat

import ucp
from tests.golden.deepspeed.test_deepspeed_read import as_float32, bits, filled, gathered
from ucp.core.gaps import check_cover
from ucp.core.index import Index, Kind
from ucp.core.layout import Overlap
from ucp.core.slices import Locator, resolve_replicas
from ucp.core.target import full_slice
from ucp.core.tensor import DType, TensorRef
from ucp.io.safetensors import read_header
from ucp.io.torch_file.archive import read_archive

ROOT = Path(__file__).parents[3] / "fixtures" / "deepspeed"
CASES = sorted(path.name for path in ROOT.iterdir() if list(path.glob("truth-*.json")))
CONVERTED = [name for name in CASES if (ROOT / name / "universal").is_dir()]
EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")
BLOCKS = {"gate_up": (1, 1), "qkv.weight": (2, 1, 1)}
"""Part of a name to the relative lengths of blocks of dim 0, each cut on its own."""
AVERAGED = re.compile(r"\d+\.scale/")
"""Parameters that every tensor-parallel rank trains on its own."""

Words = NDArray[Any]


@cache
def index_of(case: str) -> Index:
    return DeepSpeedFormat().read(ROOT / case / "checkpoint")


@cache
def reports(case: str) -> dict[Path, dict[str, Any]]:
    """What each rank said, in the order of the ranks, by its file."""
    return {path: json.loads(path.read_text()) for path in sorted((ROOT / case).glob("truth-*.json"))}


@cache
def truths(case: str) -> list[dict[str, TensorRef]]:
    """What each rank held, experts by their global numbers."""
    return [
        {_global(path, key): ref for key, ref in dict(read_header(str(path)).tensors).items()}
        for path in sorted((ROOT / case).glob("truth-*.safetensors"))
    ]


@cache
def opened(case: str) -> ucp.Checkpoint:
    return ucp.open(ROOT / case / "checkpoint")


def read(case: str, name: str, state: str) -> Words:
    """The whole state of an atom, as unsigned words."""
    found = index_of(case).atoms[name].states[state]
    if found.overlap is not Overlap.MEAN:
        return gathered(found)
    mean: Words = opened(case).read(name, state).numpy().view(np.uint32)
    return mean


def _global(truth: Path, key: str) -> str:
    """The name with the global number of an expert, as that rank of the run would count it."""
    expert, rank = EXPERT.fullmatch(key), re.search(r"-ep(\d+)", truth.stem)
    if expert is None or rank is None:
        return key
    groups = [group["names"] for group in reports(truth.parent.name)[truth.with_suffix(".json")]["groups"]]
    names = [name for group in groups for name in group if name.startswith(expert[1])]
    local = 1 + max(int(match[2]) for name in names if (match := EXPERT.fullmatch(name)))
    return f"{expert[1]}{int(rank[1]) * local + int(expert[2])}{expert[3]}"


def wholes(case: str, key: str, shape: tuple[int, ...]) -> list[Words]:
    """The whole as several sets of ranks hold it: one, or one per copy."""
    held = [bits(own[key]) for own in truths(case) if key in own]
    if AVERAGED.match(key) and index_of(case).topology.tp > 1:
        pairs = zip(held[::2], held[1::2], strict=True)
        return [((a.view(np.float32) + b.view(np.float32)) / 2).view(np.uint32) for a, b in pairs]
    if all(part.shape == shape for part in held):
        return held
    (dim,) = {dim for part in held for dim, (n, whole) in enumerate(zip(part.shape, shape, strict=True)) if n != whole}
    degree = shape[dim] // held[0].shape[dim]
    blocks = next((own for part, own in BLOCKS.items() if part in key), (1,))
    length = held[0].shape[dim] // sum(blocks)
    edges = [length * sum(blocks[:number]) for number in range(1, len(blocks))]
    found = []
    for at in range(0, len(held), degree):
        cut = [np.split(part, edges, axis=dim) for part in held[at : at + degree]]
        found.append(np.concatenate([part for block in zip(*cut, strict=True) for part in block], axis=dim))
    return found


@pytest.mark.parametrize("case", CASES)
def test_pieces_tile_every_tensor(case: str) -> None:
    check_cover(index_of(case))


@pytest.mark.parametrize("case", CASES)
def test_every_state_of_every_rank_is_read_bit_for_bit(case: str) -> None:
    index = index_of(case)
    keys = {key for own in truths(case) for key in own}
    trained = {key.rpartition("/")[0] for key in keys if key.endswith("/weight")}
    checked = 0
    for key in sorted(keys):
        name, _, state = key.rpartition("/")
        if state == "module" and name in trained:
            continue
        own = "weight" if state == "module" else state
        found = index.atoms[name].states[own]
        ours = read(case, name, own)
        for whole in wholes(case, key, found.global_shape):
            np.testing.assert_array_equal(ours, whole, err_msg=key)
            checked += 1
    assert checked >= 3 * len(trained)


@pytest.mark.parametrize("case", CASES)
def test_no_state_is_there_that_the_truth_lacks(case: str) -> None:
    keys = {key for own in truths(case) for key in own}
    for atom, state, _ in index_of(case).states():
        known = f"{atom.name}/{state}" in keys or state == "step"
        assert known or (state == "weight" and f"{atom.name}/module" in keys), f"{atom.name}/{state}"


@pytest.mark.parametrize("case", CASES)
def test_copies_are_equal_or_the_weight_rounded(case: str) -> None:
    copies = 0
    for atom, name, state in index_of(case).states():
        target = full_slice(atom.name, name, state)
        for pieces in resolve_replicas(target, Locator(state), 0, target.stop):
            assert len({piece.ref.dtype for piece in pieces}) == 1
            dtype, copy = pieces[0].ref.dtype, filled(state, pieces)
            copies += 1
            if dtype is state.dtype:
                np.testing.assert_array_equal(copy, gathered(state), err_msg=f"{atom.name}/{name}")
                continue
            if state.overlap is Overlap.MEAN:  # a copy is one of the terms, rounded
                continue
            assert dtype in (DType.BFLOAT16, DType.FLOAT16)
            exact = as_float32(gathered(state), state.dtype)
            np.testing.assert_allclose(as_float32(copy, dtype), exact, rtol=2.0**-8, atol=6.2e-5, err_msg=atom.name)
    assert copies or case == "z0-pp2-alike"  # of one rank a stage


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
                found = json.loads(json.dumps(hyper[_global(truth, f"{name}/x")[:-2]]))
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
    folders = [path for path in zero.iterdir() if path.is_dir()]
    assert {path.name for path in folders} == {name for group in index.groups for name in group.params}
    for folder in folders:
        for stem, state in (("fp32", "weight"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            saved = read_archive(str(folder / f"{stem}.pt")).root
            assert isinstance(saved, dict)
            found = read(case, folder.name, state)
            np.testing.assert_array_equal(bits(saved["param"]), found[: saved["param"].shape[0]])


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
