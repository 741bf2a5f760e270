"""Extras out of a torch_dist checkpoint, as `ucp_formats.megatron.extras` names them.

`rerun_state_machine_state/3` is of one rank of a grid, by its place; `optimizer/[N/]WHAT` what else optimizers say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ucp.contract.rank_extras import Checksums
from ucp.core.index import Extra
from ucp.core.pickle_values import GlobalName, Stub
from ucp.core.tensor import InlineTensor, TensorRef
from ucp_formats.megatron.torch_dist.common import CommonState, SavedObjects, optimizer_dicts
from ucp_formats.megatron.torch_dist.keys import ObjectKey

__all__ = ["dist_extras", "is_empty"]

_EXTRA_STATE = "_extra_state"
_IN_INDEX = ("optimizer", "param_state")
_DERIVED = ("per_bucket_numel", "per_bucket_numel_unpadded")


def dist_extras(common: CommonState, objects: SavedObjects) -> list[Extra]:
    """Extras out of the common state and the objects."""
    extras = [Extra(name=str(key), value=value) for key, value in common.values.items() if key != "optimizer"]
    rest = {"" if chain is None else str(chain): _left(own) for chain, own in optimizer_dicts(common.values).items()}
    rest = {name: value for name, value in rest.items() if value}
    if rest:
        extras.append(Extra(name="optimizer", value=rest[""] if list(rest) == [""] else rest))
    for key, value in objects.others.items():
        if not is_empty(value):
            extras.append(Extra(name=_object_name(key), value=value))
    extras += _group_extras(objects)
    extras += [Extra(name=f"object/{key}", value=value) for key, value in objects.plain.items()]
    return extras


def _left(optimizer: Mapping[object, object]) -> dict[str, object]:
    """What the optimizer says beside groups and states."""
    left = {str(key): value for key, value in optimizer.items() if key not in _IN_INDEX and value is not None}
    inner = optimizer.get("optimizer")
    if isinstance(inner, dict):
        left |= {str(key): value for key, value in inner.items() if key not in ("param_groups", "state")}
    return left


def _object_name(key: ObjectKey) -> str:
    place = ".".join(map(str, key.offsets))
    if key.name.endswith(_EXTRA_STATE):
        return f"extra_state/{key.name}/{place}"
    if key.name == "rng_state" and len(key.offsets) == 2:
        place = f"pp{key.offsets[0]}.tp{key.offsets[1]}"
    return f"{key.name}/{place}"


def _group_extras(objects: SavedObjects) -> list[Extra]:
    """What data-parallel groups saved beside states: once where all have the same, else for each that differs."""
    checksums = Checksums(objects.records)
    usual: dict[str, object] = {}
    extras = []
    for key, value in sorted(objects.groups.items(), key=lambda item: (item[0].chain or 0, item[0].group)):
        if key.what in (*_IN_INDEX, *_DERIVED):
            continue
        name = f"optimizer/{key.what}" if key.chain is None else f"optimizer/{key.chain}/{key.what}"
        if name not in usual:
            usual[name] = value
            extras.append(Extra(name=name, value=value))
        elif not checksums.same(value, usual[name]):
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
