"""Who is in which optimizer group, by Megatron's rule."""

import pytest
from ucp_formats.megatron.groups import SavedGroup, assign_params

DECAYED, PLAIN = {"wd_mult": 1.0}, {"wd_mult": 0.0}
E = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
SHAPES = {
    "embedding.word_embeddings.weight": (8, 4),
    "decoder.layers.0.input_layernorm.weight": (4,),
    "decoder.layers.0.self_attention.linear_qkv.bias": (12,),
    E: (6, 4),
    "output_layer.weight": (8, 4),
}
MATRICES = ("embedding.word_embeddings.weight", E, "output_layer.weight")
VECTORS = tuple(name for name, shape in SHAPES.items() if len(shape) == 1)


def members(*hyper, shapes=SHAPES, chains=None):
    groups = [SavedGroup(chain=None, hyper=own) for own in hyper]
    found, left = assign_params(groups, shapes, chains or {})
    return [group.params for group in found], left


def test_a_decoupled_learning_rate():
    apart = {"wd_mult": 1.0, "is_decoupled_lr": True}
    assert members(DECAYED, PLAIN, apart) == (
        [(E,), VECTORS, ("embedding.word_embeddings.weight", "output_layer.weight")],
        [],
    )


def test_decay_out_of_the_weight_decay_itself():
    assert members({"weight_decay": 0.1}, {"weight_decay": 0.0}) == ([MATRICES, VECTORS], [])


def test_what_fits_two_groups_is_left():
    found, left = members(DECAYED, {**DECAYED, "lr": 1}, PLAIN)
    assert left == list(MATRICES)
    assert found == [(), (), VECTORS]


def test_groups_that_say_the_same_are_one():
    # optimizer.py of megatron-core 0.16.1, _filter_and_reorder_param_groups: groups that differ in max_lr alone get one
    # and the same saved group when they are loaded
    assert members(DECAYED, PLAIN, DECAYED) == ([MATRICES, VECTORS, ()], [])


@pytest.mark.parametrize("chain", [0, 1])
def test_a_known_optimizer_decides(chain):
    groups = [SavedGroup(chain=0, hyper={"wd_mult": 1.0}), SavedGroup(chain=1, hyper={"wd_mult": 1.0})]
    found, left = assign_params(groups, {E: (2, 2)}, {E: chain})
    assert left == []
    assert found[chain].params == (E,)
