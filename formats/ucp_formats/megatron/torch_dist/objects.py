"""What a torch_dist checkpoint says beside tensors: its common state, the objects that ranks saved, and its extras.

Up to megatron-core 0.18 the common state is a file of its own, `common.pt`; since 0.19 it is the object
`common_state/shard_0_1` among the others. Lists in it may have become dicts with numbers as keys.

Extras are named as `ucp_formats.megatron.extras` says: `rerun_state_machine_state/3` is of one rank of a grid, by its
place; `optimizer/[N/]WHAT` what else optimizers say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os.path import join

from ucp.contract.ranks import Checksums
from ucp.core.index import Extra
from ucp.core.tensor import InlineTensor, Record, TensorRef
from ucp.errors import MalformedError, MissingFileError
from ucp.io.dcp.checkpoint import Dcp, read_dcp
from ucp.io.dcp.metadata import METADATA, read_metadata
from ucp.io.files import split_parts
from ucp.io.folder import is_there
from ucp.io.pickle.fields import described, mapping
from ucp.io.pickle.values import GlobalName, Stub
from ucp.io.torch_file.archive import read_archive
from ucp_formats.megatron.arguments import Arguments, read_arguments
from ucp_formats.megatron.names import COMMON
from ucp_formats.megatron.torch_dist.keys import GroupObjectKey, ObjectKey, parse_group_object, parse_object_key

_COMMON_STATE = "common_state"


@dataclass(slots=True, kw_only=True)
class SavedObjects:
    """Objects that ranks saved, unwrapped."""

    common: object = None
    """The common state, where it is an object."""
    groups: dict[GroupObjectKey, object] = field(default_factory=dict)
    """What data-parallel groups saved of the optimizer."""
    others: dict[ObjectKey, object] = field(default_factory=dict)
    """All others."""
    plain: dict[str, object] = field(default_factory=dict)
    """Objects whose key is not of megatron-core."""
    records: list[Record] = field(default_factory=list)
    """Checksums of tensors in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonState:
    """What all ranks have in common."""

    where: str
    """File and member, for messages."""
    values: Mapping[object, object]
    """All of it."""
    arguments: Arguments
    """Arguments of the run."""
    content: Mapping[object, object]
    """`content_metadata`: how the writer laid things out; empty before 0.13."""
    records: tuple[Record, ...]
    """Checksums of tensors in a file of its own."""
    file: str
    """That file, or empty."""

    @property
    def sharding(self) -> str | None:
        """Layout of the optimizer that the writer names; None where it names none."""
        for optimizer in optimizer_dicts(self.values).values():
            named = optimizer.get("param_state_sharding_type")
            if isinstance(named, str):
                return named
        return None

    @property
    def iteration(self) -> int | None:
        """Training steps, where recorded."""
        found = self.values.get("iteration", self.values.get("total_iters"))
        return found if type(found) is int else self.arguments.iteration


def read_folder(folder: str) -> Dcp:
    """The checkpoint in `folder`. Raises what `read_dcp` raises; of missing files, a common state is told too."""
    try:
        return read_dcp(folder)
    except MissingFileError as error:
        objects = read_metadata(join(folder, METADATA)).objects
        if _has_file(folder) or any(key.partition("/")[0] == _COMMON_STATE for key in objects):
            raise
        raise MissingFileError(f"{error}\n{_without_common(folder)}") from error


def read_objects(dcp: Dcp) -> SavedObjects:
    """All objects of the checkpoint."""
    found = SavedObjects()
    for key, stored in dcp.objects(dcp.metadata.objects).items():
        found.records += stored.records
        parsed = parse_object_key(key)
        if parsed is None:
            found.plain[key] = stored.value
            continue
        value = stored.value
        if type(value) is list and len(value) == 1:  # megatron-core saves a list of the one object of a rank
            value = value[0]
        group = parse_group_object(parsed.name)
        if parsed.name == _COMMON_STATE:
            found.common = value
        elif group is not None:
            found.groups[group] = value
        else:
            found.others[parsed] = value
    return found


def read_common(dcp: Dcp, objects: SavedObjects) -> CommonState:
    """The common state, from its own file or from the objects.

    A file comes first, as in Megatron (core_v0.19 dist_checkpointing/serialization.py: load_common_state_dict). Raises
    MissingFileError when there is neither, MalformedError when it is no dict.
    """
    path = join(dcp.folder, COMMON)
    records: tuple[Record, ...] = ()
    root, where = objects.common, f"{_COMMON_STATE} of {dcp.folder}"
    own = _has_file(dcp.folder)
    if own:
        archive = read_archive(path)
        root, where, records = archive.root, path, archive.records
    elif root is None:
        raise MissingFileError(_without_common(dcp.folder))
    values = mapping(root, f"the common state ({where})")
    content = values.get("content_metadata")
    return CommonState(
        where=where,
        values=values,
        arguments=read_arguments(values.get("args"), where),
        content=content if isinstance(content, dict) else {},
        records=records,
        file=path if own else "",
    )


