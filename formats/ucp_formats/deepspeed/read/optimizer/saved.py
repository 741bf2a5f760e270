"""Parses optimizer files into typed values: torch optimizers, which number their parameters, and what DeepSpeed adds.

A *slot* is one such number. It stands for what the optimizer steps: a parameter, a flat tensor or a sub-group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ucp.contract.layouts import Span
from ucp.contract.ranks import Checksums, Problems
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.fields import (
    Shape,
    describe_value,
    require_integer,
    require_mapping,
    require_sequence,
    require_tensor,
    text,
)
from ucp.io.pickle.values import Stub
from ucp_formats.deepspeed.config import RunConfig
from ucp_formats.deepspeed.names import FileName
from ucp_formats.deepspeed.read.files import SavedFile

_EXPERTS = re.compile(r"ep_size_\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """One entry of `param_groups`."""

    slots: tuple[int, ...]
    """Numbers of its parameters, flat tensors or sub-groups (`params`)."""
    names: tuple[str, ...] | None
    """Names that torch kept if the optimizer was built from named parameters (`param_names`, since torch 2.6)."""
    hyper: Mapping[str, object]
    """All other entries."""
    name: str
    """Name that DeepSpeed gave it; empty if it has none."""
    has_experts: bool
    """Whether DeepSpeed marks it as a group of experts."""

    @classmethod
    def of(cls, saved: object, where: str) -> SavedGroup:
        """The group `saved`. The name of an expert group, for example `ep_size_2`, is not a hyper-parameter."""
        entries = require_mapping(saved, where)
        names, name, has_experts = entries.get("param_names"), entries.get("name"), entries.get("moe") is True
        members = {"params", "param_names"}
        if is_named_for_experts(entries):
            members.add("name")
        return cls(
            slots=_integers(entries.get("params"), f"params of {where}"),
            names=tuple(map(str, names)) if isinstance(names, list) else None,
            hyper={text(key, f"a key of {where}"): value for key, value in entries.items() if key not in members},
            name=name if isinstance(name, str) else "",
            has_experts=has_experts,
        )


def is_named_for_experts(group: Mapping[str, object] | Mapping[object, object]) -> bool:
    """Whether DeepSpeed named a parameter group after the ranks that share its experts."""
    return group.get("moe") is True and _EXPERTS.fullmatch(str(group.get("name"))) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizer:
    """state_dict of a torch optimizer."""

    groups: tuple[SavedGroup, ...]
    """Parameter groups."""
    state: Mapping[int, Mapping[str, object]]
    """Slot to its states; slots that were never stepped are absent."""
    saved_groups: Sequence[object]
    """`param_groups` as saved, to compare with other files and to keep as an extra."""

    @classmethod
    def of(cls, saved: object, where: str) -> TorchOptimizer:
        """The state_dict `saved`."""
        entries = require_mapping(saved, where)
        groups = require_sequence(entries.get("param_groups"), f"param_groups of {where}")
        state = require_mapping(entries.get("state"), f"state of {where}").items()
        return cls(
            groups=tuple(SavedGroup.of(group, f"param_groups[{n}] of {where}") for n, group in enumerate(groups)),
            state={slot: _by_name(entry, f"state[{slot}] of {where}") for slot, entry in state if type(slot) is int},
            saved_groups=groups,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnshardedOptimizer:
    """An optimizer without ZeRO: `optimizer` in a model-states file, or in the file of an expert-parallel rank."""

    where: str
    """The file, for messages."""
    kind: str
    """DeepSpeed's class around the torch optimizer, or "torch" if there is none."""
    torch: TorchOptimizer
    """The torch optimizer in it."""
    masters: tuple[tuple[TensorRef, ...], ...]
    """Masters per group: one per parameter (FP16_UnfusedOptimizer) or one flat (FP16_Optimizer); empty for "torch"."""
    recorded: tuple[Mapping[str, Shape], ...]
    """`param_shapes`, by group: name to shape, in the optimizer's order; empty in files that DeepSpeed wrote."""
    saved: Mapping[object, object]
    """The whole value, for extras."""

    @classmethod
    def of(cls, saved: object, where: str, recorded: tuple[Mapping[str, Shape], ...]) -> UnshardedOptimizer:
        """The optimizer `saved`."""
        entries = require_mapping(saved, "optimizer")
        flat, unfused = entries.get("fp32_groups_flat"), entries.get("fp32_groups")
        if "fp32_groups_flat" in entries:
            kind = "FP16_Optimizer"
            masters = [[master] for master in require_sequence(flat, "fp32_groups_flat")]
        elif "fp32_groups" in entries:
            kind = "FP16_UnfusedOptimizer"
            masters = [[*require_sequence(group, "fp32_groups")] for group in require_sequence(unfused, "fp32_groups")]
        else:
            kind, masters = "torch", []
        key = "optimizer" if kind == "torch" else "optimizer_state_dict"
        torch = TorchOptimizer.of(saved if kind == "torch" else entries.get(key), key)
        expected = [1 if kind == "FP16_Optimizer" else len(group.slots) for group in torch.groups]
        if kind != "torch" and [len(group) for group in masters] != expected:
            raise MalformedError(
                f"expected {expected} fp32 masters in the groups of {kind}, according to its param_groups; got "
                f"{[len(group) for group in masters]}"
            )
        return cls(
            where=where,
            kind=kind,
            torch=torch,
            masters=tuple(
                tuple(require_tensor(ref, "a master of the optimizer") for ref in group) for group in masters
            ),
            recorded=recorded,
            saved=entries,
        )


