"""Groups and steps of torch_dist checkpoints: what stays open is named, and keeps its step."""

from __future__ import annotations

import pytest

from tests.unit.formats.megatron.torch_dist.conftest import KeptDist, read
from ucp.core.index import STEP

EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture
def decoupled(full: KeptDist) -> KeptDist:
    """The run with groups of a decoupled learning rate, as megatron-core 0.16.1 saves them."""
    decayed = full.groups[0]
    full.groups.insert(1, {**decayed, "max_lr": 0.0005, "default_config": False})
    full.arguments["decoupled_lr"] = 0.0005
    return full


def test_a_decoupled_learning_rate_is_read_from_the_arguments(decoupled, tmp_path):
    index = read(decoupled.save(tmp_path))
    assert [len(group.params) for group in index.groups] == [16, 2, 9]
    assert set(index.groups[1].params) == {EMBEDDING, "output_layer.weight"}
    assert index.dropped == ()
    assert any("(decoupled_lr)" in note for note in index.notes)


def test_without_arguments_members_stay_open_and_keep_the_step_of_all_groups(decoupled, tmp_path):
    del decoupled.common["args"]
    index = read(decoupled.save(tmp_path))
    assert [len(group.params) for group in index.groups] == [0, 0, 9]
    assert all(STEP in atom.states for atom in index.atoms.values())
    (entry,) = index.dropped
    assert "arguments were not saved" in entry
    assert f"\n  {EMBEDDING}: " in entry
    assert len(index.lost) == 18
    (reason,) = index.loss_reasons([EMBEDDING, "nothing"])
    assert "arguments were not saved" in reason
    assert reason.endswith(f"save the checkpoint that way:\n  {EMBEDDING}: {list(index.atoms[EMBEDDING].global_shape)}")


@pytest.mark.parametrize("step", [6.0, 10])
def test_but_not_one_on_which_groups_differ(decoupled, tmp_path, step):
    decoupled.groups[1]["step"] = step
    decoupled.arguments["decoupled_lr"] = None
    index = read(decoupled.save(tmp_path))
    assert sum(STEP in atom.states for atom in index.atoms.values()) == 9
    assert "fits none of the groups, or several" in index.dropped[0]
