"""Layouts of DeepSpeed that are recognised, named, and not read: each with what was seen and what to do.

Names are looked at first (`refuse_names`), then what the files say (`refuse_contents`); each raises one
UnsupportedError for all it finds. Options that such a checkpoint has no use for are refused too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucp.contract.protocols import SourceOptions
from ucp.errors import IdleOptionError, UnsupportedError, listed
from ucp_formats.deepspeed.locate import TagFolder
from ucp_formats.deepspeed.names import OFFLOADED

__all__ = ["refuse_contents", "refuse_idle_options", "refuse_names"]

_LATER = "ucp does not read this layout yet"
_AUTOEP = f"experts fused by AutoEP; {_LATER}: train with deepspeed.moe.layer.MoE, or without expert parallelism"
_NVME = "optimizer states offloaded to NVMe are raw swap files: resume with offload_optimizer device cpu and save again"
_ELASTIC = "elastic_checkpoint drops parameter groups: set zero_optimization.elastic_checkpoint to false and save again"
_MICS = f"MiCS (only the first shard group saves); {_LATER}: resume without mics_shard_size and save again"
_OLD_STAGE_1 = "ZeRO-1 of DeepSpeed 0.3 (sub-partitions): resume in DeepSpeed 0.4 to 0.6 and save again"


def refuse_names(folder: TagFolder) -> None:
    """Raise UnsupportedError for layouts that file names give away."""
    _raise(str(folder.path), list(_by_name(folder)))


def refuse_contents(where: str, roots: Mapping[str, Mapping[object, object]]) -> None:
    """Raise UnsupportedError for layouts that files of `where` give away; `roots`: file name to what was saved."""
    found: dict[str, str] = {}
    for file, root in roots.items():
        for seen, why in _by_content(root):
            found.setdefault(why, f"{file}: {seen}: {why}")
    _raise(where, list(found.values()))


def refuse_idle_options(options: SourceOptions, tp: int, where: str) -> None:
    """Raise IdleOptionError where a model family is named and there is nothing for it to say."""
    if options != SourceOptions() and tp == 1:
        raise IdleOptionError(
            f"{where} has one tensor-parallel rank, so that every tensor is whole: drop --family and --patterns"
        )


def _raise(where: str, found: list[str]) -> None:
    if found:
        raise UnsupportedError(f"{where} was written by DeepSpeed with a layout that cannot be read:\n{listed(found)}")


def _by_name(folder: TagFolder) -> Iterator[str]:
    if OFFLOADED in folder.entries:
        yield f"{OFFLOADED}/: {_NVME}"


def _by_content(root: Mapping[object, object]) -> Iterator[tuple[str, str]]:
    """What was seen, and the reason for refusing it."""
    yield from ((key, _AUTOEP) for key in ("ds_autoep_layers", "autoep_layers", "folding") if root.get(key) is not None)
    yield from _by_optimizer(root)
    config = root.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict):
        size = zero.get("mics_shard_size")
        if isinstance(size, int) and size > 0:
            yield f"mics_shard_size {size}", _MICS
        offload = zero.get("offload_optimizer")
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            yield "offload_optimizer device nvme", _NVME


def _by_optimizer(root: Mapping[object, object]) -> Iterator[tuple[str, str]]:
    saved = root.get("optimizer_state_dict")
    if not isinstance(saved, dict):
        return
    base = saved.get("base_optimizer_state")
    if isinstance(base, list) and "single_partition_of_fp32_groups" in saved:
        yield "base_optimizer_state is a list", _ELASTIC
    if "local_sub_partitions_of_fp32_groups" in saved:
        yield "local_sub_partitions_of_fp32_groups", _OLD_STAGE_1
    if saved.get("ds_zero_partition_groups") is not None:
        yield "ds_zero_partition_groups", _AUTOEP
