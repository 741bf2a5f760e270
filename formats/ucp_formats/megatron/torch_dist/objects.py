"""What a torch_dist checkpoint holds besides tensors: the common state and objects that ranks saved; most are extras.

Up to megatron-core 0.18 the common state is a separate file, `common.pt`; since 0.19 it is the object
`common_state/shard_0_1` among the others. Its lists may have become dicts with numbers as keys.

Names of extras: `rng_state/pp1.tp0` and `rerun_state_machine_state/3` belong to one rank of a grid,
`optimizer/[N/]KIND` is what an optimizer saved besides states, `object/KEY` an object whose key is not one of
megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os.path import join

from ucp.contract.ranks import Checksums
from ucp.core.index import Extra
from ucp.core.tensor import InlineTensor, Record, TensorRef
from ucp.errors import MalformedError, MissingFileError
from ucp.io.dcp.checkpoint import Dcp, read_dcp
from ucp.io.dcp.metadata import METADATA, read_metadata
from ucp.io.files import split_parts
from ucp.io.folder import exists
from ucp.io.pickle.fields import describe_value, require_mapping
from ucp.io.pickle.values import GlobalName, Stub
from ucp.io.torch_file.archive import read_archive
from ucp_formats.megatron.arguments import Arguments, read_arguments
from ucp_formats.megatron.names import COMMON
from ucp_formats.megatron.torch_dist.keys import GroupObjectKey, ObjectKey, parse_group_object, parse_object_key

_COMMON_STATE = "common_state"


@dataclass(slots=True, kw_only=True)
class SavedObjects:
    """Objects that ranks saved, without the lists in which megatron-core wraps them."""

    common: object = None
    """The common state, if it is an object."""
    groups: dict[GroupObjectKey, object] = field(default_factory=dict)
    """What data-parallel groups saved of the optimizer."""
    others: dict[ObjectKey, object] = field(default_factory=dict)
    """All others."""
    plain: dict[str, object] = field(default_factory=dict)
    """Objects whose keys are not megatron-core's."""
    records: list[Record] = field(default_factory=list)
    """Checksums of tensors in them."""

    def distinct_groups(self, is_wanted: Callable[[str], bool]) -> Iterator[tuple[GroupObjectKey, object, bool]]:
        """The first object of every kind and optimizer, and objects that differ from it: (key, value, is first).

        `is_wanted`: whether a kind is wanted.
        """
        checksums = Checksums(self.records)
        usual: dict[tuple[int | None, str], object] = {}
        for key, value in sorted(self.groups.items(), key=lambda item: (item[0].chain or 0, item[0].group)):
            if is_wanted(key.kind):
                is_first = (key.chain, key.kind) not in usual
                if is_first or not checksums.is_same(value, usual[key.chain, key.kind]):
                    yield key, value, is_first
                usual.setdefault((key.chain, key.kind), value)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonState:
    """What all ranks have in common."""

    where: str
    """Where it is stored, for messages."""
    values: Mapping[object, object]
    """All of it."""
    arguments: Arguments
    """Arguments of the run."""
    records: tuple[Record, ...]
    """Checksums of tensors in `file`."""
    file: str
    """Path of `common.pt`; empty if the common state is an object."""

    @property
    def sharding(self) -> str | None:
        """Layout of the optimizer that the writer recorded; None if it recorded none."""
        types = (optimizer.get("param_state_sharding_type") for optimizer in list_optimizers(self.values).values())
        return next((name for name in types if isinstance(name, str)), None)

    @property
    def iteration(self) -> int | None:
        """Training steps, if recorded."""
        iteration = self.values.get("iteration", self.values.get("total_iters"))
        return iteration if type(iteration) is int else self.arguments.iteration


def read_folder(folder: str) -> Dcp:
    """The checkpoint in `folder`. Raises what `read_dcp` raises; MissingFileError also names a missing `common.pt`."""
    try:
        return read_dcp(folder)
    except MissingFileError as error:
        objects = read_metadata(join(folder, METADATA)).objects
        if _has_file(folder) or any(key.partition("/")[0] == _COMMON_STATE for key in objects):
            raise
        raise MissingFileError(f"{error}\n{_describe_missing_common(folder)}") from error


def read_objects(dcp: Dcp) -> SavedObjects:
    """All objects of the checkpoint."""
    objects = SavedObjects()
    for key, stored in dcp.objects(dcp.metadata.objects).items():
        objects.records += stored.records
        parsed = parse_object_key(key)
        if parsed is None:
            objects.plain[key] = stored.value
            continue
        value = stored.value
        if type(value) is list and len(value) == 1:  # megatron-core wraps the object of a rank in a list
            value = value[0]
        group = parse_group_object(parsed.name)
        if parsed.name == _COMMON_STATE:
            objects.common = value
        elif group is not None:
            objects.groups[group] = value
        else:
            objects.others[parsed] = value
    return objects


