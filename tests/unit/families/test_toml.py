from __future__ import annotations

import pytest
from ucp_patterns.replicate import Replicate
from ucp_patterns.shard import Shard

from ucp.core.layout import AxisLayout, Layout
from ucp.errors import UsageError
from ucp.families.toml.family import read_family, read_header

PATTERNS = {"shard": Shard, "replicate": Replicate}

BASE = """
name = "base"
abstract = true
order = ["decoder.layers.{layer}.a"]
[sizes]
half = ["width / 2", "b[0] / 2"]
[given]
gated = true
[tensors]
b = "layers.{layer}.b"
[style.other]
like = "mcore"
[[rule]]
name = "layers.{layer}.a"
tp = "replicate"
alias = { other = "block.{layer}.a" }
[[rule]]
name = "layers.{layer}.b"
tp = { pattern = "shard", dim = 0, blocks = ["half", "half"] }
"""


def pattern(name: str):
    if name not in PATTERNS:
        raise UsageError(f"expected one of the patterns; got {name!r}")
    return PATTERNS[name]


def family(text: str, *extended):
    return read_family(text, "my.toml", pattern=pattern, extended=extended)


def test_a_family_is_what_its_text_says():
    base = family(BASE)
    assert (base.name, base.abstract, base.constants) == ("base", True, {"gated": 1})
    assert [str(rule.name) for rule in base.rules] == ["layers.{layer}.a", "layers.{layer}.b"]
    assert [str(axis) for axis in base.rules[1].axes] == ["tp: shard(dim=0, blocks=[half, half])"]
    bound = base.bind(arguments={"width": 8})
    layout = bound.match(["layers.3.b"])["layers.3.b"].layout(axes={"tp": 2}, global_shape=(8, 3))
    assert layout == Layout((AxisLayout("tp", 2, Shard(0, (4, 4))),))


def test_a_rule_of_the_same_template_replaces():
    text = 'name = "own"\n[[rule]]\nname = "layers.{layer}.b"\ntp = "replicate"\n[[rule]]\nname = "c"\ntp = "replicate"'
    own = family(text, family(BASE))
    assert [str(rule.name) for rule in own.rules] == ["layers.{layer}.a", "layers.{layer}.b", "c"]
    assert own.rules[1].axes[0].pattern == "replicate"
    assert (own.rules[0].source, own.rules[1].source) == ("base", "own")
    assert own.constants == {"gated": 1}
    assert not own.abstract


def test_rules_can_be_dropped():
    own = family('name = "own"\ndrop = ["layers.{layer}.b"]', family(BASE))
    assert [str(rule.name) for rule in own.rules] == ["layers.{layer}.a"]


def test_what_every_layer_has_is_inherited_without_what_is_dropped():
    parent = family('name = "p"\nabstract = true\nrequired = ["layers.{layer}.a", "layers.{layer}.b"]', family(BASE))
    assert family('name = "own"', parent).required == ("layers.{layer}.a", "layers.{layer}.b")
    assert family('name = "own"\ndrop = ["layers.{layer}.b"]', parent).required == ("layers.{layer}.a",)
    assert family('name = "own"\nrequired = []', parent).required == ()


def test_aliases_can_be_added_to_rules_that_are_extended():
    text = 'name = "own"\n[alias.other]\n"layers.{layer}.b" = { names = ["x.{layer}", "y.{layer}"], groups = "2" }'
    own = family(text, family(BASE))
    assert own.canonical("x.4") == "layers.4.b"
    assert own.find_spelling("layers.4.b", "other")[1] == ("x.4", "y.4")
    assert own.to_style("layers.4.a", "other") == "block.4.a"


def test_rules_can_be_repeated_under_another_name():
    text = """
    name = "own"
    [limits]
    layer = "half"
    [[repeat]]
    rules = "layers.{layer}."
    as = "extra.{extra}.layer."
    other = { "block.{layer}." = "block.{extra+=half}." }
    """
    own = family(text, family(BASE)).bind(arguments={"width": 8})
    assert [own.canonical(f"block.{number}.a") for number in (3, 4)] == ["layers.3.a", "extra.0.layer.a"]
    assert own.to_style("extra.2.layer.a", "other") == "block.6.a"
    assert own.match(["extra.2.layer.b"])["extra.2.layer.b"].fields == {"extra": 2}


