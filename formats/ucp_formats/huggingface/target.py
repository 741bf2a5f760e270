"""Target `huggingface`: a folder that `from_pretrained` of transformers reads.

    DST/config.json                          see `ucp_formats.huggingface.config`
    DST/model.safetensors                    weights; if they are more than --set max_shard_size:
    DST/model-00001-of-00003.safetensors ... and
    DST/model.safetensors.index.json         which tensor lies in which file
    DST/tokenizer.json ...                   files that are published with the model, if known

Only weights are written: the format has no place for anything else. If the source has master weights of another type,
they are written in the type in which the model computes. Tensors fill the files in the order of the model
(huggingface_hub 2.4, `serialization/_base.py`), and each file has the bytes that safetensors' own writer gives it.
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
from ucp.contract.run_extras import ExtraRow, ExtraTable, ExtraValues
from ucp.contract.sidecars import add_sidecars, describe_left, is_adapter, list_sidecars
from ucp.core.gaps import check_weights
from ucp.core.index import WEIGHT, AtomIndex, Index, Kind
from ucp.core.target import Literal, OutputFile, Placement, Slice, TargetOptions, TargetPlan, describe_casts, full_slice
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.core.union import add_copies
from ucp.errors import MisfitError, UnknownFamilyError, UnsupportedError, UsageError, format_count, format_list
from ucp.families.family import Family
from ucp.io.safetensors import layout_safetensors
from ucp_formats.huggingface.config import (
    NONE,
    ModelConfig,
    carried_config,
    check_config,
    derive_config,
    is_published,
    read_config,
    refusal_note,
    without_padding,
)
from ucp_formats.huggingface.locate import CONFIG
from ucp_formats.huggingface.source import find_buffers, find_family

MAX_SHARD_SIZE = "5GB"
"""Default of huggingface_hub; transformers 5 has 50GB."""
EXTRAS: ExtraTable = {CONFIG_EXTRA: ExtraRow(keys=(CONFIG,))}
"""Extras that the format keeps: config.json."""

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
        """Whether the source has names of transformers: its style says so, or a config.json comes with it."""
        return naming_style_of(index) == self.names or _find_config(index, settings.get("config")) is not None

    def find_faults(self, written: Path) -> Iterator[str]:
        """What safetensors' own reader, which transformers calls, refuses: it has checks of its own on every header."""
        from safetensors import SafetensorError, safe_open

        for path in sorted(written.glob("*.safetensors")):
            try:
                with safe_open(path, framework="numpy"):  # checks the whole header
                    pass
            except SafetensorError as error:
                yield f"{path.name}: safetensors refuses it: {error}"

    def model_arguments(self, index: Index, settings: Mapping[str, str]) -> Mapping[str, object]:
        """What is known of the model, together with the configuration in the folder that the user gives."""
        option = settings.get("config")
        config = _find_config(index, option)
        if config is None and option is None and not run_arguments(index):
            raise _no_config(index)  # before the user is asked for sizes, which a config.json may have
        return {**recorded_arguments(index), **(config.values if config else {}), **parse_values(settings)}

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Files. Raises UsageError, MissingStateError, MisfitError."""
        _check_options(topology, options)
        limit = parse_shard_size(options.settings.get("max_shard_size", MAX_SHARD_SIZE))
        check_weights(index)
        try:
            family = target_family(index, options, recorded_arguments(index))[0]
        except UnknownFamilyError:
            family = None
        option = options.settings.get("config")
        config = _find_config(index, option)
        index = without_padding(index, family, config)
        if config is None and option is None:
            config = _derive_config(index, family)
        refusal = refusal_note(config) if config is not None else None
        index = replace(index, notes=(*filter(None, [refusal]), *index.notes))
        written = _written_index(index, config)
        if config is not None:
            check_config(config, written.shapes, family, is_carried=option is None)
        slices = _slices(index, written, options.dtypes.get(WEIGHT))
        check_text(tensor.param for tensor in slices)
        files = split_into_files(slices, limit=limit)
        notes = _notes(index, written, slices, limit, is_cast=WEIGHT in options.dtypes)
        plan = TargetPlan(
            files=tuple(file.output for file in files),
            placements=tuple(placement for file in files for placement in file.placements),
            casts=describe_casts(written, slices),
            notes=tuple(notes),
            dropped=tuple(_dropped(index)),
        )
        texts = tuple(_text_files(index, config, files))
        last = tuple(file.path for file in texts if file.path == _INDEX)
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


def _find_config(index: Index, option: str | None) -> ModelConfig | None:
    """The configuration in the folder that the user gives, or that came with the checkpoint."""
    if option == NONE:
        return None
    return carried_config(index) if option is None else read_config(Path(option))


def _derive_config(index: Index, family: Family | None) -> ModelConfig:
    """The configuration for a model that came without one. Raises UsageError if none can be made."""
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


def _written_index(index: Index, config: ModelConfig | None) -> Index:
    """`index` as a reader of the target sees it: weights, under all of their names except those that transformers ties.

    If the source holds a tied weight twice, both are compared and one is written.
    """
    values = config.values if config is not None else {}
    names = {name: name for name in index.atoms} | ({} if values.get(_TIES) is True else dict(index.aliases))
    atoms = {
        name: replace(index.atoms[first], name=name, states={WEIGHT: index.atoms[first].states[WEIGHT]})
        for name, first in names.items()
    }
    tied = find_tied_output(atoms, values)
    if tied is not None and tied[0] in atoms:
        atoms[tied[1]] = _with_copy(atoms[tied[1]], atoms.pop(tied[0]))
    family = find_family({name: atom.global_shape for name, atom in atoms.items()}, values)
    buffers = find_buffers({name: atom.states[WEIGHT] for name, atom in atoms.items()}, family)
    for name, atom in atoms.items():
        atoms[name] = replace(atom, kind=Kind.BUFFER if name in buffers else Kind.PARAMETER)
    return replace(index, atoms=atoms, groups=(), aliases=dict([tied] if tied is not None else []), lost={})


def _with_copy(atom: AtomIndex, second: AtomIndex) -> AtomIndex:
    """A weight, with the weight that is tied to it as a copy. Raises MisfitError if they cannot be equal."""
    weight, copy = atom.states[WEIGHT], second.states[WEIGHT]
    if (weight.dtype, weight.global_shape) != (copy.dtype, copy.global_shape):
        raise MisfitError(
            f"config.json ties {second.name} to {atom.name}, but their shapes ({list(copy.global_shape)}, "
            f"{list(weight.global_shape)}) or types differ: set {_TIES}: false in it"
        )
    return replace(atom, states={WEIGHT: replace(weight, fragments=add_copies(weight.fragments, copy.fragments))})


def _slices(index: Index, written: Index, dtype: str | None) -> list[Slice]:
    """Every tensor, in the type that is written. Raises UnsupportedError for types that safetensors lacks."""
    unsupported = [name for name, atom in written.atoms.items() if atom.states[WEIGHT].dtype is DType.COMPLEX128]
    if unsupported:
        raise UnsupportedError(f"safetensors has no type complex128; got it in\n{format_list(unsupported)}")
    slices = []
    for name, atom in written.atoms.items():
        source = index.atoms.get(name) or index.atoms[index.aliases[name]]
        slices.append(full_slice(name, WEIGHT, atom.states[WEIGHT], dtype=_dtype_of(source, dtype)))
    return slices


def _dtype_of(atom: AtomIndex, option: str | None) -> DType:
    """The user's type, else the type in which the model computes; buffers, integers and 8-bit floats keep theirs."""
    stored = atom.states[WEIGHT].dtype
    if atom.kind is Kind.BUFFER or not stored.is_floating or stored.itemsize == 1:
        return stored
    return DType(option) if option else atom.model_dtype or stored


