from __future__ import annotations

import math
import pickle
import random
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from enum import Enum
from typing import Self

import pytest

from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.unpickle import TruncatedPickleError, parse_pickle
from ucp.io.pickle.values import GlobalName, Stub

PROTOCOLS = range(6)


class Plain:
    """A class with attributes."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def __eq__(self, other: object) -> bool:
        return type(other) is Plain and vars(self) == vars(other)

    __hash__ = object.__hash__


class Slotted:
    """A class with slots."""

    __slots__ = ("a", "b")


class Colour(Enum):
    """An enumeration."""

    RED = 1


class WithKeywords:
    """A class made by keyword arguments."""

    def __getnewargs_ex__(self) -> tuple[tuple[int, ...], dict[str, int]]:
        return (1,), {"b": self.b}

    def __new__(cls, a: int, b: int = 0) -> Self:
        self = super().__new__(cls)
        self.b = b
        return self

    b: int


class Outer:
    """A class that holds one."""

    class Inner:
        """A nested class."""


class Words(list[str]):
    """A subclass of list."""


class Table(dict[str, int]):
    """A subclass of dict."""


def parsed(value: object, protocol: int = 2) -> object:
    """`value` through the pickler of Python and our reader."""
    data = pickle.dumps(value, protocol)
    result = parse_pickle(data, where="test")
    assert result.end == len(data)
    return result.value


def own(name: str) -> GlobalName:
    """A global of this module."""
    return GlobalName(__name__, name)


VALUES = [
    None,
    True,
    False,
    *(sign * 2**n + d for n in (0, 7, 8, 15, 16, 31, 32, 63, 64, 100, 2100) for sign in (1, -1) for d in (-1, 0, 1)),
    0.0,
    -0.0,
    1e308,
    5e-324,
    math.inf,
    "",
    "a\n\\u0041'\"é\U0001f600",
    "\ud800",
    "x" * 300,
    "y" * 70000,
    b"",
    bytes(range(256)),
    b"z" * 300,
    b"z" * 70000,
    bytearray(b""),
    bytearray(b"\x00\xffabc"),
    1 + 2j,
    complex(-0.0, math.inf),
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    tuple(range(10)),
    [],
    [1],
    list(range(2500)),
    {},
    {1: 2},
    {str(i): i for i in range(2500)},
    {(1, ("a", None)): [1], frozenset([1]): 2, b"k": 3, 1.5: 4},
    set(),
    {1, 2, 3},
    frozenset(),
    frozenset([1, (2, 3)]),
    OrderedDict(),
    OrderedDict([("b", 1), ("a", OrderedDict(x=1))]),
    slice(1, None, 2),
    range(3, 10, 2),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_are_exact(protocol: int) -> None:
    for value in VALUES:
        result = parsed(value, protocol)
        assert type(result) is type(value)
        assert result == value
        assert repr(result) == repr(value)


@pytest.mark.parametrize("protocol", PROTOCOLS[1:])
def test_the_bits_of_a_nan_are_kept(protocol: int) -> None:
    (nan,) = struct.unpack(">d", bytes.fromhex("7ff80000deadbeef"))
    result = parsed(nan, protocol)
    assert isinstance(result, float)
    assert struct.pack(">d", result) == struct.pack(">d", nan)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_and_cyclic_values_stay_so(protocol: int) -> None:
    shared: list[object] = [1]
    loop: dict[str, object] = {"a": shared, "b": shared, "t": (shared,)}
    loop["self"] = loop
    result = parsed(loop, protocol)
    assert isinstance(result, dict)
    assert result["self"] is result
    assert result["a"] is result["b"] is result["t"][0]


@pytest.mark.parametrize("protocol", PROTOCOLS[2:])
def test_slots_are_in_the_state(protocol: int) -> None:
    value = Slotted()
    value.a, value.b = 1, 2  # type: ignore[attr-defined]
    result = parsed(value, protocol)
    assert isinstance(result, Stub)
    assert result.attribute("b") == 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_object_that_holds_itself(protocol: int) -> None:
    value = Plain(start=[4])
    value.start.append(value)  # type: ignore[attr-defined]
    result = parsed(value, protocol)
    assert isinstance(result, Stub)
    start = result.attribute("start")
    assert isinstance(start, list)
    assert start[1] is result


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_of_enumerations_are_calls_or_names(protocol: int) -> None:
    """Of the class with the value; the first releases of Python 3.11 look the member up by its name."""
    result = parsed(Colour.RED, protocol)
    if Colour.RED.__reduce_ex__(protocol)[0] is getattr:
        assert result == own("Colour.RED")
        return
    assert isinstance(result, Stub)
    assert (result.made_by, result.args, result.new) == (own("Colour"), (1,), False)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_classes_and_functions_are_names(protocol: int) -> None:
    assert parsed([Plain, Outer.Inner, parsed, len, OrderedDict], protocol) == [
        own("Plain"),
        own("Outer.Inner"),
        own("parsed"),
        GlobalName("builtins", "len"),
        GlobalName("collections", "OrderedDict"),
    ]


def test_one_object_per_name() -> None:
    result = parsed([Plain(), Plain()])
    assert isinstance(result, list)
    assert result[0].made_by is result[1].made_by


def test_keyword_arguments() -> None:
    result = parsed(WithKeywords(1, b=2), 4)
    assert isinstance(result, Stub)
    assert (result.made_by, result.args, result.kwargs, result.new) == (own("WithKeywords"), (1,), {"b": 2}, True)


@pytest.mark.parametrize("protocol", PROTOCOLS[2:])
def test_subclasses_of_containers_keep_their_elements(protocol: int) -> None:
    words, table, queue = Words(["a", "b"]), Table(a=1, b=2), deque([1, 2], maxlen=5)
    result = parsed([words, table, queue, defaultdict(list, x=[1])], protocol)
    assert isinstance(result, list)
    assert result[0].items == ["a", "b"]
    assert result[1].entries == [("a", 1), ("b", 2)]
    assert result[2].items == [1, 2]
    assert (result[3].args, result[3].entries) == ((GlobalName("builtins", "list"),), [("x", [1])])


def test_attributes_that_would_hide_methods_are_refused() -> None:
    with pytest.raises(MalformedError, match=r"OrderedDict .*hide"):
        parse_pickle(b"ccollections\nOrderedDict\n)R}X\x05\0\0\0itemsK\x01sb.", where="test")


def test_text_of_python_2_is_utf8_or_bytes() -> None:
    assert parse_pickle(b"U\x03abc.", where="test").value == "abc"
    assert parse_pickle(b"T\x02\0\0\0\xff\xfe.", where="test").value == b"\xff\xfe"
    assert parse_pickle(b"S'a\\x41\\101\\0\\n\\'\\q\\\\'\n.", where="test").value == "aAA\0\n'\\q\\"


def test_what_calls_a_call_stays_a_recipe() -> None:
    result = parse_pickle(b"cf\ng\n)R(K\x01tR.", where="test").value
    assert isinstance(result, Stub)
    assert result.made_by == GlobalName("operator", "call")
    assert isinstance(result.args[0], Stub)
    assert result.args[1:] == (1,)


@pytest.mark.parametrize(
    ("pickled", "facts"),
    [
        (b"\x80\x06N.", "protocol 6"),
        (b"\x80\x02\x82\x01.", "copyreg"),
        (b"\x80\x02\x83\x01\x00.", "copyreg"),
        (b"\x80\x02\x84\x01\x00\x00\x00.", "copyreg"),
        (b"\x80\x05\x97.", "protocol 5"),
        (b"\x98.", "protocol 5"),
    ],
)
def test_what_needs_something_outside_is_unsupported(pickled: bytes, facts: str) -> None:
    with pytest.raises(UnsupportedError, match=facts):
        parse_pickle(pickled, where="test")


@pytest.mark.parametrize(
    "pickled",
    [
        b"?.",
        b"0.",
        b"t.",
        b"R.",
        b"K\x01K\x02R.",
        b"h\x00.",
        b"g-1\n.",
        b"Np-1\n.",
        b"Ixyz\n.",
        b"Fxyz\n.",
        b"Sxyz\n.",
        b"S'\n.",
        b"X\xff\xff\xff\xff.",
        b"X\x01\0\0\0\xff.",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x8b\xff\xff\xff\xff.",
        b"\x8b\xff\xff\xff\x7f.",
        b"T\xff\xff\xff\xff.",
        b"]K\x01K\x02s.",
        b"}]K\x01s.",
        b"}(K\x01u.",
        b"}}K\x01s.",
        b"K\x01K\x02a.",
        b"K\x01(e.",
        b"\x8f(]\x90.",
        b"(]\x91.",
        b"(o.",
        b"}K\x01b.",
        b"K\x01K\x02\x93.",
        b"ca\nb\n]\x81.",
        b"ca\nb\n)}K\x01K\x02s\x92.",
        b"ca\nb\n)\x81NbNb.",
        b"K\x01Q.",
        b"P1\n.",
        b"((0.",
    ],
)
def test_malformed_streams(pickled: bytes) -> None:
    with pytest.raises(MalformedError, match=r"^demo\.pt: "):
        parse_pickle(pickled, where="demo.pt")


@pytest.mark.parametrize(
    ("pickled", "facts"),
    [
        (b"Iabc\n.", "b'abc' .*number"),
        (b"L12x3L\n.", "b'12x3' .*number"),
        (b"F1.2.3\n.", r"b'1\.2\.3' .*number"),
        (b"I" + b"9" * 5000 + b"\n.", r"b'9{40}'\.\.\. .*number"),
        (b"V\\uZZZZ\n.", "text .*encoding .*opcode"),
        (b"\x80\x02X\x01\0\0\0\xff.", "text .*encoding .*opcode"),
        (b"c\xff\nname\n.", "text .*encoding .*opcode"),
    ],
)
def test_what_is_wrong_is_said_in_words_of_the_pickle(pickled: bytes, facts: str) -> None:
    with pytest.raises(MalformedError, match=rf"^test: (byte \d of )?the pickle .*: {facts}.*\. "):
        parse_pickle(pickled, where="test")


@pytest.mark.parametrize(
    "hostile",
    [b"Nr\xff\xff\xff\xff", b"Np4294967295\n", b"Np" + b"9" * 30 + b"\n", b"Nr\0\0\0\x10" + b"N0" * 1000, b"g-1\n"],
)
def test_memo_indexes_take_no_memory_out_of_proportion(hostile: bytes) -> None:
    """Python's machine makes room for every index up to the one that is given: 64 GiB for the first of these."""
    with pytest.raises(MalformedError, match=r"memo index -?\d+"):
        parse_pickle(hostile + b".", where="test")


