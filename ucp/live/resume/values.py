"""The values of extras as a run uses them: tensors are read, NumPy arrays and counters are created.

Nothing is unpickled: an object of any other class stays a `Stub`, which describes it and runs no code.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from math import prod
from pathlib import PurePath
from typing import TYPE_CHECKING

from ucp.core.index import Extra
from ucp.core.tensor import InlineTensor, TensorRef
from ucp.errors import MalformedError
from ucp.io.files import open_source
from ucp.io.pickle.values import Stub, rebuild, walk
from ucp.io.torch_file.archive import read_archive

if TYPE_CHECKING:
    import torch

    ReadTensor = Callable[[TensorRef | InlineTensor], torch.Tensor]

_TORCH_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".pkl"})
"""Suffixes of companion files that torch.save wrote (scheduler.pt, rng_state_3.pth, random_states_3.pkl)."""
_CONTAINERS = (dict, list, tuple)
"""Types whose items are built too; sets and objects stay as they are."""
_NUMBERS = re.compile(r"[iuf][1248]|b1")
"""Types of numpy's arrays. Examples: u4, f8, b1."""


def load_extra(extra: Extra, read: ReadTensor) -> object:
    """The value of an extra; for a companion file its content if it is JSON or of torch.save, else its bytes.

    An object that occurs several times, or inside of itself, is created once.
    """
    objects: dict[int, object] = {}

    def build(leaf: object) -> object:
        if not isinstance(leaf, TensorRef | InlineTensor | Stub) or id(leaf) in objects:
            return objects.get(id(leaf), leaf)
        if isinstance(leaf, Stub):
            objects[id(leaf)] = leaf  # if it contains itself
            objects[id(leaf)] = _build_object(leaf, lambda item: rebuild(item, build, _CONTAINERS, with_keys=False))
        else:
            objects[id(leaf)] = read(leaf)
        return objects[id(leaf)]

    return rebuild(_read_companion(extra), build, _CONTAINERS, with_keys=False)


def list_inert_classes(value: object) -> list[str]:
    """Classes of the objects in a value that were not created."""
    return sorted({str(item.made_by) for item in walk([value], _CONTAINERS) if isinstance(item, Stub)})


def _read_companion(extra: Extra) -> object:
    """The content of a companion file; for any other extra its value."""
    ref = extra.value
    if not extra.is_sidecar or not isinstance(ref, TensorRef) or ref.codec:
        return ref
    suffix = PurePath(extra.name).suffix
    if suffix in _TORCH_SUFFIXES:
        return read_archive(ref.path, start=ref.offset, nbytes=ref.nbytes).root
    if suffix != ".json":
        return ref
    with open_source(ref.path) as file:
        text = file.read(ref.offset, ref.nbytes)
    try:
        return json.loads(bytes(text))
    except ValueError as error:
        raise MalformedError(f"expected JSON in {ref.path}; {error}. The file is damaged: copy it again") from error


def _build_object(stub: Stub, build_item: Callable[[object], object]) -> object:
    """A counter, an ordered dict or an array of numbers; any other object unchanged."""
    match (str(stub.made_by), stub.args, stub.state):
        case ("collections.Counter", (dict() as counts,), None):
            return Counter(counts)
        case ("collections.OrderedDict", (), None):
            return OrderedDict((key, build_item(item)) for key, item in stub.entries)
        case ("numpy.core.multiarray._reconstruct" | "numpy._core.multiarray._reconstruct", _, tuple()):
            return _build_array(stub)
    return stub


def _build_array(stub: Stub) -> object:
    """A NumPy array; unchanged if its elements are not plain numbers."""
    import numpy as np

    match stub.state:
        case (_, tuple() as shape, Stub(args=(str() as kind, *_), state=(_, "<" | "|", *_)), bool() as f, bytes() as b):
            if _NUMBERS.fullmatch(kind) and all(isinstance(length, int) for length in shape):
                flat = np.frombuffer(b, dtype=np.dtype(f"<{kind}")).copy()
                return flat.reshape(shape, order="F" if f else "C") if flat.size == prod(shape) else stub
    return stub
