"""Turns the calls in a pickle that are known and harmless into plain values.

Nothing is looked up, imported or called: the table has an *interpretation* for each known call. A call that is not in
the table, or has arguments of another form, becomes a `Stub`.

>>> interpret_call(GlobalName("builtins", "complex"), (1.0, 2.0))
(1+2j)
>>> interpret_call(GlobalName("os", "system"), ("true",)).made_by
GlobalName(module='os', qualname='system')
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ucp.core.tensor import TensorRef
from ucp.io.pickle.keys import check_keys
from ucp.io.pickle.values import GlobalName, Stub, TorchSize
from ucp.io.torch_file.storage import UNKNOWN_CALL, rebuild_parameter, rebuild_tensor, rebuild_typed_tensor

_LATIN1 = frozenset({"latin1", "latin-1", "iso-8859-1"})
_INTEGERS = frozenset({int})
_MOST_BITS = 64
_LONGEST_NAME = 1000
"""Most characters of a dotted name that getattr calls build."""
_PLAIN_TENSORS = frozenset(
    {
        GlobalName("torch", "Tensor"),
        GlobalName("torch._tensor", "Tensor"),
        GlobalName("torch.nn.parameter", "Parameter"),
        GlobalName("torch.nn.parameter", "Buffer"),
    }
)
"""Tensor classes whose attributes do not change the elements."""


def interpret_call(function: object, args: tuple[object, ...]) -> object:
    """Value of `function(*args)`: a plain value, a tensor, or a `Stub`."""
    if type(function) is not GlobalName:
        return Stub(GlobalName("operator", "call"), (function, *args), new=False)
    known = _BUILDERS.get(function.qualname)
    value = (
        known[1](args) if known is not None and known[0] == function.module else _interpret_builtin(str(function), args)
    )
    return Stub(function, args, new=False) if value is UNKNOWN_CALL else value


def _interpret_builtin(name: str, args: tuple[object, ...]) -> object:
    """Value of a call of a builtin or standard library function."""
    match name, args:
        case (("builtins.set" | "builtins.frozenset"), (() | ((list() | tuple()),))):
            members = [member for arg in args if isinstance(arg, list | tuple) for member in arg]
            check_keys(members)
            return set(members) if name == "builtins.set" else frozenset(members)
        case (("builtins.bytes" | "builtins.bytearray" | "_codecs.encode"), _):
            return _interpret_bytes(args, bytearray if name == "builtins.bytearray" else bytes)
        case "builtins.complex", (float(real), float(imaginary)):
            return complex(real, imaginary)
        case "builtins.slice", (_, _, _) if all(arg is None or _is_short(arg) for arg in args):
            return slice(*args)
        case "builtins.range", (int(start), int(stop), int(step)) if step != 0 and all(map(_is_short, args)):
            return range(start, stop, step)
        case "builtins.getattr", (GlobalName(module, qualname), str(attribute)) if (
            len(qualname) + len(attribute) <= _LONGEST_NAME and attribute.isidentifier()
        ):  # how protocols 0 to 3 write nested classes
            return GlobalName(module, f"{qualname}.{attribute}")
        case "copyreg.__newobj__", (GlobalName() as cls, *rest):
            return Stub(cls, tuple(rest))
        case "copyreg._reconstructor", (GlobalName() as cls, GlobalName("builtins", "object"), None):
            return Stub(cls)  # how protocols 0 and 1 write cls.__new__
    return UNKNOWN_CALL


def _is_short(value: object) -> bool:
    """Whether a value is an integer of at most 64 bits, as in slices and ranges."""
    return isinstance(value, int) and value.bit_length() <= _MOST_BITS


def _interpret_bytes(args: tuple[object, ...], kind: type[bytes | bytearray]) -> object:
    """Value of bytes(), bytearray(data), and encode(text, "latin1"), by which protocol 2 writes bytes."""
    match args:
        case ():
            return kind()
        case (bytes(data),):
            return kind(data)
        case (str(text), str(encoding)) if encoding in _LATIN1:
            return kind(text.encode("latin-1"))
    return UNKNOWN_CALL


def interpret_new(cls: object, args: tuple[object, ...], kwargs: dict[str, object] | None = None) -> Stub:
    """The stub for `cls.__new__(cls, *args, **kwargs)`."""
    if type(cls) is GlobalName:
        return Stub(cls, args, kwargs)
    if kwargs:
        return Stub(GlobalName("copyreg", "__newobj_ex__"), (cls, args, kwargs), new=False)
    return Stub(GlobalName("copyreg", "__newobj__"), (cls, *args), new=False)


def set_attributes(target: OrderedDict[object, object], state: object) -> None:
    """Set the attributes of an ordered dict, such as `_metadata` of a torch state_dict. Raises ValueError."""
    if type(state) is not dict:
        raise ValueError(f"expected the attributes of an OrderedDict as a dict; got a {type(state).__name__}")
    for name, value in state.items():
        if type(name) is not str or name.startswith("__") or hasattr(OrderedDict, name):
            raise ValueError("expected attributes of an OrderedDict that hide none of its own")
        setattr(target, name, value)


def _interpret_ordered_dict(args: tuple[object, ...]) -> object:
    match args:
        case ():
            return OrderedDict()
        case (list(pairs),) if all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
            check_keys(key for key, _ in pairs)
            return OrderedDict(pairs)
    return UNKNOWN_CALL


def _interpret_size(args: tuple[object, ...]) -> object:
    sizes = args[0] if len(args) == 1 else None
    if (type(sizes) is tuple or type(sizes) is list) and _INTEGERS.issuperset(map(type, sizes)):
        return TorchSize(sizes)
    return UNKNOWN_CALL


def _interpret_typed(args: tuple[object, ...]) -> object:
    """The tensor of torch._tensor._rebuild_from_type_v2, for classes in `_PLAIN_TENSORS`."""
    match args:
        case (GlobalName() as function, GlobalName() as cls, tuple(inner), _) if cls in _PLAIN_TENSORS:
            value = interpret_call(function, inner)
            return value if isinstance(value, TensorRef) else UNKNOWN_CALL
    return UNKNOWN_CALL


_BUILDERS: dict[str, tuple[str, Callable[[tuple[object, ...]], object]]] = {
    "OrderedDict": ("collections", _interpret_ordered_dict),
    "Size": ("torch", _interpret_size),
    "_rebuild_tensor": ("torch._utils", rebuild_tensor),
    "_rebuild_tensor_v2": ("torch._utils", rebuild_tensor),
    "_rebuild_tensor_v3": ("torch._utils", rebuild_typed_tensor),
    "_rebuild_parameter": ("torch._utils", rebuild_parameter),
    "_rebuild_parameter_with_state": ("torch._utils", rebuild_parameter),
    "_rebuild_from_type": ("torch._tensor", _interpret_typed),
    "_rebuild_from_type_v2": ("torch._tensor", _interpret_typed),
}
