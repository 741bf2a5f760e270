"""Target `huggingface`: a folder that `from_pretrained` of transformers reads.

    DST/config.json                          see `ucp_formats.huggingface.config`
    DST/model.safetensors                    weights; where they are more than --set max_shard_size:
    DST/model-00001-of-00003.safetensors ... and
    DST/model.safetensors.index.json         which tensor lies in which
    DST/tokenizer.json ...                   what is published with the model, where it is known

Weights alone: the format has no place for the rest. They are of the type that the model computes with, where the
source keeps masters of another. The cut into files is greedy, in the order of the model (huggingface_hub 2.4,
`serialization/_base.py`), and each file has the bytes that safetensors' own writer gives it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ucp.contract.model import CONFIG_EXTRA, find_tied_output, parse_values, recorded_arguments, run_arguments
from ucp.contract.output_names import check_text, shorter
from ucp.contract.protocols import Target
from ucp.contract.registry import naming_style_of, target_family
from ucp.contract.sidecars import add_sidecars, describe_left, is_adapter, list_sidecars
from ucp.core.gaps import check_weights
from ucp.core.index import WEIGHT, AtomIndex, Index, Kind
from ucp.core.target import Literal, OutputFile, Placement, Slice, TargetOptions, TargetPlan, describe_casts, full_slice
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.core.union import add_copies
from ucp.errors import MisfitError, UnknownFamilyError, UnsupportedError, UsageError, counted, listed
from ucp.families.family import Family
from ucp.io.safetensors import layout_safetensors
from ucp_formats.huggingface.config import (
    NONE,
    ModelConfig,
    carried_config,
    check_config,
    derive_config,
    given_config,
    is_published,
    refused_note,
    without_padding,
)
from ucp_formats.huggingface.locate import CONFIG
from ucp_formats.huggingface.source import buffers_of, find_family

MAX_SHARD_SIZE = "5GB"
"""Default of huggingface_hub; transformers 5 has 50GB."""

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]B)?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_ORDER = (
    *(DType.BOOL, DType.UINT8, DType.INT8, DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FN, DType.FLOAT8_E4M3FNUZ),
    *(DType.FLOAT8_E5M2FNUZ, DType.INT16, DType.UINT16, DType.FLOAT16, DType.BFLOAT16, DType.INT32, DType.UINT32),
    *(DType.FLOAT32, DType.COMPLEX64, DType.FLOAT64, DType.INT64, DType.UINT64),
)
"""Types in the order of safetensors 0.8 (`Dtype` in tensor.rs), which writes the last of them first."""
_TIES = "tie_word_embeddings"
_INDEX = "model.safetensors.index.json"
_SETTINGS = {
    "max_shard_size": f"bytes of tensors in a file, such as 500MB; {MAX_SHARD_SIZE} by default",
    "config": f"folder with the config.json and tokenizer of the model; {NONE}: weights alone",
}


class HuggingFaceTarget(Target):
    """Target `huggingface`."""

    name = "huggingface"
    also_called = ("safetensors", "transformers")
    names = "huggingface"
    takes_optimizer = False
    settings = _SETTINGS

    def takes_names_of(self, index: Index, settings: Mapping[str, str]) -> bool:
        """Whether they are those of transformers: of a model of it, or beside its config.json."""
        return naming_style_of(index) == self.names or _found(index, settings.get("config")) is not None

    def model_arguments(self, index: Index, settings: Mapping[str, str]) -> Mapping[str, object]:
        """What is known of the model: what the configuration says that the user names, too."""
        asked = settings.get("config")
        config = _found(index, asked)
        if config is None and asked is None and not run_arguments(index):
            raise _no_config(index)  # before sizes are asked for, which it may tell
        return {**recorded_arguments(index), **(config.values if config else {}), **parse_values(settings)}

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Files. Raises UsageError, MissingStateError, MisfitError."""
        _check_options(topology, options)
        limit = nbytes_of_shard(options.settings.get("max_shard_size", MAX_SHARD_SIZE))
        check_weights(index)
        family = _family(index, options)
        asked = options.settings.get("config")
        config = _found(index, asked)
        index = without_padding(index, family, config)
        if config is None and asked is None:
            config = _derived(index, family)
        written = _written(index, config)
        if config is not None:
            check_config(config, written.shapes, family, came_along=asked is None)
        tensors = list(_tensors(index, written, options.dtypes.get(WEIGHT)))
        check_text(own.name for own in tensors)
        shards = laid_out(tensors, limit=limit)
        plan = TargetPlan(
            files=tuple(own.file for own in shards),
            placements=tuple(place for own in shards for place in own.placements),
            casts=describe_casts(written, (own.slice for own in tensors)),
            notes=(
                *_notes(index, written, tensors, limit, is_asked=WEIGHT in options.dtypes),
                *filter(None, [refused_note(config) if config is not None else None]),
            ),
            dropped=tuple(_left_out(index)),
        )
        texts = tuple(_texts(index, config, shards))
        last = tuple(own.path for own in texts if own.path == _INDEX)
        return _with_published(replace(plan, files=(*texts, *plan.files), last=last), written, config)