def read_common(dcp: Dcp, objects: SavedObjects) -> CommonState:
    """The common state, from its own file or from the objects.

    A file comes first, as in Megatron (core_v0.19 dist_checkpointing/serialization.py: load_common_state_dict). Raises
    MissingFileError when there is neither, MalformedError when it is not a dict.
    """
    path = join(dcp.folder, COMMON)
    records: tuple[Record, ...] = ()
    root, where, file = objects.common, f"{_COMMON_STATE} of {dcp.folder}", ""
    if _has_file(dcp.folder):
        archive = read_archive(path)
        root, where, file, records = archive.root, path, path, archive.records
    elif root is None:
        raise MissingFileError(_describe_missing_common(dcp.folder))
    values = require_mapping(root, f"the common state ({where})")
    arguments = read_arguments(values.get("args"), where)
    return CommonState(where=where, values=values, arguments=arguments, records=records, file=file)


def _has_file(folder: str) -> bool:
    """Whether there is a `common.pt`: a file, a split file, or anything else of that name."""
    path = join(folder, COMMON)
    return exists(path) or bool(split_parts(path))


def _describe_missing_common(folder: str) -> str:
    return (
        f"expected {COMMON} in {folder}, or the object {_COMMON_STATE} that megatron-core writes instead since 0.19; "
        "neither is there. It holds arguments, parameter groups, steps and the scheduler of the run, and Megatron does "
        f"not load a checkpoint without it. Copy {COMMON} from where it was saved"
    )


def list_optimizers(values: Mapping[object, object]) -> dict[int | None, Mapping[object, object]]:
    """`optimizer` of the common state, by number in a chain; None is the number of a single optimizer."""
    optimizer = values.get("optimizer")
    if not isinstance(optimizer, dict | list):
        return {}
    members = dict(enumerate(optimizer)) if isinstance(optimizer, list) else optimizer
    chain = {
        int(key): member for key, member in members.items() if type(key) is int or (type(key) is str and key.isdigit())
    }
    if chain and len(chain) == len(members):
        return {number: member for number, member in sorted(chain.items()) if isinstance(member, dict)}
    return {None: optimizer} if isinstance(optimizer, dict) else {}


def to_list(value: object, where: str) -> list[object]:
    """A list, or a dict that was one: its keys are 0, 1, 2, ... Raises MalformedError."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, dict):
        entries = {int(key): entry for key, entry in value.items() if type(key) is int or str(key).isdigit()}
        if sorted(entries) == list(range(len(value))):
            return [entries[number] for number in sorted(entries)]
    raise MalformedError(f"expected a list for {where}; got {describe_value(value)}")


_IN_INDEX = ("optimizer", "param_state")
_DERIVED = ("per_bucket_numel", "per_bucket_numel_unpadded")


def collect_extras(common: CommonState, objects: SavedObjects) -> list[Extra]:
    """Extras from the common state and the objects."""
    extras = [Extra(name=str(key), value=value) for key, value in common.values.items() if key != "optimizer"]
    optimizers: dict[str, dict[str, object]] = {}
    for chain, optimizer in list_optimizers(common.values).items():
        inner = optimizer.get("optimizer")
        entries = {str(key): value for key, value in optimizer.items() if key not in _IN_INDEX and value is not None}
        if isinstance(inner, dict):
            entries |= {str(key): value for key, value in inner.items() if key not in ("param_groups", "state")}
        if entries:
            optimizers["" if chain is None else str(chain)] = entries
    if optimizers:
        extras.append(Extra(name="optimizer", value=optimizers[""] if list(optimizers) == [""] else optimizers))
    for key, value in objects.others.items():
        place = ".".join(map(str, key.offsets))
        if key.name == "rng_state" and len(key.offsets) == 2:
            place = f"pp{key.offsets[0]}.tp{key.offsets[1]}"
        kind = "extra_state/" if key.name.endswith("_extra_state") else ""
        if not is_empty(value):
            extras.append(Extra(name=f"{kind}{key.name}/{place}", value=value))
    # what data-parallel groups saved besides states: the first group's, and that of every group that differs
    for group, value, is_first in objects.distinct_groups(lambda kind: kind not in (*_IN_INDEX, *_DERIVED)):
        name = f"optimizer/{group.kind}" if group.chain is None else f"optimizer/{group.chain}/{group.kind}"
        extras.append(Extra(name=name if is_first else f"{name}/dp_group_{group.group}", value=value))
    extras += [Extra(name=f"object/{plain}", value=value) for plain, value in objects.plain.items()]
    return extras


def is_empty(value: object) -> bool:
    """Whether an object holds nothing: None, nothing in it, or a tensor or stream without elements.

    >>> is_empty([None]), is_empty([b"x"])
    (True, False)
    """
    pending, seen = [value], set()
    while pending:
        entry = pending.pop()
        match entry:
            case None | b"" | "":
                continue
            case TensorRef() | InlineTensor() if entry.numel == 0:
                continue
            case list() | tuple():
                entries: Iterable[object] = entry
            case Stub(made_by=GlobalName("_io" | "io", "BytesIO"), state=None | (_, *_)):
                entries = (*entry.args, entry.state[0] if isinstance(entry.state, tuple) else None)
            case _:
                return False
        if id(entry) not in seen:
            seen.add(id(entry))
            pending.extend(entries)
    return True
