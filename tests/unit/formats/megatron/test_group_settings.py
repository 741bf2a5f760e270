"""What arguments say of groups, each rule as the named release of megatron-core has it.

`tests/integration/megatron/test_megatron_groups.py` asks the releases themselves.
"""

from __future__ import annotations

import pytest
from ucp_formats.megatron.groups import (
    SavedGroup,
    assign_groups,
    assign_params,
    group_rule,
)
from ucp_formats.megatron.modules import with_modules

EMBEDDING, POSITIONS, OUTPUT = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "output_layer.weight",
)
NORM, QKV = "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
Q, K = (f"decoder.layers.0.self_attention.{letter}_layernorm.weight" for letter in "qk")
SHAPES = {EMBEDDING: (8, 4), POSITIONS: (6, 4), NORM: (4,), QKV: (12, 4), Q: (2,), K: (2,), OUTPUT: (8, 4)}
MATRICES = (EMBEDDING, POSITIONS, QKV, OUTPUT)
RATES = {"lr": 1e-3, "min_lr": 1e-4}


def old(wd, **more):
    """A group of megatron-core up to 0.15."""
    return {"wd_mult": wd, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, **more}


def new(wd, *, lr=1e-3, min_lr=1e-4, default=True, **more):
    """A group of megatron-core since 0.16."""
    return {**old(wd), "default_config": default, "max_lr": lr, "min_lr": min_lr, **more}


def dealt(groups, arguments, shapes=SHAPES):
    saved = [SavedGroup(chain=None, hyper=own) for own in groups]
    found, left = assign_params(saved, shapes, {}, group_rule(arguments, groups))
    return [group.params for group in found], left


@pytest.mark.parametrize(
    "asked", [{"apply_wd_to_qk_layernorm": True}, {"no_weight_decay_cond_type": "apply_wd_to_qk_layernorm"}]
)
def test_norms_of_queries_and_keys_decay_where_the_run_asked_for_it(asked):
    # 0.16.1 core/optimizer/__init__.py, get_standard_config_overrides: s1_not_qkln
    decayed = (EMBEDDING, POSITIONS, QKV, Q, K, OUTPUT)
    assert dealt([new(1.0), new(0.0)], {**RATES, **asked}) == ([decayed, (NORM,)], [])


@pytest.mark.parametrize(("by", "decays"), [("local", True), ("transformer_engine", False), (None, False)])
def test_norms_of_latent_queries_have_another_name_in_transformer_engine(by, decays):
    # 0.16.1 core/models/gpt/gpt_layer_specs.py: q_layernorm is IdentityOp, the norm that of linear_q_up_proj
    asked = {"apply_wd_to_qk_layernorm": True, "multi_latent_attention": True, "transformer_impl": by}
    groups, left = dealt([new(1.0), new(0.0)], {**RATES, **asked})
    assert (Q in groups[0], left) == (decays, [])


def test_keys_show_the_modules_where_arguments_do_not():
    asked = {**RATES, "apply_wd_to_qk_layernorm": True, "multi_latent_attention": True}
    for by, decays in (("local", True), ("transformer_engine", False)):
        groups, left = dealt([new(1.0), new(0.0)], dict(with_modules(asked, {"transformer_impl": by})))
        assert (Q in groups[0], left) == (decays, [])
    assert with_modules({}, {"transformer_impl": "local"}) == {}


def test_embeddings_do_not_decay_with_a_deviation_of_their_own_before_0_16():
    # 0.15.3 core/optimizer/__init__.py, _get_param_groups: default_skip_embedding_weight_decay and "embedding" in name;
    # core_v0.15.3 megatron/training/training.py: embedding_init_method_std is not None
    arguments = {**RATES, "embedding_init_method_std": 0.02}
    assert dealt([old(1.0), old(0.0)], arguments) == ([(QKV, OUTPUT), (EMBEDDING, POSITIONS, NORM, Q, K)], [])
    assert dealt([old(1.0), old(0.0)], {**RATES, "embedding_init_method_std": None}) == ([MATRICES, (NORM, Q, K)], [])


@pytest.mark.parametrize("groups", [[new(1.0), new(0.0)], [old(1.0), old(0.0)]])
def test_and_do_since(groups):
    # core_v0.16.1 megatron/training/training.py passes it no more; a run that loaded groups of 0.15 keeps their keys
    arguments = {**RATES, "embedding_init_method_std": 0.02, "apply_wd_to_qk_layernorm": False}
    assert dealt(groups, arguments) == ([MATRICES, (NORM, Q, K)], [])


@pytest.mark.parametrize(("low", "kept"), [(1e-5, 1e-5), (None, 1e-4)])
def test_a_decoupled_rate_since_0_16_shows_in_its_bounds(low, kept):
    # 0.16.1 core/optimizer/__init__.py: max_lr and min_lr overridden, default_config false, is_decoupled_lr stays false
    groups = [new(1.0), new(1.0, lr=5e-4, min_lr=kept, default=False), new(0.0)]
    arguments = {**RATES, "decoupled_lr": 5e-4, "decoupled_min_lr": low}
    assert dealt(groups, arguments) == ([(POSITIONS, QKV), (EMBEDDING, OUTPUT), (NORM, Q, K)], [])


def test_a_decoupled_rate_that_the_run_changed_meanwhile():
    # 0.16.1 core/optimizer/optimizer.py: groups that are loaded keep the bounds they were saved with
    groups = [new(1.0, lr=2e-3), new(1.0, lr=7e-4, default=False), new(0.0, lr=2e-3)]
    assert dealt(groups, {**RATES, "decoupled_lr": 2e-3})[0][1] == (EMBEDDING, OUTPUT)


