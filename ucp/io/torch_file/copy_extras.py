"""A `torch.save` file that holds a value of a source: tensors of the source become tensors of the new file.

Tensors that shared a place in the source (views of one buffer, tied weights) are each stored whole.
"""

from __future__ import annotations

from pathlib import PurePath

from ucp.core.pickle_values import Stub
from ucp.core.target import OutputFile, RawCopy
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.io.torch_file.layout import NewStorage, NewTensor, layout_torch_zip

__all__ = ["grafted", "torch_file"]

_CONTAINERS = (list, tuple, dict, set, frozenset, Stub)


def torch_file(path: str, value: object) -> tuple[OutputFile, tuple[RawCopy, ...]]:
    """The file, and the copies that bring its tensors over."""
    moved: dict[NewStorage, TensorRef] = {}
    layout = layout_torch_zip(grafted(value, moved), folder=PurePath(path).stem)
    raw = tuple(RawCopy(src=ref, path=path, offset=layout.storages[storage]) for storage, ref in moved.items())
    return OutputFile(path=path, nbytes=layout.nbytes, literals=layout.literals, crcs=layout.crcs), raw


def grafted(value: object, moved: dict[NewStorage, TensorRef]) -> object:
    """`value` with every tensor of the source replaced by a new one, noted in `moved` with where it came from.

    Lists, dicts and objects are copied; what was shared stays shared, cycles stay cycles.
    """
    return _Graft(moved).value(value)


class _Graft:
    """Copies made so far. What can change is copied empty, and filled when nothing is in the making around it."""

    def __init__(self, moved: dict[NewStorage, TensorRef]) -> None:
        self._moved = moved
        self._done: dict[int, object] = {}
        self._empty: list[tuple[object, object]] = []
        self._tensors: dict[TensorRef, NewTensor] = {}

    def value(self, value: object) -> object:
        """The copy of a value with all that lies in it."""
        copy = self._copied(value)
        while self._empty:
            self._fill(*self._empty.pop())
        return copy

    def _copied(self, value: object) -> object:
        """The copy of a value; lists, dicts and objects in it are empty as yet (only through them there are cycles)."""
        rest = [value] if isinstance(value, _CONTAINERS) else []
        while rest:
            own = rest[-1]
            if id(own) in self._done:
                rest.pop()
            elif isinstance(own, tuple | set | frozenset):
                rest += [item for item in own if isinstance(item, _CONTAINERS) and id(item) not in self._done]
                if rest[-1] is own:
                    self._done[id(own)] = type(own)(map(self._made, own))
            else:
                copy = Stub(own.made_by) if isinstance(own, Stub) else type(own)()
                self._done[id(own)] = copy
                self._empty.append((own, copy))
        return self._made(value)

    def _made(self, value: object) -> object:
        if isinstance(value, TensorRef):
            return self._tensor(value)
        return self._done[id(value)] if isinstance(value, _CONTAINERS) else value

    def _tensor(self, ref: TensorRef) -> NewTensor:
        if ref not in self._tensors:
            storage = NewStorage(ref.dtype, ref.numel)
            self._tensors[ref] = NewTensor(storage=storage, shape=ref.shape, strides=contiguous_strides(ref.shape))
            if ref.numel:
                self._moved[storage] = ref
        return self._tensors[ref]

    def _fill(self, value: object, copy: object) -> None:
        match value, copy:
            case list(), list():
                copy += map(self._copied, value)
            case dict(), dict():
                copy.update((self._copied(key), self._copied(item)) for key, item in value.items())
                for name, attribute in getattr(value, "__dict__", {}).items():  # an OrderedDict may carry attributes
                    setattr(copy, name, self._copied(attribute))
            case Stub(), Stub():
                copy.new, copy.has_state = value.new, value.has_state
                copy.args = tuple(map(self._copied, value.args))
                copy.kwargs = value.kwargs and {name: self._copied(item) for name, item in value.kwargs.items()}
                copy.state = self._copied(value.state)
                copy.items = [*map(self._copied, value.items)]
                copy.entries = [(self._copied(key), self._copied(item)) for key, item in value.entries]