def _span(saved: object, where: str) -> Span:
    """The elements that a `fragment_address` stands for; in old versions its class is a named tuple."""
    if not isinstance(saved, Stub):
        raise MalformedError(f"expected a fragment_address for {where}; got {describe_value(saved)}")
    start, numel = saved.attribute("start"), saved.attribute("numel")
    if len(saved.args) == 2:
        numel, start = saved.args
    return Span(require_integer(start, f"start of {where}"), require_integer(numel, f"numel of {where}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFile:
    """An optimizer file of ZeRO: the share of one rank."""

    file: SavedFile
    """The file itself; other values of it become extras."""
    saved: Mapping[object, object]
    """`optimizer_state_dict`, for extras."""
    stage: int | None
    """ZeRO stage; None for BF16_Optimizer, which does not record it."""
    counts: tuple[int, ...] | None
    """Number of ranks that each group is partitioned over (`partition_count`), where recorded."""
    torch: TorchOptimizer
    """The torch optimizer, which steps flat tensors; under stage 3 its slots are the numbers of sub-groups."""
    weights: tuple[TensorRef, ...]
    """The flat masters, one per group or sub-group."""
    paddings: tuple[tuple[int, ...], ...] | None
    """For each group, the elements of padding after each parameter; None if parameters are not aligned."""
    mappings: tuple[Mapping[str, Span] | None, ...]
    """For each group, the range of each parameter in the share (`param_slice_mappings`), where recorded."""

    @classmethod
    def of(cls, file: SavedFile) -> OptimizerFile:
        """The parsed file. Raises SourceError if a value is not what DeepSpeed writes."""
        saved = require_mapping(file.root.get("optimizer_state_dict"), "optimizer_state_dict")
        stage = stage_of(saved)
        if stage not in (None, 1, 2, 3):
            raise UnsupportedError(f"expected a ZeRO stage of 1, 2 or 3; got {stage}")
        key, inner = "single_partition_of_fp32_groups", "base_optimizer_state"
        if stage == 3:
            key, inner = "fp32_flat_groups", "optimizer_state_dict"
        where, mapped = "param_alignment_paddings", "param_slice_mappings"
        paddings, mappings = saved.get(where), saved.get(mapped)
        return cls(
            file=file,
            saved=saved,
            stage=stage,
            counts=counts_of(saved),
            torch=TorchOptimizer.of(saved.get(inner), inner),
            weights=tuple(require_tensor(ref, f"a tensor of {key}") for ref in require_sequence(saved.get(key), key)),
            paddings=None
            if paddings is None
            else tuple(_integers(group, where) for group in require_sequence(paddings, where)),
            mappings=tuple(
                {name: _span(address, f"{name} in {mapped}") for name, address in _by_name(group, mapped).items()}
                if isinstance(group, dict)
                else None
                for group in (mappings if isinstance(mappings, list) else ())
            ),
        )

    @property
    def name(self) -> FileName:
        """Name of the file."""
        return self.file.name

    @property
    def config(self) -> RunConfig:
        """Configuration of the run; empty if there is none."""
        saved = self.file.root.get("ds_config")
        return RunConfig(saved if isinstance(saved, dict) else {})

    @property
    def ranks(self) -> int | None:
        """Number of data-parallel ranks: the largest of `counts`, because groups of experts have fewer ranks."""
        return max(self.counts, default=0) or None if self.counts is not None else None


def stage_of(saved: Mapping[object, object]) -> int | None:
    """`zero_stage`, where it is recorded: an enum member (`ZeroStageEnum(1)`), or a number in older versions."""
    if "zero_stage" not in saved:
        return None
    stage = saved["zero_stage"]
    return require_integer(stage.args[0] if isinstance(stage, Stub) and len(stage.args) == 1 else stage, "zero_stage")


def counts_of(saved: Mapping[object, object]) -> tuple[int, ...] | None:
    """`partition_count`, where it is recorded; stage 3 has one count for all groups."""
    counts, where = saved.get("partition_count"), "partition_count"
    if counts is None:
        return None
    return _integers(counts, where) if isinstance(counts, list | tuple) else (require_integer(counts, where),)


def same_groups(
    files: Mapping[str, TorchOptimizer], checksums: Checksums, problems: Problems
) -> tuple[SavedGroup, ...]:
    """The parameter groups that all files share; `files`: name of a file to its optimizer."""
    (first_file, first), *others = files.items()
    first_text = repr(first.saved_groups)  # comparing texts is faster
    for file, other in others:
        if repr(other.saved_groups) != first_text and not checksums.is_same(other.saved_groups, first.saved_groups):
            problems.wrong.append(f"{file}: of another run: its param_groups differ from those in {first_file}")
    return first.groups


def _by_name(saved: object, where: str) -> dict[str, object]:
    return {text(key, where): value for key, value in require_mapping(saved, where).items()}


def _integers(value: object, where: str) -> tuple[int, ...]:
    return tuple(require_integer(number, where) for number in require_sequence(value, where))
