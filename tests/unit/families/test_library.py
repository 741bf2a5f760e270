from __future__ import annotations

import re
from pathlib import Path

import pytest
from ucp_patterns.replicate import Replicate

from ucp.contract import registry
from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import choose_family, families, family, library
from ucp.errors import FamilyError, MisfitError, UnknownFamilyError, UsageError
from ucp.families.library import Library, choose
from ucp.families.toml.family import read_family

RULE = '[[rule]]\nname = "own.{layer}.w"\ntp = "replicate"\n'
SOME_NUMBERS = {"layer": 1, "expert": 2, "mtp": 0}


def names_of(name: str, style: str = "mcore") -> list[str]:
    """A name of every rule, where the style has one."""
    own = family(name).bind(arguments={"num_layers": 4, "swiglu": bool(family(name).constants.get("gated", 1))})
    canonical = dict.fromkeys(rule.name.filled(SOME_NUMBERS) for rule in own.rules)
    return [each for one in canonical for _, way in own.find_spellings(one, style)[:1] for each in way]


def library_of(**texts: str) -> Library:
    return Library(lambda name: Replicate, {name: (f"{name}.toml", text) for name, text in texts.items()})


STYLES = ("mcore", "te", "torch_dist", "torch_dist_layers", "torch_dist_singleton")


@pytest.mark.parametrize(
    ("name", "style"),
    [(name, style) for at, name in enumerate(families()) for style in (STYLES[0], *STYLES[1 + at % 2 :: 2])],
)
def test_a_family_is_recognised_by_its_names(name, style):
    found, reasons = choose_family(names=names_of(name, style))
    assert found.name == name
    assert any(reason.startswith("has ") for reason in reasons)


@pytest.mark.parametrize("name", [own for own in families() if own != "mcore-gpt"])
def test_and_by_those_of_hugging_face(name):
    assert choose_family(names=names_of(name, "huggingface"), arguments={"num_hidden_layers": 4})[0].name == name


def test_a_model_whose_feed_forward_has_no_gate_is_no_llama() -> None:
    """Arcee: the names of a Llama, but for `gate_proj`."""
    below = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj")
    parts = (*below, "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    names += [f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in parts]
    with pytest.raises(UnknownFamilyError):
        choose_family(names=names)
    assert choose_family(names=[*names, "model.layers.0.mlp.gate_proj.weight"])[0].name == "llama"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope"}, "llama"),
        ({"normalization": "LayerNorm"}, "mcore-gpt"),
        ({"swiglu": False}, "mcore-gpt"),
    ],
)
def test_recorded_arguments_speak_against_a_family(arguments, found):
    own, reasons = choose_family(names=names_of("llama"), arguments=arguments)
    assert own.name == found
    if found == "llama":
        assert "normalization = 'RMSNorm'" in reasons


def test_several_families_are_not_guessed():
    own = library_of(a=f'name = "a"\n{RULE}', b=f'name = "b"\n{RULE}')
    with pytest.raises(UnknownFamilyError, match=r"families a, b; .*--family"):
        choose(own.concrete(), names=["own.0.w"], shapes={}, arguments={}, axes={})


def test_the_special_one_is_preferred_at_any_remove():
    own = library_of(
        a=f'name = "a"\n{RULE}', b=f'name = "b"\nkind_of = ["a"]\n{RULE}', c=f'name = "c"\nkind_of = ["b"]\n{RULE}'
    )
    assert choose(own.concrete(), names=["own.0.w"], shapes={}, arguments={}, axes={})[0].name == "c"


def test_only_likely_families_are_read_the_special_ones_first():
    wrong = '[[rule]]\nname = "{"\n'
    own = library_of(
        a=f'name = "a"\n{RULE}',
        b=f'name = "b"\nkind_of = ["a"]\n{RULE}',
        c=f'name = "c"\nkind_of = ["b"]\n[evidence]\narguments = {{ gated = true }}\n{wrong}',
        d=f'name = "d"\nabstract = true\n{wrong}',
    )
    assert [family.name for family in own.likely({"gated": False})] == ["b", "a"]
    with pytest.raises(UsageError, match=r"c.toml: rule\[0\]"):
        list(own.likely({}))


