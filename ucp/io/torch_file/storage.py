"""Storages and tensors that view them: references into files, and new ones to be written.

torch pickles a tensor as a call of a rebuild function on a storage, and a storage as a persistent id
`("storage", <class>, key, location, numel)` (torch/serialization.py, `_save`). The archive locates the storage;
functions here turn the call into a `TensorRef`, or return `UNKNOWN_CALL` for a call of another form.

>>> storage = NewStorage(DType.FLOAT32, 6)
>>> NewTensor(storage=storage, shape=(2, 3), strides=(3, 1)).storage.nbytes
24
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ucp.core.tensor import DType, TensorRef
from ucp.io.pickle.values import GlobalName

UNKNOWN_CALL = object()
"""Result for arguments of an unknown form: the call becomes a `Stub`."""

_KINDS = {
    "DoubleStorage": (DType.FLOAT64, 8),
    "FloatStorage": (DType.FLOAT32, 4),
    "HalfStorage": (DType.FLOAT16, 2),
    "BFloat16Storage": (DType.BFLOAT16, 2),
    "LongStorage": (DType.INT64, 8),
    "IntStorage": (DType.INT32, 4),
    "ShortStorage": (DType.INT16, 2),
    "CharStorage": (DType.INT8, 1),
    "ByteStorage": (DType.UINT8, 1),
    "BoolStorage": (DType.BOOL, 1),
    "ComplexDoubleStorage": (DType.COMPLEX128, 16),
    "ComplexFloatStorage": (DType.COMPLEX64, 8),
    "UntypedStorage": (DType.UINT8, 1),
    "QInt8Storage": (None, 1),
    "QUInt8Storage": (None, 1),
    "QInt32Storage": (None, 4),
    "QUInt4x2Storage": (None, 1),
    "QUInt2x4Storage": (None, 1),
}
"""Storage classes: dtype (None: quantised, not supported) and bytes per element (torch/storage.py)."""
STORAGE_CLASSES = {dtype: name for name, (dtype, _) in _KINDS.items() if dtype and name != "UntypedStorage"}
"""Storage class per dtype; for later dtypes the tensor names the dtype itself (torch/storage.py)."""
_MODULES = frozenset({"torch", "torch.storage", "torch.cuda"})
_MOST = 1 << 63
"""Integers in torch are smaller."""
_MOST_DIMS = 64
_DTYPES = {dtype.value: dtype for dtype in DType}


class StorageId(NamedTuple):
    """The parsed persistent id of a storage."""

    kind: GlobalName
    """Storage class."""
    dtype: DType | None
    """Element type; None when the class is a quantised one."""
    itemsize: int
    """Bytes of one element."""
    key: str
    """Name of the storage in its archive."""
    numel: int
    """Elements."""
    view: tuple[int, int] | None = None
    """Elements before and in a view of the stored storage (legacy files only)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.numel * self.itemsize

    @classmethod
    def parse(cls, pid: object) -> StorageId:
        """Parse a persistent id. Raises ValueError if it is not one of torch."""
        match pid:
            case ("storage", GlobalName() as kind, str(key), _, int(numel), *rest) if 0 <= numel < _MOST:
                known = _KINDS.get(kind.qualname) if kind.module in _MODULES else None
                if known is None:
                    raise ValueError(f"expected a storage class of torch; got {kind}")
                match rest:
                    case [] | [None]:
                        view = None
                    case [(str(), int(start), int(count))] if 0 <= start < _MOST and 0 <= count < _MOST:
                        view = start, count
                    case _:
                        raise ValueError("expected the view of a storage (key, start, count) in its persistent id")
                return cls(kind=kind, dtype=known[0], itemsize=known[1], key=key, numel=numel, view=view)
            case _:
                raise ValueError("expected the persistent id of a storage (class, key, location, numel)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRef:
    """Bytes of one storage in one file."""

    path: str
    """File."""
    offset: int
    """First byte."""
    nbytes: int
    """Bytes."""
    dtype: DType | None
    """Element type; None when the class is a quantised one."""


def rebuild_tensor(args: tuple[object, ...]) -> object:
    """Tensor of torch._utils._rebuild_tensor and _rebuild_tensor_v2: the storage has the dtype."""
    match args:
        case (StorageRef() as storage, int(start), tuple(shape), tuple(strides), *rest) if len(rest) <= 3:
            dtype = storage.dtype
            marked = rest[2] if len(rest) == 3 else None
        case _:
            return UNKNOWN_CALL
    if dtype is None or _is_lazy(marked):
        return UNKNOWN_CALL
    return _view(storage, dtype, start, shape, strides)


def rebuild_typed_tensor(args: tuple[object, ...]) -> object:
    """Tensor of torch._utils._rebuild_tensor_v3: the dtype is an argument."""
    match args:
        case (StorageRef() as storage, int(start), tuple(shape), tuple(strides), _, _, GlobalName() as name, *rest):
            dtype = _DTYPES.get(name.qualname) if name.module == "torch" else None
        case _:
            return UNKNOWN_CALL
    if dtype is None or len(rest) > 1 or any(_is_lazy(part) for part in rest):
        return UNKNOWN_CALL
    return _view(storage, dtype, start, shape, strides)


def rebuild_parameter(args: tuple[object, ...]) -> object:
    """Tensor of torch._utils._rebuild_parameter(_with_state): the wrapper does not change the elements."""
    match args:
        case (TensorRef() as tensor, bool(), _) | (TensorRef() as tensor, bool(), _, _):
            return tensor
        case _:
            return UNKNOWN_CALL


def _is_lazy(metadata: object) -> bool:
    """Whether the tensor has a conjugate or negative bit (torch._utils.get_tensor_metadata)."""
    if metadata is None:
        return False
    return not isinstance(metadata, dict) or any(flag is not False for flag in metadata.values())


def _view(
    storage: StorageRef, dtype: DType, start: int, shape: tuple[object, ...], strides: tuple[object, ...]
) -> TensorRef:
    sizes, steps = _check_integers(shape), _check_integers(strides)
    if len(sizes) != len(steps) or not 0 <= start < _MOST:
        raise ValueError(f"expected as many strides as sizes of a tensor; got {sizes}, {steps}, start {start:#x}")
    last = start + sum([(n - 1) * step for n, step in zip(sizes, steps, strict=True)])
    skip = start * dtype.itemsize
    if 0 in sizes:
        skip = min(skip, storage.nbytes)
    elif (last + 1) * dtype.itemsize > storage.nbytes:
        raise ValueError(
            f"expected a view inside its storage of {storage.nbytes} bytes; got {dtype} of shape {sizes}, "
            f"strides {steps}, starting at element {start}"
        )
    return TensorRef(path=storage.path, offset=storage.offset + skip, dtype=dtype, shape=sizes, strides=steps)


def _check_integers(values: tuple[object, ...]) -> tuple[int, ...]:
    integers = tuple([n for n in values if type(n) is int and 0 <= n < _MOST])
    if len(integers) != len(values) or len(values) > _MOST_DIMS:
        raise ValueError(
            f"expected at most {_MOST_DIMS} integers from 0 to {_MOST - 1} as sizes and strides of a tensor"
        )
    return integers


@dataclass(frozen=True, slots=True, eq=False)
class NewStorage:
    """Elements to be written, shared by the tensors that view them; two storages are never equal."""

    dtype: DType
    """Element type."""
    numel: int
    """Elements."""

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise ValueError(f"expected a number of elements >= 0; got {self.numel}")

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewTensor:
    """A tensor to be written: a view of a new storage."""

    storage: NewStorage
    """Storage that holds its elements."""
    offset: int = 0
    """Position in the storage of element [0, ..., 0]."""
    shape: tuple[int, ...]
    """Elements per dim."""
    strides: tuple[int, ...]
    """Elements to step in the storage per dim."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or min((self.offset, *self.shape, *self.strides)) < 0:
            raise ValueError(f"not a tensor: shape {self.shape}, strides {self.strides}, offset {self.offset}")
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        if 0 not in self.shape and last >= self.storage.numel:
            raise ValueError(f"a tensor of shape {self.shape} lies past the end of {self.storage}")