def _check_options(topology: Topology | None, options: TargetOptions) -> None:
    if topology is not None:
        raise UsageError("a model of transformers does not depend on the number of ranks; drop --topology")
    if options.compress:
        raise UsageError("transformers cannot read compressed tensors; drop --compress")
    if options.tag:
        raise UsageError("a model of transformers has no tag: its folder names it. Drop --tag")
    others = [state for state in options.dtypes if state != WEIGHT]
    if others:
        raise UsageError(f"weights alone are written; drop --dtype {others[0]}=...")


def _family(index: Index, options: TargetOptions) -> Family | None:
    """The family of the model, bound to it, if it is one that is known."""
    try:
        return target_family(index, options, recorded_arguments(index))[0]
    except UnknownFamilyError:
        return None


def _found(index: Index, asked: str | None) -> ModelConfig | None:
    """The configuration that the user names, or that came with the checkpoint."""
    if asked == NONE:
        return None
    return carried_config(index) if asked is None else given_config(Path(asked))


def _derived(index: Index, family: Family | None) -> ModelConfig:
    """The configuration of a model that none came with. Raises UsageError where none can be made."""
    arguments = run_arguments(index)
    if family is not None and arguments:
        return derive_config(family, index.shapes, arguments, index.path)
    raise _no_config(index)


def _no_config(index: Index) -> UsageError:
    return UsageError(
        f"transformers needs a config.json to load a model, and {index.path} has none: name a folder that has it "
        "(--set config=DIR, such as that of the model that training started from), or write the weights alone "
        f"(--set config={NONE})"
    )


def _written(index: Index, config: ModelConfig | None) -> Index:
    """What is written of `index`, as it reads back: weights, under all of their names but those that transformers ties.

    Where the source holds a tied weight twice, both are compared while one is written.
    """
    values = config.values if config is not None else {}
    names = {name: name for name in index.atoms} | ({} if values.get(_TIES) is True else dict(index.aliases))
    atoms = {
        name: replace(index.atoms[own], name=name, states={WEIGHT: index.atoms[own].states[WEIGHT]})
        for name, own in names.items()
    }
    tied = find_tied_output(atoms, values)
    if tied is not None and tied[0] in atoms:
        atoms[tied[1]] = _with_copy(atoms[tied[1]], atoms.pop(tied[0]))
    family = find_family({name: own.global_shape for name, own in atoms.items()}, values)
    buffers = buffers_of({name: (own.states[WEIGHT].dtype, own.global_shape) for name, own in atoms.items()}, family)
    atoms = {name: replace(own, kind=Kind.BUFFER if name in buffers else Kind.PARAMETER) for name, own in atoms.items()}
    return replace(index, atoms=atoms, groups=(), aliases=dict([tied] if tied is not None else []), lost={})