def test_evidence_that_is_absent():
    text = 'name = "a"\n[evidence]\nnames = ["own.{layer}.w"]\nabsent = ["own.{layer}.b"]\n'
    own = library_of(a=text + RULE + '[[rule]]\nname = "own.{layer}.b"\ntp = "replicate"')
    assert choose(own.concrete(), names=["own.0.w"], shapes={}, arguments={}, axes={})[0].name == "a"
    with pytest.raises(UnknownFamilyError, match=r"a: .*own\.\{layer\}\.b"):
        choose(own.concrete(), names=["own.0.w", "own.0.b"], shapes={}, arguments={}, axes={})


class TestLibrary:
    def test_a_name_that_is_not_there(self):
        with pytest.raises(UsageError, match=rf" {', '.join(families())}; got 'LLaMa'; .*'llama'"):
            family("LLaMa")

    def test_a_part_of_families_cannot_be_chosen(self):
        assert library().family("mcore-mla").abstract
        with pytest.raises(UsageError, match="'mcore-mla' is only"):
            library().get_concrete("mcore-mla")
        with pytest.raises(UsageError, match="'mcore-mla' is only"):
            choose_family(names=["a"], options=SourceOptions(family="mcore-mla"))

    def test_what_is_extended_must_be_there(self):
        with pytest.raises(UsageError, match=r"got 'b' \(extended by 'a'\)"):
            library_of(a='name = "a"\nextends = ["b"]').family("a")

    def test_a_circle_is_told(self):
        own = library_of(a='name = "a"\nextends = ["b"]', b='name = "b"\nextends = ["a"]')
        with pytest.raises(UsageError, match="a -> b -> a"):
            own.family("a")

    def test_two_files_of_one_name(self, tmp_path, monkeypatch):
        for package in ("first", "second"):
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").touch()
            (tmp_path / package / "x.toml").write_text(f'name = "x"\n{RULE}')
        monkeypatch.syspath_prepend(tmp_path)
        assert Library.from_packages(["first"], lambda name: Replicate).names() == ("x",)
        with pytest.raises(UsageError, match=r"'x' .*first/x\.toml .*second/x\.toml"):
            Library.from_packages(["first", "second"], lambda name: Replicate)


class TestOfTheUser:
    def file(self, folder: Path, text: str) -> Path:
        path = folder / "my.toml"
        path.write_text(text)
        return path

    def test_a_file_of_rules_is_the_family(self, tmp_path):
        path = self.file(tmp_path, 'name = "mine"\nextends = ["llama"]\n' + RULE)
        own, reasons = choose_family(names=[], options=SourceOptions(patterns=path), arguments={"num_layers": 9})
        assert (own.name, own.values["layers"]) == ("mine", 9)
        assert [reason.endswith(f"--patterns {path}") for reason in reasons] == [True]
        assert own.canonical("own.3.w") == "own.3.w"
        assert own.canonical("model.norm.weight") == "decoder.final_layernorm.weight"

    def test_a_family_that_says_otherwise_than_the_checkpoint_is_refused(self, tmp_path):
        """A gated model cut as one that is not would be silently wrong, though every name has a rule."""
        arguments = {"swiglu": True}
        with pytest.raises(MisfitError, match=r"'gpt': gated is 0 .*, 1 .*\(swiglu "):
            choose_family(names=[], arguments=arguments, options=SourceOptions(family="gpt"))
        shapes = {"decoder.layers.0.mlp.linear_fc1.weight": (8, 4), "decoder.layers.0.mlp.linear_fc2.weight": (4, 4)}
        with pytest.raises(MisfitError, match=r"'gpt': gated is 0 .*, 1 "):
            choose_family(names=[], shapes=shapes, options=SourceOptions(family="gpt"))
        own = self.file(tmp_path, 'name = "mine"\nextends = ["gpt"]')
        assert choose_family(names=[], arguments=arguments, options=SourceOptions(patterns=own))[0].values["gated"] == 0

    def test_a_name_that_is_taken(self, tmp_path):
        with pytest.raises(UsageError, match=r"my\.toml: .*'llama' .*ucp_patterns/families/llama\.toml"):
            library().with_file(self.file(tmp_path, 'name = "llama"'))

    def test_rules_in_place_of_known_ones_are_named(self, tmp_path):
        text = 'name = "own"\nextends = ["llama"]\n[[rule]]\nname = "{}"\ntp = {}\n'
        fc1, extra = "decoder.layers.{layer}.mlp.linear_fc1.weight", "decoder.layers.{layer}.extra"
        lie = self.file(tmp_path, text.format(fc1, '{ pattern = "shard", dim = 0 }'))
        _, (why,) = choose_family(names=[], options=SourceOptions(patterns=lie))
        assert f"in place of known ones for {fc1}: a mistake" in why
        more = self.file(tmp_path, text.format(extra, '"replicate"'))
        _, (why,) = choose_family(names=[], options=SourceOptions(patterns=more))
        assert why.endswith(f"--patterns {more}")


