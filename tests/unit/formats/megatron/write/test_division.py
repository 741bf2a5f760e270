"""What a layout has to divide; that Megatron agrees is tested by tests/integration/megatron/test_megatron_load.py."""

from __future__ import annotations

import re

import pytest

from ucp.errors import TopologyError

LAYOUTS = ("torch_dist", "torch")


@pytest.fixture
def source(fake_legacy, tmp_path):
    """A model of 4 layers, 4 heads, 16 rows of vocabulary, without an optimizer."""

    def make(kind: str, **options: object):
        return fake_legacy(kind=kind, optimizer="none", **options).save(tmp_path / "a")

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_reason_is_told_at_once(layout, source, to_megatron, tmp_path):
    src = source("mixtral")
    given = {"num_attention_heads": 8, "num_query_groups": 2, "group_query_attention": "true"}
    with pytest.raises(TopologyError) as caught:
        to_megatron(src, tmp_path / "b", "tp=3,pp=3,ep=3,etp=1,vpp=2,dp=2", layout, **given)
    for reason in (
        "heads: tp=3 .*num_attention_heads=8",
        "groups of queries: num_query_groups=2 .*tp=3",
        r"dims: tp=3 .*decoder\.layers\.{layer}\.self_attention\.linear_",
        r"experts: ep=3 .*\b4$",
        r"layers: 3 stages of 2 chunks .*\b4$",
        "vocabulary: tp=3 .*padded_vocab_size=",
    ):
        assert re.search(rf"(?m)^  {reason}", str(caught.value)), reason
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_experts_without_experts(layout, source, to_megatron, tmp_path):
    src = source("gpt")
    with pytest.raises(TopologyError, match=r"\n  experts: ep=2, "):
        to_megatron(src, tmp_path / "b", "ep=2,dp=2", layout)


def test_groups_that_share_ranks(source, to_megatron, tmp_path):
    """Fewer groups than ranks are cut through, by 0.16 and later: not refused."""
    src = source("gpt")
    given = {"num_attention_heads": 4, "num_query_groups": 2, "group_query_attention": "true"}
    to_megatron(src, tmp_path / "b", "tp=4", **given)
    to_megatron(src, tmp_path / "c", "tp=4", **{**given, "group_query_attention": "false"})


def test_the_vocabulary_of_the_run(source, to_megatron, tmp_path):
    src, rows = source("gpt"), 16
    with pytest.raises(TopologyError, match=rf"padded_vocab_size={rows + 2};.*={rows + 4}"):
        to_megatron(src, tmp_path / "a2", "tp=4", padded_vocab_size=rows + 2)
    more = to_megatron(src, tmp_path / "b", "tp=4", padded_vocab_size=rows + 4)
    assert any(f"fills rows {rows} to {rows + 3} with zeros" in note for note in more.notes)
    fewer = to_megatron(src, tmp_path / "c", "tp=4", padded_vocab_size=rows - 4)
    assert any(f"drops rows {rows - 4} to {rows - 1}" in note for note in fewer.notes)


def test_the_vocabulary_of_legacy_files(source, to_megatron, tmp_path):
    src = source("gpt")
    with pytest.raises(TopologyError, match=r"padded_vocab_size=64, .*16 rows; torch_dist"):
        to_megatron(src, tmp_path / "b", "tp=4", "torch", padded_vocab_size=64)


@pytest.mark.parametrize(("layout", "otherwise"), [("torch_dist", "adds rows of zeros"), ("torch", "does not load")])
def test_padding_that_the_run_would_choose_otherwise(layout, otherwise, source, to_megatron, tmp_path):
    src = source("gpt")
    report = to_megatron(src, tmp_path / "b", "tp=4", layout, make_vocab_size_divisible_by=32)
    assert any("--make-vocab-size-divisible-by 4" in note and otherwise in note for note in report.notes)
