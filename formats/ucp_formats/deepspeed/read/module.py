"""The module of a checkpoint: which names are parameters, frozen, buffers or tied, and where their own tensors lie.

ZeRO up to stage 2 saves every tensor whole in one file. Under ZeRO-3 `module` has real buffers but an empty
placeholder for each parameter, frozen parameters are in a chunk per rank, and each rank has a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ucp.contract.rank_extras import Checksums, per_rank_extras
from ucp.core.dtypes import DType
from ucp.core.fragments import Stored
from ucp.core.index import Extra, Kind
from ucp.core.layout import Layout
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, listed
from ucp.io.pickle.fields import Shape, described, mapping, shapes, tensor, text
from ucp_formats.deepspeed.partition import chunk
from ucp_formats.deepspeed.read.extras import EMPTY_SHAPES
from ucp_formats.deepspeed.read.optimizer.flat_layout import chunk_axis
from ucp_formats.deepspeed.read.optimizer.stored import LaidOut, StoredTensor
from ucp_formats.deepspeed.read.run import SavedFile

__all__ = ["ModuleEntry", "ModulePart", "read_sharded_module", "read_whole_module"]

_EXTRA_STATE = "_extra_state"
"""Last part of a name under which a module keeps anything it likes (torch.nn.Module.get_extra_state)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleEntry:
    """One tensor of the model, as its own file has it."""

    kind: Kind
    """What it is."""
    shape: Shape
    """Elements per dim: of what one model-parallel rank has, until all are put together."""
    dtype: DType
    """Type in which the model computes."""
    tensor: StoredTensor | None
    """Where its elements lie in the model-states files; None for a placeholder."""


@dataclass(slots=True, kw_only=True)
class ModulePart:
    """The module's view of a checkpoint."""

    entries: dict[str, ModuleEntry] = field(default_factory=dict)
    """Name to entry, in the order of the model; tied names once."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Tied name to the name it is stored under."""
    extras: list[Extra] = field(default_factory=list)
    """What is no tensor of the model."""
    notes: list[str] = field(default_factory=list)
    """What was assumed."""
    dropped: list[str] = field(default_factory=list)
    """Names without data."""


def read_whole_module(file: SavedFile, trained: Mapping[str, Shape] | None) -> ModulePart:
    """The module of stages 0 to 2.

    `trained`: shapes of what the optimizer owns; None when that is not known yet, and every parameter counts as frozen.
    """
    tensors, others = _split(file)
    part = ModulePart(extras=[*_metadata(file), *(Extra(name=f"module/{key}", value=v) for key, v in others.items())])
    known = trained or {}
    _find_ties(tensors, _shared(file), known, part)
    buffers = _buffer_names(file, part)
    saved = file.root.get("frozen_param_fragments")
    copies = mapping(saved, f"frozen_param_fragments of {file.path}") if saved is not None else {}
    for name, ref in tensors.items():
        if name in part.aliases:
            continue
        kind = Kind.PARAMETER if name in known else Kind.BUFFER if name in buffers else Kind.FROZEN
        if known.get(name, ref.shape) != ref.shape:
            raise MalformedError(
                f"expected {name} of {list(known[name])}, as in param_shapes, in module of {file.path}; "
                f"got {described(ref)}"
            )
        refs = [ref, *_apart(ref, copies.get(name)), *(tensors[alias] for alias in _copies_of(name, tensors, part))]
        part.entries[name] = ModuleEntry(kind=kind, shape=ref.shape, dtype=ref.dtype, tensor=StoredTensor.whole(*refs))
    _note_excluded(file, part)
    return part


