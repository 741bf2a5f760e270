from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ucp_patterns.partial import Partial
from ucp_patterns.replicate import Replicate
from ucp_patterns.shard import Shard

from ucp.families.infer import Certainty, Compared, Observed, Proposal, as_toml, proposed, template_of
from ucp.families.toml.family import read_family

PATTERNS = {"shard": Shard, "replicate": Replicate, "partial": Partial}


def seen(*shapes, compared=Compared.DIFFERENT, name="layers.0.mlp.up.weight", cut=None, axis="tp"):
    return Observed(name=name, axis=axis, shapes=shapes, compared=compared, cut=cut)


def decided(*observed, siblings=(), **arguments) -> tuple[str, str]:
    found = proposed(observed, arguments, siblings)
    return found.pattern, found.certainty.value


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("decoder.layers.3.mlp.weight", "decoder.layers.{layer}.mlp.weight"),
        ("layers.3.local_experts.7.w1", "layers.{layer}.local_experts.{expert}.w1"),
        ("transformer.h.11.attn.weight", "transformer.h.{layer}.attn.weight"),
        ("5.attention.0.weight", "{number}.attention.{number_x}.weight"),
        ("linear_fc1.weight", "linear_fc1.weight"),
    ],
)
def test_numbers_are_left_open(name, template):
    assert template_of(name) == template


class TestParts:
    def test_equal_parts_are_copies(self):
        assert decided(seen((4,), (4,), compared=Compared.EQUAL)) == ('"replicate"', "sure")

    def test_one_value_everywhere_says_nothing(self):
        assert decided(seen((4,), (4,), compared=Compared.CONSTANT)) == ("", "open")

    def test_one_layer_that_is_equal_speaks_for_those_of_one_value(self):
        both = seen((4,), (4,), compared=Compared.CONSTANT), seen((4,), (4,), compared=Compared.EQUAL)
        assert decided(*both) == ('"replicate"', "sure")

    def test_layers_that_disagree_are_left_open(self):
        both = seen((4,), (4,)), seen((4,), (4,), compared=Compared.EQUAL)
        assert decided(*both) == ("", "open")

    def test_copies_that_drifted_apart_are_averaged(self):
        assert decided(seen((4,), (4,), compared=Compared.CLOSE)) == ('"partial"', "likely")

    def test_a_single_part_says_nothing(self):
        assert decided(seen((4, 4), compared=Compared.ALONE)) == ("", "open")

    def test_uneven_parts_tell_the_dim(self):
        assert decided(seen((4, 3), (4, 2))) == ('{ pattern = "shard", dim = 1 }', "sure")

    def test_a_vector_has_one_dim(self):
        assert decided(seen((4,), (4,))) == ('{ pattern = "shard", dim = 0 }', "likely")

    @pytest.mark.parametrize(("shape", "dim"), [((12, 8), 0), ((8, 12), 1)])
    def test_the_hidden_state_is_not_cut(self, shape, dim):
        assert decided(seen(shape, shape), hidden_size=8) == (f'{{ pattern = "shard", dim = {dim} }}', "likely")

    @pytest.mark.parametrize(("module", "dim"), [("o_proj", 1), ("q_proj", 0), ("linear_fc2", 1), ("lm_head", 0)])
    def test_names_speak_last(self, module, dim):
        own = seen((8, 8), (8, 8), name=f"layers.1.{module}.weight")
        assert decided(own, hidden_size=8) == (f'{{ pattern = "shard", dim = {dim} }}', "guess")

    def test_what_nothing_tells_is_left_open(self):
        assert decided(seen((8, 8), (8, 8), name="layers.0.mystery.weight"), hidden_size=8) == ("", "open")

    @pytest.mark.parametrize(("gated", "certainty"), [(True, "likely"), (False, "guess")])
    def test_twice_as_long_as_its_sibling_is_a_gate(self, gated, certainty):
        down = seen((8, 6), (8, 6), name="layers.0.mlp.down.weight")
        found = decided(seen((12, 8), (12, 8)), siblings=[down], hidden_size=8, swiglu=gated)
        assert found == ('{ pattern = "shard", dim = 0, blocks = ["dim / 2", "dim / 2"] }', certainty)

    def test_but_not_in_attention(self):
        out = seen((8, 6), (8, 6), name="layers.0.attention.out.weight")
        own = seen((12, 8), (12, 8), name="layers.0.attention.qkv.weight")
        assert decided(own, siblings=[out], hidden_size=8, swiglu=True)[0] == '{ pattern = "shard", dim = 0 }'


class TestPieces:
    @pytest.mark.parametrize(
        ("cut", "pattern"),
        [
            ((0, 0), '"replicate"'),
            ((1, 1), '{ pattern = "shard", dim = 1 }'),
            ((0, 2), '{ pattern = "shard", dim = 0, blocks = ["dim / 2", "dim / 2"] }'),
        ],
    )
    def test_recorded_boxes_tell(self, cut, pattern):
        assert decided(seen((8, 8), compared=Compared.ALONE, cut=cut)) == (pattern, "likely")

    def test_layers_cut_in_different_ways_are_left_open(self):
        assert decided(seen((8, 8), cut=(0, 1)), seen((8, 8), cut=(1, 1))) == ("", "open")


class TestFile:
    def file(self, *proposals: Proposal, extends=()) -> str:
        return as_toml("mine", proposals, source='a "b"\n[x]', extends=extends)

    def made(self, text: str):
        return read_family(text, "my.toml", pattern=PATTERNS.__getitem__)

    def test_it_is_a_rules_file(self):
        rules = [
            proposed([seen((12, 8), (12, 8))], {"hidden_size": 8}),
            proposed([seen((4,), (4,), compared=Compared.EQUAL, name="norm.weight")], {}),
            proposed([seen((4, 4), (4, 4), name="experts.3.x", axis="etp", compared=Compared.CLOSE)], {}),
        ]
        family = self.made(self.file(*rules))
        assert {str(rule.name): str(rule.axes[0]) for rule in family.rules} == {
            "layers.{layer}.mlp.up.weight": "tp: shard(dim=0)",
            "norm.weight": "tp: replicate",
            "experts.{expert}.x": "etp: partial",
        }

    def test_what_is_open_is_no_rule(self):
        own = proposed([seen((4, 4), compared=Compared.ALONE)], {})
        text = self.file(own)
        assert '# tp = "..."' in text
        assert self.made(text).rules == ()

    def test_it_says_how_sure_it_is_and_why(self):
        text = self.file(proposed([seen((12, 8), (12, 8))], {"hidden_size": 8}))
        assert "# likely: dim 1 is hidden_size, 8, the other is not; parts of [[12, 8], [12, 8]] (1 tensor)" in text

    @given(st.text(max_size=12), st.text(max_size=12))
    def test_any_name_is_quoted(self, name, source):
        own = Proposal(template=name, axis="tp", pattern='"replicate"', certainty=Certainty.SURE, why=source, count=1)
        document = tomllib.loads(as_toml("mine", [own], source=source, extends=[name]))
        assert document["rule"][0]["name"] == name