@pytest.mark.parametrize("index", [0, 255, 256, 1 << 16, (1 << 17) + 1])
def test_memo_indexes_of_any_width(index: int) -> None:
    put = b"r" + struct.pack("<I", index) if index > 255 else b"q" + bytes([index])
    filling = b"X" + struct.pack("<I", 1 << 18) + b" " * (1 << 18) + b"0"
    for got in (b"j" + struct.pack("<I", index), b"g%d\n" % index):
        value = parse_pickle(filling + b"]" + put + got + b"\x86.", where="test").value
        assert isinstance(value, tuple)
        assert value[0] is value[1]


def test_calls_that_lie_in_each_other_are_read_or_refused() -> None:
    """A call that is understood by what it calls, ten thousand deep."""
    name, tensor = b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch\nTensor\n"
    nested = b"(h\0h\1" * 10_000 + b")" + b"}t" * 10_000
    with pytest.raises(MalformedError, match="recursion"):
        parse_pickle(name + b"q\0" + tensor + b"q\x0100" + b"h\0" + nested + b"R.", where="test")


def test_every_truncation_says_so() -> None:
    for protocol in PROTOCOLS:
        data = pickle.dumps(
            [{1.5: (1, 2)}, OrderedDict(a={3}), range(4), Plain(a=1), "text", b"bytes", 2**70, 1.5], protocol
        )
        for stop in range(len(data)):
            with pytest.raises(TruncatedPickleError):
                parse_pickle(data[:stop], where="test")


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        (b"]", b"a"),
        (b"", b"\x85"),
        (b"}N", b"s"),
        (b"ca\nb\n", b"\x85R"),
        (b"ca\nb\n)\x81", b"b"),
        (b"\x80\x02ccollections\nOrderedDict\n)RN", b"s"),
    ],
)
def test_depth_is_no_danger(opening: bytes, closing: bytes) -> None:
    depth = 40_000
    value = parse_pickle(opening * depth + b"N" + closing * depth + b".", where="test").value
    assert value is not None
    del value


