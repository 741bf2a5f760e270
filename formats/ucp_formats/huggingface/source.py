"""Format `huggingface`: models as save_pretrained of transformers, or HuggingFaceStorageWriter of torch, writes them.

1. Find the files (`locate`); read their indexes and headers (`weights`).
2. Find tied weights, buffers, and the order of the model.
3. config.json is the extra `config`; tokenizer and generation files are carried along.

These models have weights only: no optimizer states, and no groups.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ucp.contract.locating import Evidence, Located, SaveFolder
from ucp.contract.model import (
    CONFIG_EXTRA,
    find_possible_tie,
    find_tied_output,
    read_config,
    sort_by_number,
    sort_in_model_order,
)
from ucp.contract.protocols import Format
from ucp.contract.registry import choose_family
from ucp.contract.sidecars import attach_sidecars
from ucp.core.index import WEIGHT, AtomIndex, Doubt, DoubtKind, Extra, Index, Kind, SourceFile, StateIndex
from ucp.core.topology import Topology
from ucp.core.union import add_copies
from ucp.errors import FamilyError, MalformedError, UnsupportedError, format_list
from ucp.io.folder import path_of, to_absolute
from ucp.io.provenance import source_file
from ucp_formats.huggingface.locate import CONFIG, Form, ModelFiles, check_model, is_weights, locate
from ucp_formats.huggingface.weights import ModelWeights, read_weights, second_names

if TYPE_CHECKING:
    from ucp.families.family import Family

_TRAINER_STATE = "trainer_state.json"
_STEP = re.compile(r"checkpoint-(\d+)")
"""Folder of the Trainer."""


class HuggingFaceFormat(Format):
    """Format `huggingface`."""

    name = "huggingface"
    names = "huggingface"

    def detect(self, path: Path) -> Evidence | None:
        """Whether `path` is a folder with a model, or one of its files."""
        located = locate(path)
        return None if located is None else located.evidence

    def read(self, path: Path) -> Index:
        """Index of the model at `path`."""
        located = check_model(locate(path), path)
        config = read_config(to_absolute(located.root))
        _check_plain(config, located.root)
        index = _ModelIndexer(located, config, read_weights(located.root, located.content)).index(self.name)
        if located.content.is_single:
            return index
        folder = SaveFolder(path_of(index.path))
        return attach_sidecars(index, folder, is_own=lambda path: is_weights(path.name) or path.name == CONFIG)


def _check_plain(config: Mapping[str, object], root: Path) -> None:
    """Raise UnsupportedError for quantised weights, whose numbers mean nothing without their scales."""
    quantization = config.get("quantization_config", config.get("compression_config"))
    if quantization is None:
        return
    method = quantization
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "a method that it does not name")
    raise UnsupportedError(
        f"the model at {root} is quantised ({CONFIG}: {method}): its files hold numbers to be multiplied with scales, "
        "which no training framework resumes from. Load it with transformers, dequantise it (model.dequantize()), "
        "save it with save_pretrained, and pass that; or pass the model that it was made from"
    )


@dataclass(slots=True)
class _ModelIndexer:
    """Makes the index of a model."""

    located: Located[ModelFiles]
    config: dict[str, object]
    weights: ModelWeights
    aliases: dict[str, str] = field(default_factory=dict)
    tie: str = ""
    """The note on a tied output matrix."""

    def index(self, name: str) -> Index:
        """The index."""
        files = self.located.content
        root = to_absolute(self.located.root)
        tensors = self._without_ties()
        is_in_order = files.files[0].endswith((".bin", ".bin.index.json"))  # pickles keep the order
        order = list(tensors) if is_in_order else sort_in_model_order(tensors, self.config.get("model_type"))
        shapes = {name: tensor.global_shape for name, tensor in tensors.items()}
        family = find_family(shapes, self.config)
        buffers = find_buffers(tensors, family)
        return Index(
            path=os.path.join(root, files.files[0]) if files.is_single else root,
            format=name,
            evidence=self.located.reasons,
            producer=self._producer(),
            topology=Topology(dp=self.weights.ranks),
            step=self._step(),
            atoms={
                param: AtomIndex(
                    name=param,
                    global_shape=tensors[param].global_shape,
                    kind=Kind.BUFFER if param in buffers else Kind.PARAMETER,
                    states={WEIGHT: tensors[param]},
                )
                for param in order or sort_by_number(tensors)
            },
            aliases=self.aliases,
            extras=(Extra(name=CONFIG_EXTRA, value=self.config),) if self.config else (),
            files=tuple(self._files(root)),
            records=self.weights.records,
            unordered=order is None,
            notes=tuple(self._notes(is_ordered=order is not None)),
            doubts=tuple(self._config_doubts(shapes, family)),
        )

    def _config_doubts(self, shapes: Mapping[str, tuple[int, ...]], family: Family | None) -> Iterator[Doubt]:
        """The doubt that config.json belongs to another model, if it contradicts the tensors."""
        from ucp_formats.huggingface.config import ModelConfig, config_conflicts  # families take long to import

        where = os.path.join(to_absolute(self.located.root), CONFIG)
        lines = list(config_conflicts(ModelConfig(values=self.config, where=where), shapes, family))
        if self.config and lines:
            yield Doubt(
                kind=DoubtKind.CONFIG,
                text=f"expected the tensors that {where} describes; got\n{format_list(dict.fromkeys(lines))}\nFiles "
                "are missing or belong to another model, or tensors have wrong names or shapes: transformers does not "
                "load them",
            )

    def _without_ties(self) -> dict[str, StateIndex]:
        """The tensors, with tied weights once; if both are on disk, the second is compared with the first."""
        tensors = dict(self.weights.tensors)
        self.aliases = second_names(tensors)
        for second in self.aliases:
            del tensors[second]
        tied = find_tied_output(tensors, self.config)
        if tied is None or tied[0] in self.aliases:
            return tensors
        output, embedding = tied
        self.tie = f"{output} is tied to {embedding}"
        copy = tensors.pop(output, None)
        if copy is not None:
            first = tensors[embedding]
            if (copy.global_shape, copy.dtype) != (first.global_shape, first.dtype):
                raise MalformedError(
                    f"{CONFIG} in {self.located.root} ties {output} to {embedding}, but their shapes "
                    f"({list(copy.global_shape)}, {list(first.global_shape)}) or types differ: one of these files is "
                    "of another model"
                )
            tensors[embedding] = replace(first, fragments=add_copies(first.fragments, copy.fragments))
            self.tie += "; its own copy on disk is compared with it"
        self.aliases[output] = embedding
        return tensors

    def _producer(self) -> str:
        if self.located.content.form is Form.OF_RANKS:
            return "torch.distributed.checkpoint, HuggingFaceStorageWriter"
        version = self.config.get("transformers_version")
        return f"transformers {version}" if isinstance(version, str) else "Hugging Face model"

    def _step(self) -> int | None:
        folder = path_of(to_absolute(self.located.root))
        match = _STEP.fullmatch(folder.name)
        return int(match[1]) if match and (folder / _TRAINER_STATE).is_file() else None

    def _files(self, root: str) -> Iterator[SourceFile]:
        if self.located.content.form is Form.INDEXED:
            yield source_file(os.path.join(root, self.located.content.files[0]), "index of the weights")
        for name in self.weights.files:
            yield source_file(os.path.join(root, name), "weights")
        if self.config:
            yield source_file(os.path.join(root, CONFIG), "configuration of the model")

    def _notes(self, *, is_ordered: bool) -> Iterator[str]:
        files = self.located.content
        yield (
            "weights only, no optimizer states. The files do not mark buffers: every floating-point tensor counts as "
            "trained, except those that the model family lists as buffers"
        )
        if self.tie:
            yield self.tie
        if not is_ordered:
            yield "the order in which the model registers its parameters is not recorded; they are listed by name"
        if not self.config.get("model_type"):
            reason = f"{CONFIG} does not name the kind of model" if self.config else f"no {CONFIG}"
            tie = None if self.aliases else find_possible_tie(self.weights.tensors, self.config)
            if tie is not None:
                yield f"{reason}: whether {tie[0]} is tied to {tie[1]} is not known"
        if files.form is Form.NUMBERED:
            yield f"no index file: taken as complete, because all {len(self.weights.files):,} numbered files are there"
        if files.form is Form.OF_RANKS and "model_type" not in self.config:
            yield (
                "global shapes are inferred from the offsets of the shards that are there: missing files of the last "
                "ranks cannot be detected"
            )
        if files.others:
            others = ", ".join(files.others)
            yield f"{files.files[0]} is preferred to other files with weights, which are not read: {others}"


def find_buffers(tensors: Mapping[str, StateIndex], family: Family | None) -> set[str]:
    """Names of tensors that are never trained: integer tensors, and buffers by the rules of the model's family."""
    integers = {name for name, tensor in tensors.items() if not tensor.dtype.is_floating}
    if family is None:
        return integers
    by_rule = {name for name in tensors if any(rule.buffer for rule in family.rules_of(name))}
    return integers | by_rule | set(filter(family.ignores, tensors))


def find_family(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, object]) -> Family | None:
    """The family that has all names of a model; None if there is none."""
    try:
        return choose_family(names=shapes, shapes=shapes, arguments=config, explain=False)[0]
    except FamilyError:
        return None
