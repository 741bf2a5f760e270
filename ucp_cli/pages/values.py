"""Values in a checkpoint, of any kind, as JSON or as one line of text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ucp.core.index import Extra
from ucp.core.tensor import InlineTensor, TensorRef
from ucp.core.text.units import count_text, nbytes_text, shape_text
from ucp.errors import format_count
from ucp.io.pickle.fields import format_short, format_short_members
from ucp.io.pickle.values import GlobalName, Stub
from ucp.store.values import PlainJson

_LONGEST = 60
"""Characters of a value that is shown whole."""

_SHORT = 24
"""The same for a value of a dict."""

_PAGE = 4096
"""The same for a value on a line of its own."""

_DEEPEST = 16
"""Dicts in dicts that are followed."""

_MOST = 6
"""Entries of a dict that are shown."""


def json_value(value: object) -> object:
    """`value` as JSON. Plain types that JSON lacks are marked as in an atom store, e.g. "!tuple".

    An object becomes its class and its state. Tensors, and values that are nested too deeply or too long, become a text
    in angle brackets.

    >>> from ucp.core.tensor import DType
    >>> json_value({"best": (1, 2), "ema": TensorRef(path="", offset=0, dtype=DType.INT8, shape=(3,), strides=(1,))})
    {'best': {'!tuple': [1, 2]}, 'ema': '<tensor 3 int8>'}
    """

    def other(value: object) -> object:
        if isinstance(value, Stub):
            return {"!object": str(value.made_by), "state": shown.of(value.state)}
        return f"<{describe_value(value)}>"

    shown = PlainJson(other, lambda _: "<...>")
    return shown.of(value)


def describe_extra(extra: Extra) -> str:
    """What an extra holds, in a few words; for a companion file its size.

    >>> from ucp.contract.sidecars import sidecar_extra
    >>> describe_extra(Extra(name="tag", value="best")), describe_extra(sidecar_extra("config.json", "", 714))
    ("'best'", 'file of 714 B')
    """
    if extra.is_sidecar and isinstance(extra.value, TensorRef):
        return f"file of {nbytes_text(extra.value.nbytes)}"
    return describe_value(extra.value)


def describe_value(value: object) -> str:
    """What `value` is, in a few words.

    >>> [describe_value(value) for value in ({"last_epoch": 3, "base_lrs": [0.1]}, (0.9, 0.95), b"abcd", [[]] * 9)]
    ['last_epoch=3, base_lrs=...', '(0.9, 0.95)', '4 bytes', 'list of 9']
    """
    match value:
        case TensorRef() | InlineTensor():
            return f"tensor {shape_text(value.shape)} {value.dtype}"
        case Stub():
            return f"object of {value.made_by}"
        case GlobalName():
            return str(value)
        case bytes() | bytearray():
            return format_count(len(value), "byte")
        case dict():
            shown = [f"{_key(key)}={format_short(item, _SHORT) or '...'}" for key, item in islice(value.items(), _MOST)]
            more = [f"and {len(value) - _MOST} more"] if len(value) > _MOST else []
            return ", ".join((*shown, *more)) or "nothing"
        case list() | tuple() | set() | frozenset():
            return format_short_members(value, _LONGEST) or f"{type(value).__name__} of {count_text(len(value))}"
        case str():
            return format_short(value, _LONGEST) or f"text of {format_count(len(value), 'character')}"
        case int():
            return format_short(value, _LONGEST) or f"a number of {format_count(value.bit_length(), 'bit')}"
    return repr(value)


def list_members(value: object, name: str = "", *, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Names and texts of all values in a dict, or of the attributes of an object; of those in it, too.

    >>> list(list_members({"lr": 0.1, "optimizer": {"betas": (0.9, 0.95)}}))
    [('lr', '0.1'), ('optimizer/betas', '(0.9, 0.95)')]
    """
    members = value.state if isinstance(value, Stub) else value
    if not isinstance(members, dict) or not members or depth > _DEEPEST:
        if name:
            yield name, _show(value)
        return
    for key, member in members.items():
        yield from list_members(member, f"{name}/{_key(key)}" if name else _key(key), depth=depth + 1)


def _show(value: object) -> str:
    """A value as Python prints it, if it takes less than a page; else what it is."""
    if isinstance(value, list | tuple | set | frozenset):
        return format_short_members(value, _PAGE) or describe_value(value)
    return format_short(value, _PAGE) or describe_value(value)


def _key(key: object) -> str:
    return key if isinstance(key, str) and 0 < len(key) <= _LONGEST else describe_value(key)