@pytest.mark.parametrize("hostile", [b"\x86", b"\x85"])
def test_keys_that_take_forever_to_hash_are_refused(hostile: bytes) -> None:
    doubled = b"N" + (b"2\x86" * 60 if hostile == b"\x86" else b"\x85" * 100_000)
    with pytest.raises(MalformedError, match="256 members"):
        parse_pickle(b"}" + doubled + b"K\x01s.", where="test")
    with pytest.raises(MalformedError, match="256 members"):
        parse_pickle(b"(" + doubled + b"\x91.", where="test")


def test_persistent_ids_are_looked_up() -> None:
    assert parse_pickle(b"K\x07Q.", where="test", persistent=lambda pid: ("found", pid)).value == ("found", 7)
    assert parse_pickle(b"Pabc\n.", where="test", persistent=lambda pid: pid).value == "abc"


def whole(number: int) -> bytes:
    """LONG1."""
    return b"\x8a\x0b" + number.to_bytes(11, "little", signed=True)


def alike(after: bytes = b"") -> bytes:
    """Numbers of one hash, each followed by `after`."""
    return b"".join(whole(number * ((1 << 61) - 1)) + after for number in range(1, 1001))


@pytest.mark.parametrize(
    "hostile",
    [
        b"}(" + alike(b"N") + b"u",
        b"}" + alike(b"Ns"),
        b"\x8f(" + alike() + b"\x90",
        b"(" + alike() + b"\x91",
        b"cbuiltins\nset\n](" + alike() + b"e\x85R",
        b"ccollections\nOrderedDict\n](" + alike(b"N\x86") + b"e\x85R",
        b"}(" + alike(b"\x85N") + b"u",
    ],
)
def test_keys_chosen_to_have_one_hash_are_refused(hostile: bytes) -> None:
    """Each is compared with all before it: 30,000 take a minute."""
    with pytest.raises(MalformedError, match=r"\b100 .*hash"):
        parse_pickle(hostile + b".", where="test")


