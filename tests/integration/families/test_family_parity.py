"""Rules against megatron-core itself: names, order of registration, and which element of the whole lies where."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ucp.contract.registry import choose_family
from ucp.core.layout import place
from ucp.families.family import Family

pytestmark = [pytest.mark.integration, pytest.mark.slow]

WORKER = Path(__file__).with_name("family_worker.py")
MAKE = Path(__file__).parents[3] / "fixtures" / "make" / "megatron"

EXPECTED = {
    "gpt:tp2": "gpt",
    "llama:tp2": "llama",
    "qwen:tp2": "mcore-gpt",
    "qwen:tp4": "mcore-gpt",
    "mixtral:tp2 ep2 etp1": "mixtral",
    "mixtral:tp2": "mixtral",
    "mixtral:ep2 dp2": "mixtral",
    "deepseek:tp2": "deepseek-v3",
    "mamba:tp2": "mcore-hybrid",
}
"""Model and layout to the family that its names and arguments are evidence of."""

REFUSED = {
    ("0.13.1", "qwen:tp4"): "fewer query groups than ranks",
    ("0.15.3", "qwen:tp4"): "fewer query groups than ranks",
    ("0.13.1", "mixtral:tp2 ep2 etp1"): "experts and tensor parallelism without sequence parallelism",
    ("0.15.3", "mixtral:tp2 ep2 etp1"): "experts and tensor parallelism without sequence parallelism",
    ("0.13.1", "mamba:tp2"): "squared ReLU",
    ("0.19.2", "mamba:tp2"): "a hybrid without Transformer Engine",
}
"""What a release cannot build here, and why."""


def versions():
    spec = importlib.util.spec_from_file_location("megatron_versions", MAKE / "megatron_versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RELEASES = versions()


@pytest.fixture(scope="module")
def described(tmp_path_factory) -> Callable[[str], Path]:
    """Folder of what the ranks of all cases of a release say: one start of Python is most of what a case costs."""

    @cache
    def describe(version: str) -> Path:
        folder = tmp_path_factory.mktemp("mcore")
        cases = [case for case in EXPECTED if (version, case) not in REFUSED]
        command = [sys.executable, str(WORKER), str(folder), *cases]
        found = subprocess.run(
            command, env=RELEASES.environment(version), capture_output=True, text=True, check=False, timeout=600
        )
        assert found.returncode == 0, found.stderr[-4000:]
        return folder

    return describe


@pytest.fixture(scope="module", params=sorted((v, c) for v in RELEASES.VERSIONS for c in EXPECTED), ids="-".join)
def ranks(request, described) -> tuple[str, list]:
    """What every rank of a job says about its parameters."""
    version, case = request.param
    if request.param in REFUSED:
        pytest.skip(f"megatron-core {version} refuses {REFUSED[request.param]}")
    files = sorted((described(version) / case).iterdir(), key=lambda own: int(own.stem))
    return case, [json.loads(own.read_text()) for own in files]


def chosen(ranks) -> tuple[Family, tuple[str, ...]]:
    shapes = {own["name"]: tuple(own["local_shape"]) for own in ranks[0]["tensors"]}
    names = {own["name"] for rank in ranks for own in rank["tensors"]}
    return choose_family(names=names, shapes=shapes, arguments=ranks[0]["arguments"], axes=ranks[0]["axes"])


def test_the_family_is_recognised(ranks):
    case, reports = ranks
    assert chosen(reports)[0].name == EXPECTED[case]


def test_names_are_registered_in_the_order_of_the_rules(ranks):
    family, _ = chosen(ranks[1])
    for rank in ranks[1]:
        names = [own["name"] for own in rank["tensors"] if own["parameter"]]
        assert family.sort_canonical(reversed(names)) == names


def test_every_element_lies_where_megatron_puts_it(ranks):
    _, reports = ranks
    family, _ = chosen(reports)
    axes = reports[0]["axes"]
    held: dict[str, list[tuple[dict, dict]]] = {}
    for rank in reports:
        for own in rank["tensors"]:
            held.setdefault(own["name"], []).append((rank["coords"], own))
    matches = family.match(held)
    assert matches.keys() == held.keys()
    for name, match in matches.items():
        assert match.buffer is not held[name][0][1]["parameter"]
        own_axes = match.axes(axes)
        parts = {tuple(coords[axis] for axis in own_axes): tuple(own["local_shape"]) for coords, own in held[name]}
        layout = match.layout(axes=axes, local_shapes=[parts[key] for key in sorted(parts)])
        shape = match.global_shape(layout, [parts[key] for key in sorted(parts)])
        for coords, own in held[name]:
            assert shape == tuple(own["global_shape"]), name
            ours = [
                (own.box.offsets, own.box.sizes, own.offset, own.strides) for own in place(layout, shape, coords=coords)
            ]
            theirs = [(p["offsets"], p["sizes"], p["start"], p["strides"]) for p in own["pieces"]]
            assert (numbered(ours, shape, own) == numbered(theirs, shape, own)).all(), name


def numbered(pieces, shape, own) -> np.ndarray:
    """Local tensor with, for every element, its position in the whole."""
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    local = np.full(np.prod(own["local_shape"], dtype=int), -1)
    for offsets, sizes, start, strides in pieces:
        part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        at = start + sum(
            np.arange(n).reshape([-1 if own == dim else 1 for own in range(len(sizes))]) * step
            for dim, (n, step) in enumerate(zip(sizes, strides, strict=True))
        )
        local[np.asarray(at).reshape(-1)] = np.broadcast_to(part, sizes).reshape(-1)
    assert (local >= 0).all()
    return local