def _with_copy(atom: AtomIndex, second: AtomIndex) -> AtomIndex:
    """A weight, and the second one that it is tied to as a copy. Raises MisfitError where they cannot be equal."""
    own, copy = atom.states[WEIGHT], second.states[WEIGHT]
    if (own.dtype, own.global_shape) != (copy.dtype, copy.global_shape):
        raise MisfitError(
            f"config.json ties {second.name} to {atom.name}, which have the shapes {list(copy.global_shape)} and "
            f"{list(own.global_shape)} or other types: say {_TIES}: false in it"
        )
    return replace(atom, states={WEIGHT: replace(own, fragments=add_copies(own.fragments, copy.fragments))})


def _tensors(index: Index, written: Index, asked: str | None) -> Iterator[NewTensor]:
    """Every tensor, in its type. Raises UnsupportedError for types that safetensors lack."""
    alien = [name for name, own in written.atoms.items() if own.states[WEIGHT].dtype is DType.COMPLEX128]
    if alien:
        raise UnsupportedError(f"safetensors have no type complex128, which these are of:\n{listed(alien)}")
    for name, atom in written.atoms.items():
        own = index.atoms.get(name) or index.atoms[index.aliases[name]]
        yield NewTensor(name=name, slice=full_slice(name, WEIGHT, atom.states[WEIGHT], dtype=_dtype(own, asked)))


def _dtype(atom: AtomIndex, asked: str | None) -> DType:
    """The type asked for, or else that in which the model computes; of what is no plain float, its own."""
    stored = atom.states[WEIGHT].dtype
    if atom.kind is Kind.BUFFER or not stored.is_floating or stored.itemsize == 1:
        return stored
    return DType(asked) if asked else atom.model_dtype or stored


def _texts(index: Index, config: ModelConfig | None, shards: list[Shard]) -> Iterator[OutputFile]:
    """config.json and the index of the shards (transformers 5.23, `PreTrainedModel.save_pretrained`)."""
    slices = [place.slice for own in shards for place in own.placements]
    if config is not None:
        counts = Counter[DType]()
        for own in slices:
            counts[own.dtype] += own.nbytes if own.dtype.is_floating else 0
        (dtype, nbytes), *_ = [*counts.most_common(1), (DType.FLOAT32, 0)]
        yield _text(CONFIG, config.rendered(dtype if nbytes else None))
    if len(shards) > 1:
        trained = (own for own in index.atoms.values() if own.kind is not Kind.BUFFER)
        document = {
            "metadata": {
                "total_parameters": sum(own.states[WEIGHT].numel for own in trained),
                "total_size": sum(own.nbytes for own in slices),
            },
            "weight_map": {name: own.path for own in shards for name in own.names},
        }
        yield _text(_INDEX, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())


def _text(path: str, text: bytes) -> OutputFile:
    return OutputFile(path=path, nbytes=len(text), literals=(Literal(0, text),))


def _notes(index: Index, written: Index, tensors: list[NewTensor], limit: int, *, is_asked: bool) -> Iterator[str]:
    """What a user may not expect."""
    cast = Counter(
        (own.slice.dtype, stored)
        for own in tensors
        if own.slice.dtype is not (stored := written.atoms[own.name].states[WEIGHT].dtype)
    )
    for (dtype, stored), count in () if is_asked else cast.items():
        yield (
            f"{counted(count, 'weight')} of {stored} written in {dtype}, which the model used: --dtype weight={stored} "
            "keeps them as they are"
        )
    large = [own.name for own in tensors if own.slice.nbytes > limit]
    if large:
        yield f"larger than max_shard_size, each in its own file, as huggingface_hub does it: {', '.join(large[:8])}"
    if written.aliases:
        pairs = (f"{alias} = {name}" for alias, name in written.aliases.items())
        yield f"left out, as transformers ties them ({_TIES}): {', '.join(pairs)}"
    twice = [name for name in index.aliases if name in written.atoms]
    if twice:
        yield f"tied in the source but not in config.json, so written twice: {', '.join(twice)}"