def _text_files(index: Index, config: ModelConfig | None, files: Sequence[WeightsFile]) -> Iterator[OutputFile]:
    """config.json and the index of the files (transformers 5.23, `PreTrainedModel.save_pretrained`)."""
    slices = [placement.slice for file in files for placement in file.placements]
    if config is not None:
        counts = Counter[DType]()
        for tensor in slices:
            counts[tensor.dtype] += tensor.nbytes if tensor.dtype.is_floating else 0
        (dtype, nbytes), *_ = [*counts.most_common(1), (DType.FLOAT32, 0)]
        yield _text_file(CONFIG, config.render(dtype if nbytes else None))
    if len(files) > 1:
        trained = (atom for atom in index.atoms.values() if atom.kind is not Kind.BUFFER)
        document = {
            "metadata": {
                "total_parameters": sum(atom.states[WEIGHT].numel for atom in trained),
                "total_size": sum(tensor.nbytes for tensor in slices),
            },
            "weight_map": {name: file.output.path for file in files for name in file.names},
        }
        yield _text_file(_INDEX, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())


def _text_file(path: str, text: bytes) -> OutputFile:
    return OutputFile(path=path, nbytes=len(text), literals=(Literal(0, text),))


def _notes(index: Index, written: Index, slices: Sequence[Slice], limit: int, *, is_cast: bool) -> Iterator[str]:
    """What a user may not expect. `is_cast`: whether the user asked for a type."""
    dtypes = ((tensor.dtype, written.atoms[tensor.param].states[WEIGHT].dtype) for tensor in slices)
    changes = Counter((dtype, stored) for dtype, stored in dtypes if dtype is not stored)
    for (dtype, stored), count in () if is_cast else changes.items():
        yield (
            f"{format_count(count, 'weight')} of {stored} written in {dtype}, the type in which the model computes; "
            f"--dtype weight={stored} keeps the type"
        )
    large = [tensor.param for tensor in slices if tensor.nbytes > limit]
    if large:
        yield f"larger than max_shard_size, so each in its own file, as huggingface_hub does it: {', '.join(large[:8])}"
    if written.aliases:
        pairs = (f"{alias} = {name}" for alias, name in written.aliases.items())
        yield f"not written, because transformers ties them ({_TIES}): {', '.join(pairs)}"
    twice = [name for name in index.aliases if name in written.atoms]
    if twice:
        yield f"tied in the source but not in config.json, so written twice: {', '.join(twice)}"


