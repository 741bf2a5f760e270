"""What no real file shows of layouts of the optimizer, and what else a folder may hold or lack."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from ucp.core.index import STEP, WEIGHT, Kind
from ucp.core.tensor import InlineTensor
from ucp.errors import MalformedError, MissingFileError, UnsupportedError


def filled(run, layout):
    run.weights()
    getattr(run, layout)()
    return run


def same(found, run):
    assert set(found) == set(run.truth)
    for name, tensor in run.truth.items():
        assert torch.equal(found[name], tensor), name


def test_sizes_that_the_arguments_contradict(fake, read, tmp_path):
    run = filled(fake(tp=2), "full")
    run.common["args"].swiglu = False
    run.common["args"].hidden_size = 12
    with pytest.raises(MalformedError, match=r"(?s)swiglu = False; .*hidden_size = 12; .*linear_fc2"):
        read(run.save(tmp_path))


@pytest.mark.parametrize("tp", [1, 2])
def test_bucket_space_of_which_there_is_no_real_file(fake, read, contents, tmp_path, tp):
    """The other layouts of the optimizer: tests/golden/megatron/test_megatron_read.py."""
    run = filled(fake(tp=tp), "bucket_space")
    index = read(run.save(tmp_path))
    same(contents(index), run)
    assert next(iter(index.atoms)) == "embedding.word_embeddings.weight"
    assert index.step == 7
    assert index.topology.tp == tp
    assert [len(group.params) for group in index.groups] == [10, 5]
    assert {atom.kind for atom in index.atoms.values()} == {Kind.PARAMETER}
    for atom in index.atoms.values():
        (step,) = atom.states[STEP].fragments
        assert isinstance(step.ref, InlineTensor)
        assert step.ref.data == (7).to_bytes(8, "little")
        assert atom.model_dtype == "bfloat16"
        assert max(piece.replica for piece in atom.states[WEIGHT].fragments) > 0


def test_without_an_optimizer(fake, read, tmp_path):
    run = fake()
    run.weights()
    del run.common["optimizer"]
    index = read(run.save(tmp_path))
    assert {atom.kind for atom in index.atoms.values()} == {Kind.PARAMETER}
    assert {tuple(atom.states) for atom in index.atoms.values()} == {(WEIGHT,)}
    assert "saved without an optimizer: every parameter counts as trained" in index.notes
    assert index.groups == ()


@pytest.mark.parametrize("prefix", ["module.", "model."])
def test_prefixes_of_nemo_are_taken_off(fake, read, contents, tmp_path, prefix):
    run = filled(fake(tp=2), "full")
    run.tensors = {
        f"optimizer.state.{key.split('.')[2]}.{prefix}{key.split('.', 3)[3]}"
        if key.startswith("optimizer.state.")
        else prefix + key: value
        for key, value in run.tensors.items()
    }
    same(contents(read(run.save(tmp_path))), run)


def test_masters_of_other_weights_are_an_error_that_names_them(fake, read, tmp_path):
    run = filled(fake(tp=2), "buckets")
    for name in ("output_layer.weight", "decoder.layers.mlp.linear_fc2.weight"):
        shape, chunks = run.tensors[name]
        run.tensors[name] = (shape, [(offsets, chunk + 1) for offsets, chunk in chunks])
    with pytest.raises(MalformedError, match="6 ranges ") as error:
        read(run.save(tmp_path))
    message = str(error.value)
    for name in ("output_layer.weight", "layers.0.mlp.linear_fc2.weight", "layers.1.mlp.linear_fc2.weight"):
        assert name in message
    assert "layers.0.mlp.linear_fc1.weight" not in message


def test_chunks_that_no_rank_holds_are_refused(fake, read, tmp_path):
    run = filled(fake(tp=2), "buckets")
    run.common["args"].tensor_model_parallel_size = 3
    with pytest.raises(UnsupportedError, match=r"output_layer\.weight \[16, 8\] over 3 ranks"):
        read(run.save(tmp_path))


def test_without_arguments_the_embedding_tells_the_degree(fake, read, contents, tmp_path):
    run = filled(fake(tp=2), "buckets")
    run.common["args"] = Namespace()
    same(contents(read(run.save(tmp_path))), run)


def test_equal_norms_are_told_apart_by_their_order(fake, read, contents, tmp_path):
    run = fake(tp=2)
    for name in run.truth:
        if "layernorm" in name and name.endswith("/param"):
            run.truth[name] = torch.ones(8)
    index = read(filled(run, "buckets").save(tmp_path))
    same(contents(index), run)
    assert any("10 of these masters have identical contents" in note for note in index.notes)


def test_states_of_no_parameter_or_of_another_shape(fake, read, tmp_path):
    run = filled(fake(), "full")
    run.tensors["optimizer.state.exp_avg.nowhere"] = ((3,), [((0,), torch.ones(3))])
    run.tensors["optimizer.state.exp_avg.output_layer.weight"] = ((4, 4), [((0, 0), torch.ones(4, 4))])
    with pytest.raises(MalformedError, match=r"(?s)2 optimizer states .*\[16, 8\].*nowhere"):
        read(run.save(tmp_path))


def test_transposed_states_of_grouped_experts(fake, read, contents, tmp_path):
    """GroupedMLP up to megatron-core 0.15 flattens its states before they are transposed (core/transformer/moe)."""
    run = filled(fake(), "full")
    name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    key = "decoder.layers.0.mlp.experts.experts.linear_fc2.weight"
    whole = torch.randn(2, 4, 6)
    run.tensors[key] = ((2, 4, 6), [((0, 0, 0), whole.to(torch.bfloat16))])
    for state in ("param", "exp_avg", "exp_avg_sq"):
        flat = whole.transpose(1, 2).contiguous().flatten()
        own = f"optimizer.state.{state}.{key}"
        run.tensors[own] = (
            (2, 1, 1, 24),
            [((e, 0, 0, 0), flat[24 * e : 24 * e + 24].reshape(1, 1, 1, 24)) for e in (0, 1)],
        )
        run.mcore_data[own] = {"nd_reformulated_orig_global_shape": torch.Size((2, 6, 4))}
    index = read(run.save(tmp_path))
    found = contents(index)
    for state in ("param", "exp_avg", "exp_avg_sq"):
        assert torch.equal(found[f"{name}/{state}"], whole[1])
    assert any("stored transposed" in note for note in index.notes)


def test_unknown_tensors_of_the_optimizer_are_refused(fake, read, tmp_path):
    run = filled(fake(), "full")
    run.tensors["optimizer.muon.buffer"] = ((3,), [((0,), torch.ones(3))])
    with pytest.raises(UnsupportedError, match=r"1 tensor .*\n  optimizer\.muon\.buffer"):
        read(run.save(tmp_path))


def test_masters_that_are_not_the_weights_are_pointed_out(fake, read, tmp_path):
    run = filled(fake(), "full")
    shape, chunks = run.tensors["output_layer.weight"]
    run.tensors["output_layer.weight"] = (shape, [(offsets, chunk + 1) for offsets, chunk in chunks])
    notes = read(run.save(tmp_path)).notes
    assert any(note.startswith("the master differs from the weight for output_layer.weight") for note in notes)


def test_an_empty_model_is_refused(fake, read, tmp_path):
    run = fake()
    run.full()
    with pytest.raises(MalformedError, match=r"\.metadata lists \d+ tensors, none\b"):
        read(run.save(tmp_path))


def test_other_backends_are_named_and_refused(fake, read, tmp_path):
    root = filled(fake(), "full").save(tmp_path) / "iter_0000007"
    (root / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(UnsupportedError, match=r" zarr .*--ckpt-format torch_dist"):
        read(tmp_path)
    (root / "metadata.json").unlink()
    with pytest.raises(MissingFileError, match=r"/metadata\.json; .*torch_dist"):
        read(tmp_path)
    (root / "common.pt").unlink()
    with pytest.raises(UnsupportedError, match=r"fsdp_dtensor.*--ckpt-format torch_dist"):
        read(tmp_path)


@pytest.mark.parametrize("attention", [False, True])
def test_empty_states_of_modules_tell_where_nothing_else_does(attention, fake, read, tmp_path):
    """Linear layers of both kinds have one, attention of Transformer Engine's alone."""
    run = fake()
    run.weights()
    run.objects["decoder.layers.self_attention.linear_proj._extra_state/shard_0_2"] = [None]
    if attention:
        run.objects["decoder.layers.self_attention.core_attention._extra_state/shard_0_2"] = [None]
    (shown,) = (extra.value for extra in read(run.save(tmp_path)).extras if extra.name == "modules")
    assert shown["transformer_impl"] == ("transformer_engine" if attention else "local")


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_wise_optimizer_beside_the_distributed_one(fake, read, contents, tmp_path, tp):
    """Before, what lay in buckets was left out without a word, and its parameters counted as frozen."""
    run = fake(tp=tp, sharding="dp_reshardable")
    run.weights()
    matrices = run.layer_wise()
    index = read(run.save(tmp_path))
    assert {atom.kind for atom in index.atoms.values()} == {Kind.PARAMETER}
    found = contents(index)
    of_muon = {"param": "param", "exp_avg": "momentum_buffer"}
    for key, tensor in run.truth.items():
        name, state = key.split("/")
        kept = of_muon.get(state) if name in matrices else state
        assert kept is None or torch.equal(found.pop(f"{name}/{kept}"), tensor), key
    assert found == {}
    assert [len(group.params) for group in index.groups if group.params] == [len(matrices), 2, 5]