def read_sharded_module(
    files: Mapping[int, SavedFile], trained: Mapping[str, Shape], checksums: Checksums
) -> ModulePart:
    """The module of stage 3; `files`: rank to its model-states file."""
    first = files[0]
    tensors, _ = _split(first)
    part = ModulePart(extras=_metadata(first))
    others = {rank: _split(file)[1] for rank, file in files.items()}
    for key in dict.fromkeys(key for own in others.values() for key in own):
        values = {rank: own[key] for rank, own in others.items() if key in own}
        part.extras += per_rank_extras(f"module/{key}", values, checksums)
    buffers = _buffer_names(first, part)
    saved = first.root.get("frozen_param_shapes")
    frozen = shapes(saved, f"frozen_param_shapes of {first.path}") if saved is not None else {}
    saved = first.root.get(EMPTY_SHAPES)
    empty = shapes(saved, f"{EMPTY_SHAPES} of {first.path}") if saved is not None else {}
    ties = {a: name for a, name in _shared(first).items() if a not in trained and a not in frozen}
    part.aliases = {a: name for a, name in ties.items() if name in trained or name in frozen}
    for name, ref in tensors.items():
        if name in part.aliases:
            continue
        if name in trained:
            own = StoredTensor.whole(ref) if ref.shape == trained[name] and ref.numel else None
            entry = ModuleEntry(kind=Kind.PARAMETER, shape=trained[name], dtype=ref.dtype, tensor=own)
        elif name in frozen:
            entry = _frozen_entry(name, frozen[name], files, ref.dtype)
        elif name in empty and prod(empty[name]) == 0 == ref.numel:
            entry = ModuleEntry(kind=Kind.FROZEN, shape=empty[name], dtype=ref.dtype, tensor=_empty(empty[name], ref))
        elif name in buffers or ref.numel:
            kind = Kind.BUFFER if name in buffers else Kind.FROZEN
            entry = ModuleEntry(kind=kind, shape=ref.shape, dtype=ref.dtype, tensor=StoredTensor.whole(ref))
            _keep_differing(name, files, checksums, part)
        else:
            part.dropped.append(f"{name}: the checkpoint has no data of it, only its name (a placeholder of ZeRO-3)")
            continue
        part.entries[name] = entry
    _note_excluded(first, part)
    return part


def _metadata(file: SavedFile) -> list[Extra]:
    """Versions of the modules, which torch keeps as an attribute of a state_dict."""
    metadata = getattr(file.root.get("module"), "_metadata", None)
    return [] if metadata is None else [Extra(name="module_metadata", value=metadata)]


def _split(file: SavedFile) -> tuple[dict[str, TensorRef], dict[str, object]]:
    """Tensors of `module` by name, and whatever else is in it."""
    where = f"module of {file.path}"
    tensors: dict[str, TensorRef] = {}
    others: dict[str, object] = {}
    for key, value in mapping(file.root.get("module"), where).items():
        name = text(key, f"a name in {where}")
        if isinstance(value, dict):
            raise UnsupportedError(
                f"expected tensors by name in {where}; {name!r} is a dict of its own. Such a state_dict is built by "
                "the training script, and only it knows the names of the parameters"
            )
        if isinstance(value, TensorRef) and name.rpartition(".")[2] != _EXTRA_STATE:
            tensors[name] = value
        else:
            others[name] = value
    return tensors, others


def _shared(file: SavedFile) -> dict[str, str]:
    """`shared_params`: tied name to stored name; only rank 0 records it."""
    saved = file.root.get("shared_params")
    where = f"shared_params of {file.path}"
    pairs = mapping(saved, where).items() if saved is not None else ()
    return {text(alias, where): text(name, where) for alias, name in pairs}


def _find_ties(
    tensors: Mapping[str, TensorRef], shared: Mapping[str, str], trained: Mapping[str, Shape], part: ModulePart
) -> None:
    """Fill in the aliases: names that lie at the same place in the file, and what `shared_params` says besides."""
    places: dict[tuple[object, ...], list[str]] = {}
    for name, ref in tensors.items():
        if ref.numel:
            places.setdefault((ref.path, ref.offset, ref.dtype, ref.shape, ref.strides), []).append(name)
    for names in places.values():
        own = [name for name in names if name in trained] or names[:1]
        part.aliases |= {name: own[0] for name in names if name not in own}
    for alias, name in shared.items():
        stored = part.aliases.get(name, name)
        if alias in part.aliases or alias in trained or not (stored in trained or stored in tensors):
            continue
        shape = trained[stored] if stored in trained else tensors[stored].shape
        if alias not in tensors or tensors[alias].shape == shape:
            part.aliases[alias] = stored
        else:
            part.notes.append(f"shared_params ties {alias} to {name}, but their shapes differ: they are kept apart")


def _copies_of(name: str, tensors: Mapping[str, TensorRef], part: ModulePart) -> Iterator[str]:
    """Tied names whose tensors lie elsewhere in the file than that of `name`, and so can differ from it."""
    for alias, stored in part.aliases.items():
        if stored == name and alias in tensors and _place(tensors[alias]) != _place(tensors[name]):
            yield alias