def test_a_decoupled_rate_before_has_a_mark():
    # 0.15.3 core/optimizer/__init__.py: is_decoupled_lr
    groups = [old(1.0), old(1.0, is_decoupled_lr=True), old(0.0)]
    expected = ([(POSITIONS, QKV), (EMBEDDING, OUTPUT), (NORM, Q, K)], [])
    assert dealt(groups, {**RATES, "decoupled_lr": 5e-4}) == expected


MUP = {**RATES, "use_mup": True, "hidden_size": 48, "mup_base_hidden_size": 16}
THIRD = 1.0 / 3.0


def test_matrices_go_by_the_width():
    # 0.19.2 core/optimizer/__init__.py, get_mup_config_overrides: mup_hidden_and_output
    groups = [new(1.0), new(0.0), new(1.0, lr=1e-3 * THIRD, min_lr=1e-4 * THIRD, default=False)]
    assert dealt(groups, MUP) == ([(EMBEDDING, POSITIONS, OUTPUT), (NORM, Q, K), (QKV,)], [])


def test_vectors_go_by_the_width_with_sgd():
    # 0.19.2, get_mup_config_overrides: is_sgd_optimizer
    groups = [new(1.0), new(1.0, lr=1e-3 * 3.0, default=False), new(0.0, lr=1e-3 * 3.0, default=False)]
    assert dealt(groups, {**MUP, "optimizer": "sgd"}) == ([(QKV,), (EMBEDDING, POSITIONS, OUTPUT), (NORM, Q, K)], [])


def test_a_decoupled_rate_beside_the_width_is_told_by_its_bound():
    # 0.19.2, get_mup_config_overrides: decoupled_lr_enabled; both groups have default_config false
    groups = [
        new(1.0),
        new(1.0, lr=1e-3 * THIRD, min_lr=1e-4 * THIRD, default=False),
        new(1.0, lr=5e-4, default=False),
        new(0.0),
    ]
    found, left = dealt(groups, {**MUP, "decoupled_lr": 5e-4})
    assert (found, left) == ([(POSITIONS,), (QKV,), (EMBEDDING, OUTPUT), (NORM, Q, K)], [])


def test_muon_leaves_vectors_and_ends_to_another_optimizer():
    # 0.19.2 core/optimizer/emerging_optimizers.py, _is_nonlinear_or_embedding; __init__.py: override['optimizer']
    groups = [new(1.0), new(1.0, optimizer="adam"), new(0.0, optimizer="adam")]
    found, left = dealt(groups, {**RATES, "optimizer": "muon"})
    assert (found, left) == ([(POSITIONS, QKV), (EMBEDDING, OUTPUT), (NORM, Q, K)], [])


def test_without_arguments_what_they_decide_stays_open():
    assert dealt([new(1.0), new(0.0)], {}) == ([MATRICES, (NORM,)], [Q, K])
    assert dealt([old(1.0), old(0.0)], {}) == ([(QKV, OUTPUT), (NORM, Q, K)], [EMBEDDING, POSITIONS])
    decoupled = [new(1.0), new(1.0, lr=5e-4, default=False), new(0.0)]
    assert dealt(decoupled, {})[1] == [EMBEDDING, POSITIONS, QKV, Q, K, OUTPUT]


def test_but_not_between_groups_that_are_the_same():
    assert dealt([new(1.0), new(1.0)], {}) == ([tuple(SHAPES), ()], [])


def test_a_condition_that_megatron_does_not_have_leaves_all_open():
    assert dealt([new(1.0), new(0.0)], {**RATES, "no_weight_decay_cond_type": "mine"}) == ([(), ()], list(SHAPES))


def test_groups_that_no_argument_explains_leave_their_candidates_open():
    groups = [new(1.0), new(1.0, lr=5e-4, default=False), new(0.0)]
    assert dealt(groups, RATES) == ([(), (), (NORM, Q, K)], list(MATRICES))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "arguments were not saved"),
        ({"no_weight_decay_cond_type": "mine"}, "not one of Megatron's"),
        (RATES, "fits none of the groups, or several"),
    ],
)
def test_what_stays_open_is_named_with_the_reason(arguments, said):
    saved = [SavedGroup(chain=None, hyper=own) for own in (new(1.0), new(1.0, lr=5e-4, default=False))]
    (entry,) = assign_groups(saved, {Q: SHAPES[Q], K: SHAPES[K]}, arguments).dropped
    first, *lines = entry.split("\n")
    assert said in first
    assert "--ckpt-format torch" in first
    assert lines == [f"  {Q}: [2]", f"  {K}: [2]"]
    assert assign_groups(saved[:1], SHAPES, arguments).dropped == ()


def test_what_was_inferred_says_by_which_arguments():
    asked = {**MUP, "apply_wd_to_qk_layernorm": True, "decoupled_lr": 5e-4}
    note = assign_groups([SavedGroup(chain=None, hyper=new(1.0))], {}, asked).note
    for word in ("biases", "apply_wd_to_qk_layernorm", "decoupled_lr", "use_mup, 3", "no_weight_decay_cond"):
        assert word in note
    groups = [SavedGroup(chain=None, hyper=old(1.0))]
    assert "embedding_init_method_std" in assign_groups(groups, {}, {"embedding_init_method_std": 0.1}).note
    assert "were not saved" in assign_groups([], {}, {}).note


@pytest.mark.parametrize(("steps", "agreed"), [((3, 3, None), 3), ((3, 4), None), ((3, 3.0), None), ((None,), None)])
def test_the_step_that_all_groups_have(steps, agreed):
    groups = [SavedGroup(chain=None, hyper={} if step is None else {"step": step}) for step in steps]
    assert assign_groups(groups, {}, {}).step == agreed
