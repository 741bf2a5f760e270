"""Checkpoints that are several, written here: chains of `ucp.save`, of other formats, and deltas."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

import ucp
from tests.unit.live.threads import ThreadRanks, run
from tests.unit.source.delta.test_read_delta import make_versions, save_delta, save_full

if TYPE_CHECKING:
    from torch import nn

EXPERTS = 4


def _save(chain: Path, seed: int, plans: list[ucp.Full | ucp.PartialExperts | ucp.SparseWindow]) -> None:
    """A link for each plan, of a model on two ranks that share its experts."""
    import torch

    def work(ranks: ThreadRanks) -> list[str]:
        model = _make_model(EXPERTS // 2)
        optimizer = torch.optim.AdamW(model.parameters())
        generator = torch.Generator()
        paths = []
        for step, plan in enumerate(plans, 1):
            for name, param in model.named_parameters():
                what = f"{seed} {step} {name} {ranks.rank if 'experts' in name else 0}"
                generator.manual_seed(crc32(what.encode()))
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
            path = chain / f"step{step}"
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            extras = {"clip_norm": 1.0, "data": [step, seed]}
            report = ucp.save(
                model, optimizer, "dp=2,ep=2", path, plan=plan, extras=extras, chain=True, process_group=ranks
            )
            paths.append(report.path)
        return paths

    for outcome in run(2, work):
        if isinstance(outcome, Exception):
            raise outcome


def _make_model(experts: int) -> nn.Module:
    from torch import nn

    model = nn.ModuleDict({"embed": nn.Embedding(16, 8)})
    model["moe"] = nn.ModuleDict({"router": nn.Linear(8, EXPERTS, bias=False)})
    model["moe"]["experts"] = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    return model


def make_experts(folder: Path, seed: int) -> None:
    """A chain as `ucp.save` leaves it: a full link, then some experts at a time."""
    _save(folder, seed, [ucp.Full(), *(ucp.PartialExperts(1) for _ in range(3))])


def make_sparse(folder: Path, seed: int) -> None:
    """A sparse window and a part of the next, as `ucp.save` leaves them."""
    experts = [f"moe.experts.{number}" for number in range(EXPERTS)]
    _save(folder, seed, [ucp.SparseWindow(((*experts[:2], "embed"), ("moe.router", *experts[2:])))] * 3)


def make_store(folder: Path, seed: int) -> None:
    """A single save of all ranks."""
    _save(folder, seed, [ucp.Full()])


def make_mixed(folder: Path, seed: int) -> None:
    """Links of other formats: torch, DCP, and a store of some experts."""
    _save(folder / "saves", seed, [ucp.Full(), ucp.Full(), ucp.PartialExperts(2)])
    ucp.convert(folder / "saves/step1", folder / "torch", to="torch", workers=1, fsync=False)
    ucp.convert(folder / "saves/step2", folder / "dcp", to="dcp", topology="dp=2", workers=1, fsync=False)
    for name in ("chain.json", "step1", "step2"):
        entry = folder / "saves" / name
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    ucp.add_to_chain(folder, [folder / "torch", folder / "dcp", folder / "saves/step3"])


def make_delta(folder: Path, seed: int) -> None:
    """Three versions of a run, all states: a store and two deltas, with a list of all tensors."""
    saves = folder.with_name(f"{folder.name}.saves")
    _save(saves, seed, [ucp.Full()] * 3)
    folder.mkdir(parents=True)
    base = ucp.convert(saves / "step1", folder / "weight_v000000", workers=1, fsync=False).dst
    for version, encoding in ((1, "xor"), (2, "overwrite")):
        out = folder / f"weight_v{version:06d}"
        base = ucp.delta(base, saves / f"step{version + 1}", out, encoding=encoding).path


def make_stack(folder: Path, seed: int) -> None:
    """What slime writes: weights of a Hugging Face folder, and deltas with checksums of what changed."""
    versions = make_versions(4, seed)
    save_full(folder / "weight_v000000", versions[0])
    for number, (before, after) in enumerate(pairwise(versions), 1):
        encoding = ("xor", "overwrite")[number % 2]
        save_delta(folder / f"weight_v{number:06d}", before, after, encoding=encoding, checksum="xxh3-128")


Recipe = Callable[[Path, int], None]

RECIPES: tuple[tuple[Recipe, str], ...] = (
    (make_experts, ""),
    (make_sparse, ""),
    (make_store, "step1"),
    (make_mixed, ""),
    (make_delta, "weight_v000002"),
    (make_stack, "weight_v000003"),
)
"""Each with the folder in what it makes that is opened."""
