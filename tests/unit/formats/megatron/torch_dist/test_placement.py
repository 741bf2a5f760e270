"""Layouts that arguments and rules give, where they give them, and pieces that are others."""

from __future__ import annotations

import pytest
from ucp_formats.megatron.torch_dist.states import BucketRange

from ucp.core.index import Index
from ucp.core.layout import Layout

EMBEDDING, NORM, QKV = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "decoder.layers.1.self_attention.linear_qkv.weight",
)


def laid(index: Index, name: str) -> dict[str, str]:
    return {
        own.axis: f"{own.pattern.name}{getattr(own.pattern, 'owner', '')}" for own in index.atoms[name].layout.all_axes
    }


def saved(run, tmp_path, **arguments):
    """The folder of a run with other arguments."""
    for key, value in arguments.items():
        setattr(run.common["args"], key, value)
    run.weights()
    run.full()
    return run.save(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"pipeline_model_parallel_layout": "Et|tL"},
        {"pipeline_model_parallel_size": 7},
        {"pipeline_model_parallel_size": 100_000},
        {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3},
    ],
)
def test_stages_that_the_arguments_do_not_deal_out(fake, read, tmp_path, arguments):
    index = read(saved(fake(tp=2), tmp_path, **{"pipeline_model_parallel_size": 2, **arguments}))
    assert laid(index, QKV) == {"tp": "shard(dim=0)"}


def test_nothing_is_stated_without_arguments(fake, read, tmp_path):
    run = fake(tp=2)
    run.weights()
    run.full()
    run.common["args"] = None
    index = read(run.save(tmp_path))
    assert {atom.layout for atom in index.atoms.values()} == {Layout()}


@pytest.mark.parametrize("tp", [2, 100_000])
def test_pieces_that_no_rank_of_the_arguments_held(fake, read, contents, tmp_path, tp):
    run = fake()
    index = read(saved(run, tmp_path, tensor_model_parallel_size=tp))
    (note,) = (own for own in index.notes if ".metadata" in own)
    assert QKV in note
    assert index.atoms[QKV].layout == Layout()
    assert set(contents(index)) == set(run.truth)


def test_a_share_is_of_the_bucket_with_its_padding():
    own = BucketRange(start=64, stop=300, bucket=300, edges=frozenset({64, 192}))
    assert own.find_share(2, multiple=128) == 192
    assert own.find_share(2, multiple=2) is None  # a share of 150 elements ends within a stretch
    assert own.find_share(7, multiple=2) is None
    assert BucketRange(start=0, stop=0, bucket=0, edges=frozenset()).find_share(2, multiple=128) is None


def test_stages_and_copies(fake, read, tmp_path):
    run = fake()
    degrees = {"pipeline_model_parallel_size": 2, "data_parallel_size": 3}
    index = read(saved(run, tmp_path, **degrees))
    assert laid(index, EMBEDDING) == {"pp": "unique0", "dp": "replicate"}
    assert laid(index, NORM) == laid(index, QKV) == {"pp": "unique1", "dp": "replicate"}