def _left_out(index: Index) -> Iterator[str]:
    """What the format has no place for."""
    states = dict.fromkeys(name for _, name, _ in index.states() if name != WEIGHT)
    kinds = [f"the states {', '.join(states)}"] if states else []
    kinds += [counted(len(index.groups), "parameter group", "parameter groups")] if index.groups else []
    extras = dict.fromkeys(own.name for own in index.extras if not own.is_sidecar and own.name != CONFIG_EXTRA)
    kinds += [f"the extras {', '.join(sorted(extras))}"] if extras else []
    if kinds:
        yield f"a model of transformers holds weights only; left out: {'; '.join(kinds)}"


def _with_published(plan: TargetPlan, written: Index, config: ModelConfig | None) -> TargetPlan:
    """`plan` and the files that are published with the model: those beside its config.json, or else the checkpoint."""
    beside = {own.name: own for own in written.extras if own.is_sidecar}
    kept = [own for own in list_sidecars(written) if is_published(own.name)]
    others = [own.name for own in list_sidecars(written) if not is_published(own.name) and own.name != CONFIG]
    left = [name for name in others if not is_adapter(name)]  # an adapter is in the index's own list
    given = config.files if config is not None else ()
    taken = {own.name: own for own in beside.values() if own.name.partition("/")[2] in {each.name for each in kept}}
    taken |= {own.name: own for own in given}
    written = replace(written, extras=tuple(taken.values()))
    plan = add_sidecars(written, plan)
    dropped = (describe_left(left, "of the training, not of the model"),) if left else ()
    return replace(plan, dropped=(*plan.dropped, *dropped), written=written)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTensor:
    """A tensor to be written."""

    name: str
    """Name in the file."""
    slice: Slice
    """Its elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A file of tensors, laid out."""

    path: str
    """Its name."""
    file: OutputFile
    """Its size and header."""
    placements: tuple[Placement, ...]
    """What fills it, in increasing offset."""
    names: tuple[str, ...]
    """Tensors in it."""


def nbytes_of_shard(size: str) -> int:
    """Bytes of a size such as 5GB, of the units of huggingface_hub: powers of 1000. Raises UsageError.

    >>> nbytes_of_shard("1.5 mb"), nbytes_of_shard("4096")
    (1500000, 4096)
    """
    found = _SIZE.fullmatch(size.strip())
    nbytes = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    if nbytes < 1:
        raise UsageError(
            "expected --set max_shard_size= a size above 0, such as 5GB or 500MB (KB, MB, GB, TB are powers of 1000); "
            f"got {shorter(size)!r}"
        )
    return nbytes


def laid_out(tensors: Sequence[NewTensor], *, limit: int) -> list[Shard]:
    """The files, of at most `limit` bytes of tensors each; a tensor that is larger has one of its own."""
    lone: list[list[NewTensor]] = []
    current: list[NewTensor] = []
    room = limit
    for own in tensors:
        nbytes = own.slice.nbytes
        if nbytes > limit:
            lone.append([own])
            continue
        if nbytes > room:
            lone.append(current)
            current, room = [], limit
        current.append(own)
        room -= nbytes
    parts = [*lone, current] if current or not lone else lone
    count = len(parts)
    names = (f"-{number:05d}-of-{count:05d}" if count > 1 else "" for number in range(1, count + 1))
    shards = []
    for suffix, part in zip(names, parts, strict=True):
        path, ordered = (
            f"model{suffix}.safetensors",
            sorted(part, key=lambda own: (-_ORDER.index(own.slice.dtype), own.name)),
        )
        entries = [(own.name, own.slice.dtype, own.slice.local_shape) for own in ordered]
        layout = layout_safetensors(entries, metadata={"format": "pt"}, alignment=8)
        shards.append(
            Shard(
                path=path,
                file=OutputFile(path=path, nbytes=layout.nbytes, literals=(Literal(0, layout.header),)),
                placements=tuple(
                    Placement(slice=own.slice, path=path, offset=layout.offsets[own.name])
                    for own in ordered
                    if own.slice.nbytes
                ),
                names=tuple(own.name for own in part),
            )
        )
    return shards