def test_the_file_in_the_manual_is_one():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "families.md").read_text()
    text = re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1]
    own = read_family(text, "families.md", pattern=library().pattern, extended=[family("llama")])
    sizes = {"num_attention_heads": 8, "num_query_groups": 2, "kv_channels": 4, "group_query_attention": True}
    own = own.bind(arguments={"num_experts": 4, "moe_ffn_hidden_size": 6, **sizes}, axes={"ep": 2})
    names = ["decoder.layers.0.fused_qkv.weight", "decoder.layers.0.experts.weight"]
    qkv, experts = own.match(names).values()
    (axis,) = qkv.layout(axes={"tp": 8}, global_shape=(48, 3)).axes
    assert axis.pattern.name == "shard(dim=0, blocks=[32, 8, 8], copies=[1, 4, 4])"
    layout = experts.layout(axes={"tp": 2, "ep": 2}, global_shape=(24, 3))
    assert [each.axis for each in layout.axes] == ["ep", "tp"]
    assert layout.axes[1].pattern.name == "shard(dim=0, blocks=[6], repeat=2)"


class TestFilesThatAreNone:
    """What cannot be a rules file is refused at once, whatever it is."""

    @pytest.mark.parametrize(
        ("content", "fact"),
        [
            (b"\xff\xfe", "byte 0 .*UTF-8"),
            (b'name="x"\ntitle="x"\nx=' + b"[" * 5000 + b"]" * 5000, "recursion"),
            (b"#" * (5 << 20), "4,194,304 bytes"),
        ],
        ids=["binary", "nested", "long"],
    )
    def test_content(self, tmp_path, content, fact):
        (tmp_path / "rules.toml").write_bytes(content)
        with pytest.raises(UsageError, match=fact):
            library().with_file(tmp_path / "rules.toml")

    @pytest.mark.parametrize("path", ["/dev/zero", "/", "/nowhere.toml"])
    def test_place(self, path):
        with pytest.raises(UsageError, match=rf" {path}; "):
            library().with_file(Path(path))


def test_a_rule_that_makes_too_many_pieces_is_refused(tmp_path):
    """Each axis alone is within bounds; composed, they are not."""
    cut = '{ pattern = "shard", dim = 0, blocks = ["dim / 512"], repeat = "512" }'
    text = f'name = "a"\n[[rule]]\nname = "own.{{layer}}.w"\nep = {cut}\ntp = {cut}\nmeaning = "x"'
    (tmp_path / "a.toml").write_text(text)
    library, name = registry.library().with_file(tmp_path / "a.toml")
    own = library.family(name).bind(arguments={}, shapes={}, axes={"tp": 2, "ep": 2})
    (match,) = own.match(["own.0.w"]).values()
    match.layout(axes={"tp": 2}, global_shape=(2048, 2))
    with pytest.raises(FamilyError, match="65,536 pieces"):
        match.layout(axes={"tp": 2, "ep": 2}, global_shape=(2048, 2))