def _has_file(folder: str) -> bool:
    """Whether the common state has a file of its own, whatever is there under its name."""
    path = join(folder, COMMON)
    return is_there(path) or bool(split_parts(path))


def _without_common(folder: str) -> str:
    return (
        f"expected {COMMON} in {folder}, or the object {_COMMON_STATE} that megatron-core writes instead since 0.19: "
        "arguments, parameter groups, steps and the scheduler of the run; neither is there. Megatron does not load the "
        f"checkpoint without. Copy {COMMON} from where it was saved"
    )


def optimizer_dicts(values: Mapping[object, object]) -> dict[int | None, Mapping[object, object]]:
    """`optimizer` of the common state, by number where there are several; None is the number of a single one."""
    found = values.get("optimizer")
    if not isinstance(found, dict | list):
        return {}
    listed = dict(enumerate(found)) if isinstance(found, list) else found
    numbered = {
        int(key): own for key, own in listed.items() if type(key) is int or (type(key) is str and key.isdigit())
    }
    if numbered and len(numbered) == len(listed):
        return {key: own for key, own in sorted(numbered.items()) if isinstance(own, dict)}
    return {None: found} if isinstance(found, dict) else {}


def to_list(value: object, where: str) -> list[object]:
    """A list, or a dict that was one: its keys are 0, 1, 2, ... Raises MalformedError."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, dict):
        numbers = {int(key): own for key, own in value.items() if type(key) is int or str(key).isdigit()}
        if sorted(numbers) == list(range(len(value))):
            return [numbers[number] for number in sorted(numbers)]
    raise MalformedError(f"expected a list for {where}; got {described(value)}")


_EXTRA_STATE = "_extra_state"
_IN_INDEX = ("optimizer", "param_state")
_DERIVED = ("per_bucket_numel", "per_bucket_numel_unpadded")


def collect_extras(common: CommonState, objects: SavedObjects) -> list[Extra]:
    """Extras out of the common state and the objects."""
    extras = [Extra(name=str(key), value=value) for key, value in common.values.items() if key != "optimizer"]
    rest: dict[str, dict[str, object]] = {}
    for chain, own in optimizer_dicts(common.values).items():
        inner = own.get("optimizer")
        others = inner.items() if isinstance(inner, dict) else ()
        left = {str(key): value for key, value in own.items() if key not in _IN_INDEX and value is not None}
        left |= {str(key): value for key, value in others if key not in ("param_groups", "state")}
        if left:
            rest["" if chain is None else str(chain)] = left
    if rest:
        extras.append(Extra(name="optimizer", value=rest[""] if list(rest) == [""] else rest))
    for key, value in objects.others.items():
        place = ".".join(map(str, key.offsets))
        if key.name == "rng_state" and len(key.offsets) == 2:
            place = f"pp{key.offsets[0]}.tp{key.offsets[1]}"
        kind = "extra_state/" if key.name.endswith(_EXTRA_STATE) else ""
        if not is_empty(value):
            extras.append(Extra(name=f"{kind}{key.name}/{place}", value=value))
    extras += _group_extras(objects)
    extras += [Extra(name=f"object/{key}", value=value) for key, value in objects.plain.items()]
    return extras


def _group_extras(objects: SavedObjects) -> list[Extra]:
    """What data-parallel groups saved beside states: once where all have the same, else for each that differs."""
    checksums = Checksums(objects.records)
    usual: dict[str, object] = {}
    extras = []
    for key, value in sorted(objects.groups.items(), key=lambda item: (item[0].chain or 0, item[0].group)):
        if key.kind in (*_IN_INDEX, *_DERIVED):
            continue
        name = f"optimizer/{key.kind}" if key.chain is None else f"optimizer/{key.chain}/{key.kind}"
        if name not in usual:
            usual[name] = value
            extras.append(Extra(name=name, value=value))
        elif not checksums.is_same(value, usual[name]):
            extras.append(Extra(name=f"{name}/dp_group_{key.group}", value=value))
    return extras


def is_empty(value: object) -> bool:
    """Whether an object says nothing: None, nothing in it, or a tensor or stream without elements.

    >>> is_empty([None]), is_empty([b"x"])
    (True, False)
    """
    rest, met = [value], set()
    while rest:
        own = rest.pop()
        match own:
            case None | b"" | "":
                continue
            case TensorRef() | InlineTensor() if own.numel == 0:
                continue
            case list() | tuple():
                inner: Iterable[object] = own
            case Stub(made_by=GlobalName("_io" | "io", "BytesIO"), state=None | (_, *_)):
                inner = (*own.args, own.state[0] if isinstance(own.state, tuple) else None)
            case _:
                return False
        if id(own) not in met:
            met.add(id(own))
            rest.extend(inner)
    return True