def colliding(bits: int) -> list[int]:
    """Numbers that fill a dict of 2**`bits` slots so that the last ones look at thousands of them."""
    size = 1 << bits
    chain = [0]
    while len(chain) < size * 6 // 10:
        chain.append((5 * chain[-1] + 1) % size)
    taken, early = set(chain), set(chain[: size // 5])
    choose = random.Random(1)
    numbers: list[int] = []
    while len(numbers) < size // 20:
        number = perturb = choose.getrandbits(53)
        slot = number % size
        for _ in range(13):
            if slot not in taken:
                break
            perturb >>= 5
            slot = (5 * slot + perturb + 1) % size
        else:
            numbers += [number] if slot in early else []
    return [*chain, *numbers]


COLLIDING = b"".join(map(whole, colliding(12)))
COLLIDING_FLOATS = b"".join(b"G" + struct.pack(">d", number) for number in colliding(12))
COLLIDING_KEYS = b"".join(whole(number) + b"N" for number in colliding(12))


@pytest.mark.parametrize(
    "hostile",
    [
        b"}(" + COLLIDING_KEYS + b"u",
        b"}" + b"".join(whole(number) + b"Ns" for number in colliding(12)),
        b"\x8f(" + COLLIDING + b"\x90",
        b"\x8f(" + COLLIDING_FLOATS + b"\x90",
        b"(" + COLLIDING + b"\x91",
        b"cbuiltins\nset\n](" + COLLIDING + b"e\x85R",
    ],
)
def test_keys_chosen_to_be_found_slowly_are_refused(hostile: bytes) -> None:
    """Each looks at thousands of slots: 1 MiB of them takes 17 seconds, and 4 MiB minutes."""
    with pytest.raises(MalformedError, match="collide"):
        parse_pickle(hostile + b".", where="test")


@pytest.mark.parametrize(
    "keys",
    [
        range(5000),
        range(-5000, 0),
        [random.Random(1).getrandbits(60) for _ in range(5000)],
        [number / 10 for number in range(5000)],
        *([number << shift for number in range(5000)] for shift in range(1, 48)),
    ],
)
def test_numbers_that_nobody_chose_are_keys(keys: Iterable[object]) -> None:
    value = dict.fromkeys(keys)
    assert parse_pickle(pickle.dumps(value, 4), where="test").value == value
    assert parse_pickle(pickle.dumps(set(value), 4), where="test").value == set(value)


def test_large_numbers_are_keys() -> None:
    keys = [1 << 63, -(1 << 100), 0, -1, -2, (1 << 61) - 1, True]
    assert parse_pickle(pickle.dumps(dict.fromkeys(keys), 4), where="test").value == dict.fromkeys(keys)


def test_slices_that_hold_no_numbers_are_objects() -> None:
    value = parse_pickle(b"c__builtin__\nslice\n]NN\x87R.", where="test").value
    assert isinstance(value, Stub)
    assert parse_pickle(pickle.dumps(slice(1, None, -2), 4), where="test").value == slice(1, None, -2)
