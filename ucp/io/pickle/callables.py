"""Which classes and functions unpickling a value would call, and a note on those that torch and frameworks do not use.

ucp calls none of them. But it copies such objects into the files that it writes, and a framework unpickles those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ucp.core.tensor import DType
from ucp.io.pickle.values import GlobalName, Stub, walk

CALLS = "unpickled by a framework, this checkpoint calls"
"""How the note begins."""
GROUPS = "parameter groups"
"""Place of a callable that is in a parameter group, not in an extra."""
_SHOWN = 8
"""Callables that a note names."""

_USUAL = frozenset(
    f"{module}.{name}"
    for module, names in {
        "builtins": "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple",
        "collections": "Counter OrderedDict defaultdict deque",
        "copyreg": "__newobj__ __newobj_ex__ _reconstructor",
        "_codecs": "encode",
        "argparse": "Namespace",
        "types": "SimpleNamespace",
        "datetime": "date datetime time timedelta timezone",
        "decimal": "Decimal",
        "uuid": "UUID",
        "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
        "_io": "BytesIO",
        "io": "BytesIO",
        "numpy": "dtype ndarray",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "numpy.core.numeric": "_frombuffer",
        "numpy._core.numeric": "_frombuffer",
        "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
        "torch": "Size Tensor device dtype memory_format Generator " + " ".join(dtype.value for dtype in DType),
        "torch._tensor": "Tensor _rebuild_from_type_v2",
        "torch._utils": (
            "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state "
            "_rebuild_qtensor _rebuild_sparse_tensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage "
            "_rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor _rebuild_wrapper_subclass"
        ),
        "torch.nn.parameter": "Buffer Parameter",
        "torch.serialization": "_get_layout",
        "torch.storage": "TypedStorage UntypedStorage",
    }.items()
    for name in names.split()
)
"""Callables in pickles of plain values and of torch: those that torch's `weights_only` unpickler (2.13) allows."""


def list_callables(value: object) -> Iterator[GlobalName]:
    """Functions and classes that unpickling `value` calls or passes as arguments; some may occur twice.

    >>> made = Stub(GlobalName("builtins", "map"), args=(GlobalName("os", "system"), ["true"]), new=False)
    >>> [str(name) for name in list_callables({"key": [made]})]
    ['builtins.map', 'os.system']
    """
    stubs = [node for node in walk([value]) if isinstance(node, Stub)]
    yield from (stub.made_by for stub in stubs)
    arguments = walk(part for stub in stubs for part in (stub.args, stub.kwargs))
    yield from (argument for argument in arguments if isinstance(argument, GlobalName))


def find_unusual_calls(values: Iterable[tuple[str, object]], usual: Collection[str]) -> Iterator[str]:
    """A note on callables in `values` (place, value) that are not in `usual` ("module.name"); nothing if all are."""
    places_by_callable: dict[str, dict[str, None]] = {}
    for where, value in values:
        for name in list_callables(value):
            if str(name) not in _USUAL and str(name) not in usual:
                text = str(name) if str(name).isprintable() else repr(str(name))
                places_by_callable.setdefault(text, {})[where] = None
    if places_by_callable:
        descriptions = [f"{name} (in {', '.join(where)})" for name, where in places_by_callable.items()]
        more = f" and {len(descriptions) - _SHOWN} more" if len(descriptions) > _SHOWN else ""
        places = dict.fromkeys(
            place.partition("/")[0] for callers in places_by_callable.values() for place in callers if place != GROUPS
        )
        hint = f"; --set drop={','.join(places)} leaves it out of what is written" if places else ""
        yield (
            f"{CALLS} {', '.join(descriptions[:_SHOWN])}{more}, which no framework needs. ucp calls nothing and "
            f"copies it unchanged{hint}"
        )
