"""What unpickling would call: named where it is nothing usual, whatever it is hidden in."""

from __future__ import annotations

import pytest

from ucp.io.pickle.callables import find_unusual_calls
from ucp.io.pickle.unpickle import parse_pickle
from ucp.io.pickle.values import GlobalName, Stub

USUAL = {"ds.LossScaler"}


def told(pickled: bytes) -> str:
    value = parse_pickle(pickled + b".", where="test").value
    return "".join(find_unusual_calls([("client_state", {"key": [value]})], USUAL))


@pytest.mark.parametrize(
    ("pickled", "names"),
    [
        (b"cos\nsystem\nX\x04\0\0\0true\x85R", ["os.system"]),
        (b"(X\x04\0\0\0trueios\nsystem\n", ["os.system"]),
        (b"(cos\nsystem\nX\x04\0\0\0trueo", ["os.system"]),
        (b"cmy\nThing\n)\x81", ["my.Thing"]),
        (b"cmy\nThing\n)\x81}b", ["my.Thing"]),
        (b"cds\nLossScaler\n)\x81(cmy\nThing\n)\x81tb", ["my.Thing"]),
        (b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n)}tR", ["os.system"]),
        (b"c__builtin__\nmap\ncos\nsystem\n]\x86R", ["builtins.map", "os.system"]),
        (b"ccollections\ndefaultdict\ncos\nsystem\n\x85R", ["os.system"]),
        (
            b"c__builtin__\ngetattr\nc__builtin__\n__import__\nX\x02\0\0\0os\x85RX\x06\0\0\0system\x86R",
            ["builtins.__import__"],
        ),
    ],
)
def test_what_is_not_usual_is_named(pickled: bytes, names: list[str]) -> None:
    note = told(pickled)
    assert all(f"{name} (in client_state)" in note for name in names), note


@pytest.mark.parametrize(
    "pickled",
    [
        b"cos\nsystem\n",
        b"cds\nLossScaler\n)\x81}b",
        b"ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R",
        b"ccollections\nOrderedDict\n)R",
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85X\x01\0\0\0b\x87R",
        b"cargparse\nNamespace\n)\x81}X\x01\0\0\0fctorch.nn.functional\ngelu\nsb",
        b"ctorch\ndevice\nX\x03\0\0\0cpu\x85R",
    ],
)
def test_what_is_usual_or_only_named_is_not(pickled: bytes) -> None:
    assert told(pickled) == ""


def test_a_name_is_shown_as_it_may_be_printed() -> None:
    value = Stub(GlobalName("os\n", "\x1b[2Jsystem"))
    (note,) = find_unusual_calls([("x", value)], ())
    assert note.isprintable()
