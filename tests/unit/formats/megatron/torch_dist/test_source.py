"""What no kept checkpoint shows of layouts of the optimizer, and what else a folder may hold or lack."""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.golden.truth import check_equal
from tests.unit.formats.megatron.torch_dist.conftest import STATES, Chunks, KeptDist, read, read_contents
from ucp.core.index import STEP, WEIGHT, Kind
from ucp.errors import MalformedError, MissingFileError, UnsupportedError

BUCKET = "optimizer.distributed.dp_group_idx_{}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.{}"
OUTPUT, FC2 = "output_layer.weight", "decoder.layers.mlp.linear_fc2.weight"
MATRICES = ("linear_fc1.weight", "linear_fc2.weight", "linear_proj.weight", "linear_qkv.weight")


def flatten(shape: tuple[int, ...], chunks: Chunks) -> Tensor:
    """A bucket without what chunks have beyond its end."""
    flat = torch.zeros(shape)
    for (start,), chunk in chunks:
        flat[start : start + len(chunk)] = chunk[: len(flat) - start]
    return flat


@pytest.fixture
def truth(full: KeptDist, tmp_path) -> dict[str, Tensor]:
    """All states but steps; tests/golden/megatron/test_megatron_read.py compares them with what the run had."""
    return read_contents(read(full.save(tmp_path / "truth")))


def test_sizes_that_the_arguments_contradict(full, tmp_path):
    full.arguments.update(swiglu=False, hidden_size=12)
    with pytest.raises(MalformedError, match=r"(?s)swiglu = False; .*hidden_size = 12; .*linear_fc2"):
        read(full.save(tmp_path))


