"""Synthetic torch_dist checkpoints beside one that megatron-core wrote, and read by torch itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import ucp
from tests.bench.scale.megatron import FIXTURE, ITERATION, Layout, write_torch_dist
from tests.bench.scale.moe import Moe
from ucp.io.dcp.metadata import DcpMetadata, read_metadata
from ucp.io.pickle.values import Stub
from ucp.io.torch_file.archive import read_archive

TINY = Moe(layers=4, experts=4, hidden=16, ffn=12, head=2, groups=4, vocabulary=64)
"""The model of the fixture."""


def outline(metadata: DcpMetadata) -> dict[str, object]:
    """What the metadata says, but for which file has a chunk."""
    tensors = {
        key: (own.dtype, own.shape, {(chunk.offsets, chunk.sizes, chunk.place.nbytes) for chunk in own.chunks})
        for key, own in metadata.tensors.items()
    }
    return {**tensors, **{key: place.nbytes for key, place in metadata.objects.items()}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron") / "made"
    write_torch_dist(folder, TINY, Layout(ep=4, dp=4))
    return folder


def test_keys_chunks_and_items_are_those_of_megatron(made: Path) -> None:
    ours, theirs = made / ITERATION / ".metadata", FIXTURE / ITERATION / ".metadata"
    assert outline(read_metadata(str(ours))) == outline(read_metadata(str(theirs)))
    assert {path.name for path in ours.parent.iterdir()} == {path.name for path in theirs.parent.iterdir()}
    assert ours.stat().st_size == pytest.approx(theirs.stat().st_size, rel=0.2)


def test_the_common_state_is_that_of_megatron(made: Path) -> None:
    ours, theirs = (read_archive(str(path / ITERATION / "common.pt")).root for path in (made, FIXTURE))
    assert isinstance(ours, dict)
    assert isinstance(theirs, dict)
    assert {**ours, "args": None} == {**theirs, "args": None}
    mine, other = ours["args"], theirs["args"]
    assert isinstance(mine, Stub)
    assert isinstance(other, Stub)
    assert isinstance(mine.state, dict)
    assert isinstance(other.state, dict)
    changed = {key for key, value in other.state.items() if mine.state.get(key) != value}
    assert changed <= {"attention_backend", "cp_comm_type", "vocab_size"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it(made: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import FileSystemReader, load

    wanted = {
        "output_layer.weight": torch.ones(64, 16, dtype=torch.bfloat16),
        "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight": torch.ones(4, 4, 24, 16),
    }
    load(wanted, storage_reader=FileSystemReader(made / ITERATION), no_dist=True)
    assert [int(tensor.count_nonzero()) for tensor in wanted.values()] == [2, 64]  # a mark at the start of each chunk


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, ep=4, dp=4), Layout(tp=4, pp=4, ep=2, dp=2)])
def test_a_small_one_is_read_whole(tmp_path: Path, layout: Layout) -> None:
    write_torch_dist(tmp_path / "made", TINY, layout)
    index = ucp.open(tmp_path / "made").index
    assert (index.topology.tp, index.topology.pp, index.topology.ep) == (layout.tp, layout.pp, layout.ep)
    assert sum(atom.states["weight"].numel for atom in index.atoms.values()) == TINY.numel
    assert all(set(atom.states) == {"weight", "exp_avg", "exp_avg_sq", "step"} for atom in index.atoms.values())
