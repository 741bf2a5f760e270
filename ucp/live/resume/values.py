"""Values of a checkpoint as a run takes them: tensors read, arrays and counters made of the recipes of their pickles.

Nothing is unpickled: an object of another class stays the inert recipe that it is.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from math import prod
from pathlib import PurePath
from typing import TYPE_CHECKING

from ucp.contract.companions import is_companion
from ucp.core.index import Extra
from ucp.core.pickle_values import Stub
from ucp.core.tensor import InlineTensor, TensorRef
from ucp.errors import MalformedError
from ucp.io.files import open_source
from ucp.io.torch_file.archive import read_archive

if TYPE_CHECKING:
    import torch

    ReadTensor = Callable[[TensorRef | InlineTensor], torch.Tensor]

__all__ = ["inert_classes", "live_value"]

_SAVED_BY_TORCH = frozenset({".pt", ".pth", ".bin", ".pkl"})
"""Suffixes of companion files that torch.save wrote (scheduler.pt, rng_state_3.pth, random_states_3.pkl)."""
_NUMBERS = re.compile(r"[iuf][1248]|b1")
"""Types of numpy's arrays. Examples: u4, f8, b1."""


def live_value(extra: Extra, read: ReadTensor) -> object:
    """The value of an extra; of a companion file what it says, where torch or JSON wrote it, else its bytes."""
    return _Live(read).of(_saved_in(extra))


def inert_classes(value: object) -> list[str]:
    """Classes of the objects in a value that nobody has made."""
    return sorted({str(own.made_by) for own in _leaves(value) if isinstance(own, Stub)})


def _saved_in(extra: Extra) -> object:
    ref = extra.value
    if not is_companion(extra) or not isinstance(ref, TensorRef) or ref.codec:
        return ref
    suffix = PurePath(extra.name).suffix
    if suffix in _SAVED_BY_TORCH:
        return read_archive(ref.path, start=ref.offset, nbytes=ref.nbytes).root
    if suffix != ".json":
        return ref
    with open_source(ref.path) as file:
        text = file.read(ref.offset, ref.nbytes)
    try:
        return json.loads(bytes(text))
    except ValueError as error:
        raise MalformedError(f"expected JSON in {ref.path}; {error}. The file is damaged: copy it again") from error


class _Live:
    """Makes values, each object once: what shares it, or is in itself, stays so."""

    def __init__(self, read: ReadTensor) -> None:
        self._read = read
        self._made: dict[int, object] = {}

    def of(self, value: object) -> object:
        if isinstance(value, dict | list | tuple | Stub | TensorRef) and id(value) in self._made:
            return self._made[id(value)]
        match value:
            case dict() if type(value) in (dict, OrderedDict):
                made: dict[object, object] = type(value)()
                self._made[id(value)] = made
                made.update((key, self.of(own)) for key, own in value.items())
                return made
            case list():
                items: list[object] = []
                self._made[id(value)] = items
                items.extend(map(self.of, value))
                return items
            case tuple() if type(value) is tuple:
                return tuple(map(self.of, value))
            case TensorRef() | InlineTensor():
                self._made[id(value)] = self._read(value)
                return self._made[id(value)]
            case Stub():
                self._made[id(value)] = value  # one that is in itself
                self._made[id(value)] = self._built(value)
                return self._made[id(value)]
        return value

    def _built(self, stub: Stub) -> object:
        match (str(stub.made_by), stub.args, stub.state):
            case ("collections.Counter", (dict() as counts,), None):
                return Counter(counts)
            case ("collections.OrderedDict", (), None):
                return OrderedDict((key, self.of(own)) for key, own in stub.entries)
            case ("numpy.core.multiarray._reconstruct" | "numpy._core.multiarray._reconstruct", _, tuple()):
                return _array(stub)
        return stub


def _array(stub: Stub) -> object:
    """An array of numpy; the recipe where it is none of plain numbers."""
    import numpy as np

    match stub.state:
        case (_, tuple() as shape, Stub(args=(str() as kind, *_), state=(_, "<" | "|", *_)), bool() as f, bytes() as b):
            if _NUMBERS.fullmatch(kind) and all(isinstance(own, int) for own in shape):
                flat = np.frombuffer(b, dtype=np.dtype(f"<{kind}")).copy()
                return flat.reshape(shape, order="F" if f else "C") if flat.size == prod(shape) else stub
    return stub


def _leaves(value: object) -> Iterator[object]:
    rest, met = [value], set()
    while rest:
        own = rest.pop()
        if id(own) in met:
            continue
        met.add(id(own))
        if isinstance(own, dict):
            rest.extend(own.values())
        elif isinstance(own, list | tuple):
            rest.extend(own)
        else:
            yield own