def _dropped(index: Index) -> Iterator[str]:
    """A line on what the format has no place for."""
    states = dict.fromkeys(name for _, name, _ in index.states() if name != WEIGHT)
    kinds = [f"the states {', '.join(states)}"] if states else []
    kinds += [format_count(len(index.groups), "parameter group", "parameter groups")] if index.groups else []
    extras = ExtraValues(index, EXTRAS).without_place()
    kinds += [f"the extras {', '.join(extras)}"] if extras else []
    if kinds:
        yield f"a model of transformers holds weights only; left out: {'; '.join(kinds)}"


def _with_published(plan: TargetPlan, written: Index, config: ModelConfig | None) -> TargetPlan:
    """`plan` with the files that are published with the model: beside the user's config.json, or the checkpoint."""
    names = [file.name for file in list_sidecars(written)]
    published = {name for name in names if is_published(name)}
    others = [name for name in names if name not in published and name != CONFIG]
    others = [name for name in others if not is_adapter(name)]  # an adapter is in the index's own list
    sidecars = [extra for extra in written.extras if extra.is_sidecar and extra.name.partition("/")[2] in published]
    files = {extra.name: extra for extra in (*sidecars, *(config.files if config is not None else ()))}
    written = replace(written, extras=tuple(files.values()))
    plan = add_sidecars(written, plan)
    dropped = (describe_left(others, "of the training, not of the model"),) if others else ()
    return replace(plan, dropped=(*plan.dropped, *dropped), written=written)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """A file of tensors, with the offsets of its tensors."""

    output: OutputFile
    """Its name, size and header."""
    placements: tuple[Placement, ...]
    """Slices that fill it, in increasing offset."""
    names: tuple[str, ...]
    """Tensors in it."""


def parse_shard_size(size: str) -> int:
    """Bytes of a size such as 5GB, in the units of huggingface_hub: powers of 1000. Raises UsageError.

    >>> parse_shard_size("1.5 mb"), parse_shard_size("4096")
    (1500000, 4096)
    """
    match = _SIZE.fullmatch(size.strip())
    nbytes = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if nbytes < 1:
        raise UsageError(
            "expected --set max_shard_size= a size above 0, such as 5GB or 500MB (KB, MB, GB, TB are powers of 1000); "
            f"got {shorter(size)!r}"
        )
    return nbytes


def split_into_files(slices: Sequence[Slice], *, limit: int) -> list[WeightsFile]:
    """The files, of at most `limit` bytes of tensors each; a larger tensor has a file of its own."""
    groups: list[list[Slice]] = []
    current: list[Slice] = []
    room = limit
    for tensor in slices:
        if tensor.nbytes > limit:
            groups.append([tensor])
            continue
        if tensor.nbytes > room:
            groups.append(current)
            current, room = [], limit
        current.append(tensor)
        room -= tensor.nbytes
    if current or not groups:
        groups.append(current)
    count = len(groups)
    files = []
    for number, group in enumerate(groups, 1):
        path = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        ordered = sorted(group, key=lambda tensor: (-_ORDER.index(tensor.dtype), tensor.param))
        entries = [(tensor.param, tensor.dtype, tensor.local_shape) for tensor in ordered]
        layout = layout_safetensors(entries, metadata={"format": "pt"}, alignment=8)
        files.append(
            WeightsFile(
                output=OutputFile(path=path, nbytes=layout.nbytes, literals=(Literal(0, layout.header),)),
                placements=tuple(
                    Placement(slice=tensor, path=path, offset=layout.offsets[tensor.param])
                    for tensor in ordered
                    if tensor.nbytes
                ),
                names=tuple(tensor.param for tensor in group),
            )
        )
    return files
