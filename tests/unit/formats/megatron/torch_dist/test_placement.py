"""Layouts that arguments and rules give, where they give them, and pieces that are others."""

from __future__ import annotations

import pytest
from ucp_formats.megatron.torch_dist.states import BucketRange

from tests.unit.formats.megatron.torch_dist.conftest import KeptDist, read
from ucp.core.layout import Layout

QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    "arguments",
    [
        {"pipeline_model_parallel_layout": "Et|tttL"},
        {"pipeline_model_parallel_size": 7},
        {"pipeline_model_parallel_size": 100_000},
        {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 5},
    ],
)
def test_stages_that_the_arguments_do_not_deal_out(full, tmp_path, arguments):
    full.arguments.update(arguments)
    assert read(full.save(tmp_path)).atoms[QKV].patterns.keys() == {"tp", "dp"}


def test_nothing_is_stated_without_arguments(full, tmp_path):
    full.common["args"] = None
    assert {atom.layout for atom in read(full.save(tmp_path)).atoms.values()} == {Layout()}


@pytest.mark.parametrize("tp", [2, 100_000])
def test_pieces_that_no_rank_of_the_arguments_held(tmp_path, tp):
    run = KeptDist("gpt-dp4-dp")
    run.arguments["tensor_model_parallel_size"] = tp
    index = read(run.save(tmp_path))
    (note,) = (note for note in index.notes if ".metadata" in note)
    assert QKV in note
    assert index.atoms[QKV].layout == Layout()


def test_a_share_is_of_the_bucket_with_its_padding():
    own = BucketRange(start=64, stop=300, bucket=300, edges=frozenset({64, 192}))
    assert own.find_share(2, multiple=128) == 192
    assert own.find_share(2, multiple=2) is None  # a share of 150 elements ends within a stretch
    assert own.find_share(7, multiple=2) is None
    assert BucketRange(start=0, stop=0, bucket=0, edges=frozenset()).find_share(2, multiple=128) is None
