"""Groups and steps of torch_dist checkpoints: what stays open is named, and keeps its step."""

from __future__ import annotations

import pytest

from ucp.core.index import STEP

EMBEDDING = "embedding.word_embeddings.weight"


def decoupled(run, *steps, args=True):
    """The run with groups of a decoupled learning rate, as megatron-core 0.16.1 saves them."""
    run.weights()
    run.full()
    kinds = [(1.0, 0.1, True), (1.0, 0.05, False), (0.0, 0.1, True)]
    run.common["optimizer"]["optimizer"]["param_groups"] = [
        {"wd_mult": wd, "max_lr": lr, "min_lr": 0.0, "default_config": default, "is_decoupled_lr": False, "step": step}
        for (wd, lr, default), step in zip(kinds, steps, strict=True)
    ]
    if args:
        vars(run.common["args"]).update(lr=0.1, min_lr=0.0, decoupled_lr=0.05)
    return run


def test_a_decoupled_learning_rate_is_read_from_the_arguments(fake, read, tmp_path):
    index = read(decoupled(fake(), 7, 7, 7).save(tmp_path))
    assert [len(group.params) for group in index.groups] == [8, 2, 5]
    assert set(index.groups[1].params) == {EMBEDDING, "output_layer.weight"}
    assert index.dropped == ()
    assert any("(decoupled_lr)" in note for note in index.notes)


def test_without_arguments_members_stay_open_and_keep_the_step_of_all_groups(fake, read, tmp_path):
    run = decoupled(fake(), 7, 7, 7, args=False)
    del run.common["args"]
    index = read(run.save(tmp_path))
    assert [len(group.params) for group in index.groups] == [0, 0, 5]
    assert all(STEP in atom.states for atom in index.atoms.values())
    (entry,) = index.dropped
    assert "arguments were not saved" in entry
    assert f"\n  {EMBEDDING}: " in entry
    assert len(entry.split("\n")) == 11
    assert len(index.lost) == 10
    (reason,) = index.loss_reasons([EMBEDDING, "nothing"])
    assert "arguments were not saved" in reason
    assert reason.endswith(f"save the checkpoint that way:\n  {EMBEDDING}: {list(index.atoms[EMBEDDING].global_shape)}")


@pytest.mark.parametrize("steps", [(7, 6, 7), (7, 7.0, 7)])
def test_but_not_one_on_which_groups_differ(fake, read, tmp_path, steps):
    run = decoupled(fake(), *steps, args=False)
    index = read(run.save(tmp_path))
    assert sum(STEP in atom.states for atom in index.atoms.values()) == 5
    assert "fits none of the groups, or several" in index.dropped[0]
