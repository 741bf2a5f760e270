"""Files for a layout, made from those of another, equal to the ones that megatron-core 0.16.1 wrote at that layout.

All layouts of a model hold the same state (make_megatron.py), so everything must agree: keys, shapes, types,
every element of weights, masters and moments, buffers with their gaps, groups, scheduler and arguments. What may differ
is listed.
"""

from __future__ import annotations

import pickle
import types
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ucp.api import convert

ROOT = Path(__file__).parents[3] / "fixtures" / "megatron"
PAIRS = [
    ("llama-tp2-dp2-dp", "llama-tp2-pp2-dp2-torch-zero", "tp=2,pp=2,dp=2", {}),
    ("llama-tp2-pp2-dp2-full", "llama-pp2-vpp2-dp2-torch-zero", "pp=2,vpp=2,dp=2", {}),
    ("llama-pp2-vpp2-dp2-torch-zero", "llama-tp2-pp2-dp2-full", "tp=2,pp=2,dp=2", {}),
    ("gpt-tp2-pp2-torch", "gpt-tp2-pp2-plain", "tp=2,pp=2", {}),
    (
        "gpt-dp4-dp",
        "gpt-tp2-pp2-torch-zero-buckets",
        "tp=2,pp=2",
        {"overlap_grad_reduce": "true", "ddp_bucket_size": "3000"},
    ),
    ("mixtral-pp2-ep2-dp2-dp", "mixtral-tp2-ep2-etp1-torch-zero", "tp=2,ep=2,etp=1", {}),
    ("mixtral-tp2-ep2-etp1-torch-zero", "mixtral-ep4-dp4-full", "ep=4,dp=4", {}),
    ("mixtral-ep4-dp4-full", "mixtral-ep2-dp2-torch", "ep=2,dp=2", {"use_distributed_optimizer": "false"}),
    ("deepseek-ep2-dp2-full-singleton", "deepseek-tp2-ep2-dp2-torch-zero", "tp=2,ep=2,dp=2", {}),
    ("deepseek-tp2-ep2-dp2-torch-zero", "deepseek-tp2-ep2-dp2-full", "tp=2,ep=2,dp=2", {}),
    ("mamba-tp2-dp2-torch-zero", "mamba-tp2-dp2-torch-zero", "tp=2,dp=2", {}),
    ("qwen-tp4-torch-zero", "qwen-tp4-torch-zero", "tp=4", {}),
]
MAY_DIFFER = {
    "/rng_state": "of a layout",
    "/args/rank": "",
    "/args/local_rank": "",
    "/args/no_save_rng": "tells Megatron not to look for random states",
    "/args/dist_ckpt_optim_fully_reshardable": "said of the file that was read",
    "/args/ckpt_fully_parallel_save": "",
}


class _Unpickler(pickle.Unpickler):
    """Names of megatron-core, which is not installed here, stand for themselves."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron"):
            return lambda *args: (module, name, *args)
        return super().find_class(module, name)


def load(path: Path) -> Any:
    reader = types.ModuleType("pickle")
    reader.Unpickler, reader.load = _Unpickler, lambda file, **own: _Unpickler(file, **own).load()
    return torch.load(path, pickle_module=reader, weights_only=False)


def flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path; a step is a number, however it is kept."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        for key, own in value.items():
            yield from flat(own, f"{at}/{key}")
    elif isinstance(value, list | tuple):
        for number, own in enumerate(value):
            yield from flat(own, f"{at}/{number}")
    else:
        yield at, float(value) if at.endswith("step") else value


def differences(theirs: Any, ours: Any) -> list[str]:
    """What is not the same, beside what may differ."""
    a, b = dict(flat(theirs)), dict(flat(ours))
    keys = [key for key in a.keys() | b.keys() if not key.startswith(tuple(MAY_DIFFER))]
    # a count in the groups as well, for Adam of Apex, does no harm to torch's
    keys = [key for key in keys if not ("/param_groups/" in key and key.endswith("/step") and key not in a)]
    return sorted(f"{key}: {a.get(key)!r} -> {b.get(key)!r}" for key in keys if not same(a.get(key), b.get(key)))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def distributed(root: Path) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Tensors of a torch_dist checkpoint, read by torch, and the keys of objects."""
    saved = pickle.loads((root / ".metadata").read_bytes()).state_dict_metadata
    tensors = {
        key: torch.empty(own.size, dtype=own.properties.dtype)
        for key, own in saved.items()
        if isinstance(own, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that it is alone
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(root), no_dist=True)
    return tensors, {key for key in saved if key not in tensors and not key.startswith("rng_state")}


@pytest.mark.parametrize(
    ("src", "like", "topology", "settings"), PAIRS, ids=lambda own: own if isinstance(own, str) else ""
)
def test_as_megatron_writes_it(src, like, topology, settings, tmp_path):
    theirs = ROOT / like / "checkpoint" / "iter_0000010"
    layout = "torch_dist" if (theirs / "metadata.json").exists() else "torch"
    convert(
        ROOT / src / "checkpoint",
        tmp_path / "out",
        to="megatron",
        topology=topology,
        layout=layout,
        settings=settings,
        workers=1,
    )
    ours = tmp_path / "out" / "iter_0000010"
    if layout == "torch_dist":
        (found, objects), (wanted, there) = distributed(ours), distributed(theirs)
        assert differences(wanted, found) == []
        assert there <= objects
    files = {str(path.relative_to(theirs)) for path in theirs.rglob("*.pt")}
    assert {str(path.relative_to(ours)) for path in ours.rglob("*.pt")} == files
    for name in sorted(files):
        assert differences(load(theirs / name), load(ours / name)) == [], name
