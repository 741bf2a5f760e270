"""Names of optimizer states that are recorded without any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ucp_formats.megatron.source import MegatronFormat

from tests.golden.truth import read_states
from ucp.core.gaps import check_cover
from ucp.core.index import Kind
from ucp.errors import MalformedError


def reorder(run) -> None:
    """Save the model's tensors in another order than the optimizer has them."""
    for root in run.roots.values():
        root["model"] = dict(reversed(root["model"].items()))


@pytest.mark.parametrize("optimizer", ["whole", "L1", "L2", "L3", "L3a"])
def test_contents_tell_where_the_order_is_another(fake_legacy, tmp_path: Path, optimizer: str) -> None:
    run = fake_legacy(kind="llama", tp=2, optimizer=optimizer)
    ordered = MegatronFormat().read(run.save(tmp_path / "ordered"))
    reorder(run)
    index = MegatronFormat().read(run.save(tmp_path / "reordered"))
    check_cover(index)
    for name, atom in index.atoms.items():
        for state, own in atom.states.items():
            if own.global_shape:
                boxes = [(piece.box, piece.ref.strides) for piece in own.fragments]
                assert boxes == [
                    (piece.box, piece.ref.strides) for piece in ordered.atoms[name].states[state].fragments
                ]
    assert any("not in the usual order" in note for note in index.notes)


@pytest.mark.parametrize("optimizer", ["L3", "L3a"])
def test_what_is_not_trained_has_no_states(fake_legacy, tmp_path: Path, optimizer: str) -> None:
    frozen = ("embedding.word_embeddings.weight", "decoder.layers.2.mlp.linear_fc1.weight")
    run = fake_legacy(kind="llama", optimizer=optimizer, frozen=frozen)
    index = MegatronFormat().read(run.save(tmp_path))
    check_cover(index)
    assert {name for name, atom in index.atoms.items() if atom.kind is Kind.FROZEN} == set(frozen)
    assert set(index.atoms[frozen[0]].states) == {"weight"}
    assert not set(frozen) & {name for group in index.groups for name in group.params}


def test_masters_of_some_parameters_only(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", optimizer="whole")
    root = run.roots["mp_rank_00"]
    norms = [name for name in root["model"] if name.endswith("layernorm.weight")]
    for name in norms:
        root["model"][name] = run.masters[name].clone()
    root["optimizer"]["fp32_from_fp16_params"][1] = []
    index = MegatronFormat().read(run.save(tmp_path))
    check_cover(index)
    assert {name for name, atom in index.atoms.items() if atom.model_dtype is None} == set(norms)


def test_the_scale_of_the_loss_is_kept_once(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", tp=2, optimizer="whole")
    for root in run.roots.values():
        root["optimizer"]["grad_scaler"] = {"scale": torch.tensor([4.0]), "growth_tracker": 3}
    index = MegatronFormat().read(run.save(tmp_path / "same"))
    assert [extra.name for extra in index.extras if extra.name.startswith("optimizer")] == ["optimizer/grad_scaler"]
    run.roots["mp_rank_01"]["optimizer"]["grad_scaler"] = {"scale": torch.tensor([8.0]), "growth_tracker": 3}
    index = MegatronFormat().read(run.save(tmp_path / "other"))
    assert [extra.name for extra in index.extras if extra.name.startswith("optimizer")] == [
        "optimizer/grad_scaler/pp0.tp0",
        "optimizer/grad_scaler/pp0.tp1",
    ]


NORM = "decoder.layers.{}.{}_layernorm.weight"


@pytest.mark.parametrize("optimizer", ["whole", "L1", "L2", "L3", "L3a"])
def test_equal_norms_that_are_all_trained_go_by_order(fake_legacy, tmp_path: Path, optimizer: str) -> None:
    run = fake_legacy(kind="llama", tp=2, optimizer=optimizer, plain_norms=True)
    found = read_states(MegatronFormat().read(run.save(tmp_path)))
    moments = {name: own for name, own in run.moments["exp_avg"].items() if "norm" in name}
    assert all(torch.equal(found[f"{name}/exp_avg"], own) for name, own in moments.items())


@pytest.mark.parametrize("optimizer", ["whole", "L3", "L3a"])
def test_equal_norms_between_trained_weights_are_known(fake_legacy, tmp_path: Path, optimizer: str) -> None:
    """Frozen weights leave no doubt: as many norms are trained as there are."""
    frozen = ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.2.self_attention.linear_qkv.weight")
    run = fake_legacy(kind="llama", optimizer=optimizer, plain_norms=True, frozen=frozen)
    index = MegatronFormat().read(run.save(tmp_path))
    assert {name for name, atom in index.atoms.items() if atom.kind is Kind.FROZEN} == set(frozen)


@pytest.mark.parametrize("optimizer", ["whole", "fp32", "L2", "L3", "L3a"])
def test_equal_norms_of_which_some_are_frozen_are_refused(fake_legacy, tmp_path: Path, optimizer: str) -> None:
    """Of a frozen norm and its neighbour either may be trained: nothing in the files tells."""
    layer = tuple(name for name in fake_legacy(kind="llama").masters if name.startswith("decoder.layers.1."))
    kept = NORM.format(1, "pre_mlp")
    frozen = tuple(name for name in layer if name != kept)
    run = fake_legacy(kind="llama", optimizer=optimizer, plain_norms=True, frozen=frozen)
    with pytest.raises(MalformedError, match="--no-save-optim") as caught:
        MegatronFormat().read(run.save(tmp_path))
    assert [name for name in (kept, NORM.format(1, "input")) if name not in str(caught.value)] == []


def test_a_frozen_norm_of_a_whole_optimizer(fake_legacy, tmp_path: Path) -> None:
    """Groups are listed apart from weights, so that norms between weights are not between them there."""
    run = fake_legacy(kind="llama", optimizer="whole", plain_norms=True, frozen=(NORM.format(0, "input"),))
    with pytest.raises(MalformedError, match=r"(?s)8 parameters .*--no-save-optim"):
        MegatronFormat().read(run.save(tmp_path))