def with_optimizer(run, optimizer):
    """A run that keeps one moment of its matrices."""
    run.common["args"].optimizer = optimizer
    run.weights()
    run.full()
    matrices = ("linear_fc1.weight", "linear_fc2.weight", "linear_proj.weight", "linear_qkv.weight")
    for key in [key for key in run.tensors if ".exp_avg_sq." in key and key.endswith(matrices)]:
        del run.tensors[key]
    return run


def test_one_moment_of_matrices_is_whole_for_lion(fake, read, tmp_path):
    """0.20 core/optimizer/emerging_optimizers.py: Lion trains matrices, Adam vectors, embedding and output layer."""
    index = read(with_optimizer(fake(), "lion").save(tmp_path))
    kept = {name: tuple(atom.states) for name, atom in index.atoms.items()}
    assert kept["decoder.layers.0.mlp.linear_fc2.weight"] == ("weight", "exp_avg", "step")
    assert kept["output_layer.weight"] == ("weight", "exp_avg", "exp_avg_sq", "step")


def test_and_part_of_it_is_lost_for_adam(fake, read, tmp_path):
    with pytest.raises(MalformedError, match=r"8 parameters .*\n  decoder\.layers\.0\..*: exp_avg_sq\n"):
        read(with_optimizer(fake(), "adam").save(tmp_path))


@pytest.mark.parametrize("name", ["gtp_weight_remat_size", "expert_gtp_weight_remat_size"])
def test_weights_that_are_cut_over_more_ranks_are_refused(fake, read, tmp_path, name):
    """0.20 core/tensor_parallel/generalized_tensor_parallelism.py; 1 is a run without."""
    run = fake()
    run.weights()
    setattr(run.common["args"], name, 1)
    read(run.save(tmp_path / "a"))
    setattr(run.common["args"], name, 2)
    with pytest.raises(UnsupportedError, match=rf"\({name}=2\)"):
        read(run.save(tmp_path / "b"))