def _place(ref: TensorRef) -> tuple[str, int]:
    return ref.path, ref.offset


def _buffer_names(file: SavedFile, part: ModulePart) -> frozenset[str]:
    saved = file.root.get("buffer_names")
    if not isinstance(saved, list):
        part.notes.append("the checkpoint does not say which tensors are buffers: those count as frozen parameters")
        return frozenset()
    return frozenset(str(name) for name in saved)


def _apart(ref: TensorRef, copy: object) -> list[TensorRef]:
    """The copy among the frozen fragments, where it is not the same place in the file."""
    if not isinstance(copy, TensorRef) or copy.shape != ref.shape or _place(copy) == _place(ref) or not copy.numel:
        return []
    return [copy]


def _frozen_entry(name: str, shape: Shape, files: Mapping[int, SavedFile], dtype: DType) -> ModuleEntry:
    """A frozen parameter of ZeRO-3 from its chunk on every rank."""
    ranks = _rank_count(files)
    numel = prod(shape)
    length = chunk(numel, ranks=ranks)
    axis = chunk_axis(ranks)
    stored: list[Stored] = []
    missing: list[str] = []
    for rank in range(-(-numel // length) if length else 1):
        if rank not in files:
            file = f"zero_pp_rank_{rank}_mp_rank_{files[0].name.mp:02d}_model_states.pt"
            (pair,) = axis.pattern.regions((numel,), ranks, rank)
            missing.append(f"{file}: elements {str(pair.whole).strip('[]')} of {name}")
            continue
        stored.append(Stored({"dp": rank}, _frozen_chunk(name, files[rank], dtype, length)))
    if missing:
        raise MissingFileError(
            f"a frozen parameter lies in pieces on all ranks, and {len(missing)} model-states files are missing:\n"
            f"{listed(missing)}\nCopy them from where they were saved"
        )
    tensor = StoredTensor(dtype=stored[0].ref.dtype, shape=shape, parts=(LaidOut(Layout(flat=(axis,)), tuple(stored)),))
    return ModuleEntry(kind=Kind.FROZEN, shape=shape, dtype=dtype, tensor=tensor)


def _rank_count(files: Mapping[int, SavedFile]) -> int:
    count = files[0].root.get("dp_world_size")
    return count if isinstance(count, int) and count > 0 else max(files) + 1


def _frozen_chunk(name: str, file: SavedFile, dtype: DType, length: int) -> TensorRef:
    where = f"frozen_param_fragments of {file.path}"
    flat = tensor(mapping(file.root.get("frozen_param_fragments"), where).get(name), f"{name} in {where}")
    if flat.dtype is not dtype and not flat.dtype.is_floating and dtype.is_floating:
        raise UnsupportedError(
            f"{name} is quantised to {flat.dtype} in {where} (zero_quantized_nontrainable_weights), and its scale is "
            "not saved: its values are lost. Save again without that option"
        )
    if flat.shape != (length,) or not flat.is_contiguous:
        raise MalformedError(f"expected {length} elements of {name} in {where}; got {described(flat)}")
    return flat


def _empty(shape: Shape, flat: TensorRef) -> StoredTensor:
    return StoredTensor.whole(flat.strided(0, shape, contiguous_strides(shape)))


def _keep_differing(name: str, files: Mapping[int, SavedFile], checksums: Checksums, part: ModulePart) -> None:
    """Keep the buffers of other ranks that are not known to equal rank 0's; they may, such as running statistics."""
    (_, first), *others = ((rank, mapping(file.root.get("module"), "module").get(name)) for rank, file in files.items())
    differing = {rank: value for rank, value in others if not checksums.same(first, value)}
    part.extras += [Extra(name=f"buffer/{name}", value=value, rank=rank) for rank, value in differing.items()]
    if differing:
        named = _ranks_named(list(differing))
        part.notes.append(f"buffer {name} of rank {named} differs from rank 0's, which is taken; theirs are extras")


def _ranks_named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _note_excluded(file: SavedFile, part: ModulePart) -> None:
    """Note it when frozen parameters may have been left out; stages 2 and 3 record them unless they are."""
    config = file.root.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage in (2, 3) and "frozen_param_shapes" in file.root and file.root["frozen_param_shapes"] is None:
        part.notes.append(
            "no frozen parameters are in this checkpoint: the model had none, or they were left out "
            "(exclude_frozen_parameters)"
        )