def test_the_header_is_read_on_its_own():
    document = read_header('name = "x"\nextends = ["a", "b"]', "f")
    assert (document.name, document.extends) == ("x", ("a", "b"))


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("name = ", r"my\.toml: .*Invalid value"),
        ("title = 'x'", r"my\.toml: .*`name`"),
        ("name = 'x'\nnmae = 'y'", "`nmae`"),
        ("name = 'x'\nabstract = 1", r"got `int` - at `\$\.abstract`"),
        ("name = 'x'\norder = 'y'", r"got `str` - at `\$\.order`"),
        ("name = 'x'\nrule = 3", r"got `int` - at `\$\.rule`"),
        ("name = 'x'\n[[rule]]\nname = 'a.{'\ntp = 'replicate'", r"rule\[0\]: .*got 'a\.\{'"),
        ("name = 'x'\n[[rule]]\nname = 'a'\nxp = 'replicate'", r"rule\[0\]: .*`xp`"),
        ("name = 'x'\n[[rule]]\nname = 'a'\ntp = 'shart'", r"rule\[0\]: tp: .*'shart'"),
        ("name = 'x'\n[[rule]]\nname = 'a'\ntp = 3", r"rule\[0\]: .*got `int` - at `\$\.tp`"),
        ("name = 'x'\n[[rule]]\nname = 'a'\ntp = { pattern = 'shard', dim = 'k' }", "tp: dim: Expected `int`"),
        ("name = 'x'\n[[rule]]\nname = 'a'\ntp = { pattern = 'shard', dim = -3 }", "tp: dim: Expected `int` >= 0"),
        (
            "name = 'x'\n[[rule]]\nname = 'a'\ntp = { pattern = 'shard', dim = 0, blocks = ['1 +'] }",
            r"rule\[0\]: tp: .*got '1 \+'",
        ),
        (
            "name = 'x'\n[[rule]]\nname = 'a'\ntp = { pattern = 'shard', dm = 0 }",
            r"rule\[0\]: tp: .*'shard' .*'dim'",
        ),
        (
            "name = 'x'\n[[rule]]\nname = 'a'\ntp = { pattern = 'shard', dim = 0, blocks = ['wdith'] }",
            r"\[given\], for a; got \['wdith'\]",
        ),
        ("name = 'x'\n[[rule]]\nname = 'a'\nwhen = 'a b'\ntp = 'replicate'", r"rule\[0\]: .*'a b'"),
        ("name = 'x'\n[[rule]]\nname = 'a'\npadded = true\ntp = 'replicate'", r"got `bool` - at `\$\.padded`"),
        (
            "name = 'x'\n[[rule]]\nname = 'a'\ntp = 'replicate'\nalias = { te = 'b' }",
            r"styles .*for a; got \['te'\]",
        ),
        ("name = 'x'\n[style.a]\nlike = 'b'", r"style: a: like: .*\['b'\]"),
        ("name = 'x'\n[given]\na = 'b'", r"got `str` - at `\$\.given"),
        ("name = 'x'\nrequired = ['a']", r"required: .*\['a'\]"),
        ("name = 'x'\ndrop = ['a']", r"drop: .*\['a'\]"),
        ("name = 'x'\n[alias.te]\na = 'b'", r"alias: .*\['a'\]"),
        ("name = 'x'\n[alias.te]\na = 'b{'", r"alias: te: a: .*'b\{'"),
        ("name = 'x'\n[evidence]\nname = ['a']", r"`name` - at `\$\.evidence`"),
        ("name = 'x'\n[[tied]]\nname = 'a'", r"`to` - at `\$\.tied\[0\]`"),
        ("name = 'x'\n[[repeat]]\nrules = 'a'", r"repeat: .*\{'rules': 'a'\}"),
        ("name = 'x'\n[style.a]\nlike = 'a'", r"style: a: like: .*\['a', 'a'\]"),
        ("name = 'x'\n[style.a]\nlike = 'b'\n[style.b]\nlike = 'a'", r"style: a: like: .*\['a', 'b', 'a'\]"),
        ("name = 'x'\n[sizes]\na = 'min()'", r"for min\(\) "),
        (f"name = 'x'\n[given]\na = {'9' * 5000}", r"my\.toml: .*digits"),
        (f"name = 'x'\n[given]\na = 0x{'f' * 5000}", r"at `\$\.given"),
        ("name = 'x'\n[[rule]]\nname = 'a'\n[[repeat]]\nrules = 'a'\nas = '{'", r"got '\{'"),
        (
            "name = 'x'\n[[rule]]\nname = 'a'\n[rule.alias]\nmcore = { name = 'b', order = [0, 0] }",
            r"order: .*\[0, 0\]",
        ),
    ],
)
def test_mistakes_are_named_with_their_place(text, facts):
    with pytest.raises(UsageError, match=facts):
        family(text)


def test_names_that_a_style_writes_are_names():
    own = family("name = 'x'\n[[rule]]\nname = 'aaaaaaaaaa'\n[style.s]\nlike = 'mcore'\n[style.s.rewrite]\na = '{'")
    with pytest.raises(UsageError, match=r"my\.toml: style: s: rewrite: a: .*got '.*\{"):
        own.read("a")