def test_bucket_space_of_which_there_is_no_real_file(buckets, truth, tmp_path):
    """[ranks, elements of one] (0.13 core/optimizer/distrib_optimizer.py, sharded_param_state_fs_bucket_space)."""
    for rank in range(2):
        for state in STATES:
            shape, chunks = buckets.tensors[BUCKET.format(rank, state)]
            flat = flatten(shape, chunks)
            each = -(-len(flat) // 2)
            ends = {min(start + len(chunk), len(flat)) for (start,), chunk in chunks}
            edges = sorted({0, each, *(start for (start,), _ in chunks), *ends})
            parts = [((low // each, low % each), flat[low:high][None]) for low, high in pairwise(edges)]
            buckets.tensors[BUCKET.format(rank, state)] = ((2, each), parts)
    buckets.common["optimizer"]["param_state_sharding_type"] = "fully_sharded_bucket_space"
    index = read(buckets.save(tmp_path / "a"))
    check_equal(read_contents(index), truth)
    assert next(iter(index.atoms)) == "embedding.word_embeddings.weight"
    assert [len(group.params) for group in index.groups] == [18, 9]
    assert all(max(piece.replica for piece in atom.states[WEIGHT].fragments) > 0 for atom in index.atoms.values())


def test_without_an_optimizer(full, tmp_path):
    full.select(lambda key: not key.startswith("optimizer"))
    del full.common["optimizer"]
    index = read(full.save(tmp_path))
    assert {atom.kind for atom in index.atoms.values()} == {Kind.PARAMETER}
    assert {tuple(atom.states) for atom in index.atoms.values()} == {(WEIGHT,)}
    assert "saved without an optimizer: every parameter counts as trained" in index.notes
    assert index.groups == ()


@pytest.mark.parametrize("prefix", ["module.", "model."])
def test_prefixes_of_nemo_are_taken_off(full, truth, tmp_path, prefix):
    full.tensors = {
        f"optimizer.state.{key.split('.')[2]}.{prefix}{key.split('.', 3)[3]}"
        if key.startswith("optimizer.state.")
        else prefix + key: value
        for key, value in full.tensors.items()
    }
    check_equal(read_contents(read(full.save(tmp_path / "a"))), truth)


def test_masters_of_other_weights_are_an_error_that_names_them(buckets, tmp_path):
    for key in (OUTPUT, FC2):
        buckets.map_chunks(key, lambda chunk: chunk + 1)
    with pytest.raises(MalformedError, match="10 ranges ") as error:
        read(buckets.save(tmp_path))
    message = str(error.value)
    for name in (OUTPUT, "layers.0.mlp.linear_fc2.weight", "layers.3.mlp.linear_fc2.weight"):
        assert name in message
    assert "layers.0.mlp.linear_fc1.weight" not in message


def test_chunks_that_no_rank_holds_are_refused(buckets, tmp_path):
    buckets.arguments["tensor_model_parallel_size"] = 3
    with pytest.raises(UnsupportedError, match=r"output_layer\.weight \[64, 20\] over 3 ranks"):
        read(buckets.save(tmp_path))


def test_without_arguments_the_embedding_tells_the_degree(buckets, truth, tmp_path):
    buckets.common["args"] = Namespace()
    check_equal(read_contents(read(buckets.save(tmp_path / "a"))), truth)


def level_norms(run: KeptDist) -> None:
    """Have all norms hold ones, in the model and in the buckets."""
    ((hidden,), _) = run.tensors["decoder.final_layernorm.weight"]
    for key in [key for key in run.tensors if key.endswith(("norm_weight", "norm.weight"))]:
        run.map_chunks(key, torch.ones_like)
    for key in [key for key in run.tensors if key.endswith(".param")]:
        # no other parameter, and no gap, has as many elements
        run.map_chunks(key, lambda own: torch.ones(hidden) if len(own) == hidden else own)


@pytest.mark.parametrize("case", ["llama-tp2-dp2-dp", "mixtral-pp2-ep2-dp2-dp"])
def test_equal_norms_are_told_apart_by_their_order(case, tmp_path):
    """At the edges of stages by what other stages hold."""
    run = KeptDist(case)
    truth = read_contents(read(run.save(tmp_path / "truth")))
    level_norms(run)
    index = read(run.save(tmp_path / "a"))
    norms = {name: torch.ones_like(own) for name, own in truth.items() if name.endswith("norm.weight/weight")}
    check_equal(read_contents(index), {**truth, **norms})
    assert any("of these masters have identical contents" in note for note in index.notes)


def cut_out(run: KeptDist, low: int, high: int) -> None:
    """Take a stretch out of every bucket, as if what lies there were frozen."""
    for key in [key for key in run.tensors if ".bucket_idx_" in key]:
        ((numel,), chunks) = run.tensors[key]
        kept = [(start if start < low else start - (high - low), own) for (start,), own in chunks]
        kept = [own for own, ((start,), _) in zip(kept, chunks, strict=True) if not low <= start < high]
        run.tensors[key] = ((numel - (high - low),), [((start,), chunk) for start, chunk in kept])


FC2_OF_1, NORM_OF_1, QKV_OF_1, FC2_OF_0 = 4672, 5568, 5632, 6656
"""Where parameters of the layers 1 and 0 start in the buckets."""


def test_a_frozen_norm_that_leaves_a_choice_is_refused(buckets, tmp_path):
    """Of layer 1 only a norm is trained: which of its two, nothing in the files tells."""
    level_norms(buckets)
    cut_out(buckets, QKV_OF_1, FC2_OF_0)
    cut_out(buckets, FC2_OF_1, NORM_OF_1)
    with pytest.raises(MalformedError, match=r"(?s)decoder\.layers\.1\.input_layernorm.*--no-save-optim"):
        read(buckets.save(tmp_path))


def test_a_frozen_norm_between_known_parameters_leaves_none(buckets, tmp_path):
    level_norms(buckets)
    cut_out(buckets, NORM_OF_1, QKV_OF_1)
    atoms = read(buckets.save(tmp_path)).atoms.items()
    assert [name for name, atom in atoms if atom.kind is Kind.FROZEN] == ["decoder.layers.1.pre_mlp_layernorm.weight"]


def test_states_of_no_parameter_or_of_another_shape(full, tmp_path):
    full.tensors["optimizer.state.exp_avg.nowhere"] = ((3,), [((0,), torch.ones(3))])
    full.tensors[f"optimizer.state.exp_avg.{OUTPUT}"] = ((4, 4), [((0, 0), torch.ones(4, 4))])
    with pytest.raises(MalformedError, match=r"(?s)2 optimizer states .*\[64, 20\].*nowhere"):
        read(full.save(tmp_path))


def test_transposed_states_of_grouped_experts(full, tmp_path):
    """GroupedMLP up to megatron-core 0.15 flattens its states before they are transposed (core/transformer/moe)."""
    key = "decoder.layers.0.mlp.experts.experts.linear_fc2.weight"
    whole = torch.randn(2, 20, 28)
    full.tensors[key] = ((2, 20, 28), [((0, 0, 0), whole.to(torch.bfloat16))])
    for state in STATES:
        flat = whole.transpose(1, 2).reshape(2, 1, 1, 560)
        own = f"optimizer.state.{state}.{key}"
        full.tensors[own] = ((2, 1, 1, 560), [((expert, 0, 0, 0), flat[expert : expert + 1]) for expert in (0, 1)])
        full.mcore_data[own] = {"nd_reformulated_orig_global_shape": torch.Size((2, 28, 20))}
    index = read(full.save(tmp_path))
    found = read_contents(index)
    for state in (WEIGHT, "exp_avg", "exp_avg_sq"):
        name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
        assert torch.equal(found[f"{name}/{state}"], whole[1])
    assert any("stored transposed" in note for note in index.notes)


def test_unknown_tensors_of_the_optimizer_are_refused(full, tmp_path):
    full.tensors["optimizer.muon.buffer"] = ((3,), [((0,), torch.ones(3))])
    with pytest.raises(UnsupportedError, match=r"1 tensor .*\n  optimizer\.muon\.buffer"):
        read(full.save(tmp_path))


def test_masters_that_are_not_the_weights_are_pointed_out(full, tmp_path):
    full.map_chunks(OUTPUT, lambda chunk: chunk + 1)
    notes = read(full.save(tmp_path)).notes
    assert any(note.startswith("the master differs from the weight for output_layer.weight") for note in notes)


def test_an_empty_model_is_refused(full, tmp_path):
    full.select(lambda key: key.startswith("optimizer"))
    with pytest.raises(MalformedError, match=r"\.metadata lists \d+ tensors, none\b"):
        read(full.save(tmp_path))


def test_other_backends_are_named_and_refused(full, tmp_path):
    root = full.save(tmp_path) / "iter_0000010"
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
def test_empty_states_of_modules_tell_where_nothing_else_does(attention, full, tmp_path):
    """Linear layers of both kinds have one, attention of Transformer Engine's alone."""
    del full.arguments["transformer_impl"]
    key = "decoder.layers.self_attention.{}._extra_state/shard_0_4"
    if attention:
        full.objects[key.format("core_attention")] = full.objects[key.format("linear_proj")]
    (shown,) = (extra.value for extra in read(full.save(tmp_path)).extras if extra.name == "modules")
    assert shown["transformer_impl"] == ("transformer_engine" if attention else "local")


def test_a_layer_wise_optimizer_beside_the_distributed_one(full, buckets, truth, tmp_path):
    """Muon by layers (0.20 layer_wise_optimizer.py): matrices under keys of their own, the rest in buckets.

    Before, what lay in buckets was left out without a word, and its parameters counted as frozen.
    """
    for state, key in (("param", "fp32_param"), ("exp_avg", "momentum_buffer")):
        for name in [name for name in buckets.tensors if name.startswith("decoder") and name.endswith(MATRICES)]:
            buckets.tensors[f"chained_0.optimizer.state.{key}.{name}"] = full.tensors[f"optimizer.state.{state}.{name}"]
    for rank in range(2):
        for state in STATES:
            _, chunks = buckets.tensors[BUCKET.format(rank, state)]
            parts = [chunk for _, chunk in sorted(chunks, key=lambda own: own[0])]
            norms = [torch.cat([part, torch.zeros(44)]) for part in parts if len(part) == 20]  # aligned to 64
            flat = torch.cat([parts[0], *norms, parts[-1][:640]])
            edges = [0, 640, *(640 + 64 * at + more for at in range(len(norms)) for more in (20, 64)), len(flat)]
            cut = [((low,), flat[low:high]) for low, high in pairwise(edges)]
            buckets.tensors[BUCKET.format(rank, state)] = ((len(flat),), cut)
    buckets.common["optimizer"] = {
        0: {"optimizer": {"param_groups": full.groups[:1]}},
        1: {"param_state_sharding_type": "dp_reshardable"},
    }
    index = read(buckets.save(tmp_path / "a"))
    assert {atom.kind for atom in index.atoms.values()} == {Kind.PARAMETER}
    wanted = {
        name.replace("exp_avg", "momentum_buffer") if is_matrix else name: value
        for name, value in truth.items()
        if not (is_matrix := name.rpartition("/")[0].endswith(MATRICES)) or not name.endswith("exp_avg_sq")
    }
    check_equal(read_contents(index), wanted)
    assert [len(group.params) for group in index.groups if group.params] == [16, 2, 9]


@pytest.fixture
def one_moment(full: KeptDist) -> KeptDist:
    """A run that keeps one moment of its matrices."""
    full.select(lambda key: not (".exp_avg_sq." in key and key.endswith(MATRICES)))
    return full


def test_one_moment_of_matrices_is_whole_for_lion(one_moment, tmp_path):
    """0.20 core/optimizer/emerging_optimizers.py: Lion trains matrices, Adam vectors, embedding and output layer."""
    one_moment.arguments["optimizer"] = "lion"
    index = read(one_moment.save(tmp_path))
    kept = {name: tuple(atom.states) for name, atom in index.atoms.items()}
    assert kept["decoder.layers.0.mlp.linear_fc2.weight"] == (WEIGHT, "exp_avg", STEP)
    assert kept[OUTPUT] == (WEIGHT, "exp_avg", "exp_avg_sq", STEP)


def test_and_part_of_it_is_lost_for_adam(one_moment, tmp_path):
    with pytest.raises(MalformedError, match=r"16 parameters .*\n  decoder\.layers\.0\..*: exp_avg_sq\n"):
        read(one_moment.save(tmp_path))


@pytest.mark.parametrize("name", ["gtp_weight_remat_size", "expert_gtp_weight_remat_size"])
def test_weights_that_are_cut_over_more_ranks_are_refused(full, tmp_path, name):
    """0.20 core/tensor_parallel/generalized_tensor_parallelism.py; 1 is a run without."""
    full.arguments[name] = 1
    read(full.save(tmp_path / "a"))
    full.arguments[name] = 2
    with pytest.raises(UnsupportedError, match=rf"\({name}=2\)"):
        read(full.save(tmp_path / "b"))
