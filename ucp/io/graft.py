"""A `torch.save` file that holds a value of a source: tensors of the source become tensors of the new file.

Tensors that shared a place in the source (views of one buffer, tied weights) are each stored whole.
"""

from __future__ import annotations

from ucp.inert import Stub
from ucp.io.torchzip import NewStorage, NewTensor, layout_torch_zip
from ucp.target import OutputFile, RawCopy
from ucp.tensor import InlineTensor, TensorRef, contiguous_strides

__all__ = ["grafted", "torch_file"]


def torch_file(path: str, value: object) -> tuple[OutputFile, tuple[RawCopy, ...]]:
    """The file, and the copies that bring its tensors over."""
    moved: dict[NewStorage, TensorRef] = {}
    layout = layout_torch_zip(grafted(value, moved))
    raw = tuple(RawCopy(src=ref, path=path, offset=layout.storages[storage]) for storage, ref in moved.items())
    return OutputFile(path=path, nbytes=layout.nbytes, literals=layout.literals, crcs=layout.crcs), raw


def grafted(value: object, moved: dict[NewStorage, TensorRef]) -> object:
    """`value` with every tensor of the source replaced by a new one, noted in `moved` with where it came from.

    Lists, dicts and objects are copied; what was shared stays shared, cycles stay cycles.
    """
    return _Graft(moved).value(value)


class _Graft:
    def __init__(self, moved: dict[NewStorage, TensorRef]) -> None:
        self._moved = moved
        self._done: dict[int, object] = {}
        self._tensors: dict[TensorRef, NewTensor] = {}

    def value(self, value: object) -> object:
        if isinstance(value, TensorRef):
            return self._tensor(value)
        if isinstance(value, InlineTensor) or not isinstance(value, list | tuple | dict | set | frozenset | Stub):
            return value
        if id(value) not in self._done:
            self._container(value)
        return self._done[id(value)]

    def _tensor(self, ref: TensorRef) -> NewTensor:
        if ref not in self._tensors:
            storage = NewStorage(ref.dtype, ref.numel)
            self._tensors[ref] = NewTensor(storage=storage, shape=ref.shape, strides=contiguous_strides(ref.shape))
            if ref.numel:
                self._moved[storage] = ref
        return self._tensors[ref]

    def _container(self, value: list[object] | tuple[object, ...] | dict[object, object] | object) -> None:
        if isinstance(value, list):
            items: list[object] = []
            self._done[id(value)] = items
            items.extend(self.value(item) for item in value)
        elif isinstance(value, dict):
            entries = type(value)()
            self._done[id(value)] = entries
            entries.update((self.value(key), self.value(item)) for key, item in value.items())
            for name, attribute in getattr(value, "__dict__", {}).items():  # an OrderedDict may carry attributes
                setattr(entries, name, self.value(attribute))
        elif isinstance(value, Stub):
            self._stub(value)
        elif isinstance(value, tuple | set | frozenset):
            self._done[id(value)] = type(value)(self.value(item) for item in value)

    def _stub(self, value: Stub) -> None:
        copy = Stub(value.made_by, new=value.new, has_state=value.has_state)
        self._done[id(value)] = copy
        copy.args = tuple(self.value(item) for item in value.args)
        copy.kwargs = {name: self.value(item) for name, item in value.kwargs.items()}
        copy.state = self.value(value.state)
        copy.items = [self.value(item) for item in value.items]
        copy.entries = [(self.value(key), self.value(item)) for key, item in value.entries]
