"""Pipeline, tensor- and expert-parallel files that were written read back as the checkpoint they came from.

What real DeepSpeed makes of them is shown by tests/integration/deepspeed/test_deepspeed_parallel.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import ucp
from tests.golden.truth import load_stubbed
from ucp.core.index import Index
from ucp.errors import (
    IdleOptionError,
    MisfitError,
    MissingStateError,
    TopologyError,
    UcpError,
)
from ucp.io.torch_file.archive import read_archive

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures" / "deepspeed"

TARGETS: dict[str, Sequence[str]] = {
    "z1-pp2-tp2-dp2-bf16": ("dp=2,tp=2,pp=2,zero=1", "dp=3,tp=4,zero=1", "dp=1,tp=4,pp=4,zero=1"),
    "z1-pp4-tied": ("dp=2,tp=2,pp=4,zero=1", "dp=1,zero=0", "dp=3,tp=2,pp=3,zero=1"),
    "z1-pp2-dp2": ("dp=3,zero=0", "dp=1,pp=2,zero=0", "dp=2,pp=4,zero=1", "dp=1,pp=3,zero=0"),
    "z0-pp2": ("dp=2,pp=2,zero=1", "dp=1,pp=2,zero=0", "dp=1,pp=3,zero=1"),
    "z0-pp2-bf16": ("dp=1,pp=2,zero=1",),
    "z0-pp2-alike": ("dp=1,pp=2,zero=0", "dp=2,pp=4,zero=1"),
    "z1-tp2-dp2": ("dp=1,tp=4,zero=3", "dp=3,zero=2", "dp=1,tp=2,zero=0"),
    "z3-tp2-dp2": ("dp=2,tp=2,zero=3", "dp=1,tp=4,zero=2"),
    "z1-ep2-dp4": ("dp=4,ep=4,zero=2", "dp=3,zero=1", "dp=2,ep=2,zero=0"),
    "z2-ep2-dp4-contiguous": ("dp=4,ep=2,zero=2", "dp=4,ep=4,zero=1"),
    "z0-ep2-dp4": ("dp=4,ep=4,zero=0", "dp=4,ep=2,zero=1"),
    "z1-ep2-dp4-bf16": ("dp=4,ep=2,zero=1",),
    "z1-ep2-two-layers": ("dp=2,ep=1,zero=1", "dp=4,ep=4,zero=2"),
    "z0-ep2-fp16-one-group": ("dp=2,ep=2,zero=0", "dp=2,ep=1,zero=0"),
}
STAGES = {
    ("z1-pp2-tp2-dp2-bf16", "dp=1,tp=4,pp=4,zero=1"): {"partition": "parameters", "tied": "embed:5"},
    ("z1-pp4-tied", "dp=3,tp=2,pp=3,zero=1"): {"stages": "0,1,4,6", "tied": "embed:5"},
    ("z1-pp2-dp2", "dp=2,pp=4,zero=1"): {"partition": "uniform", "tied": "emb:5"},
    ("z1-pp2-dp2", "dp=1,pp=3,zero=0"): {"partition": "uniform", "tied": "emb:5"},
    ("z0-pp2", "dp=1,pp=3,zero=1"): {"partition": "uniform", "tied": "emb:5"},
    ("z0-pp2-alike", "dp=2,pp=4,zero=1"): {"partition": "uniform"},
}
"""What the user says of stages that the source does not have."""
AUTOTP = FIXTURES / "autotp.toml"
"""Rules that say what `universal_checkpoint_info` of these fixtures does."""
CELLS = [
    *((name, topology) for name, topologies in TARGETS.items() for topology in topologies),
    *(
        (name, "")
        for name in ("z1-pp2-tp2-dp2-bf16", "z1-pp4-tied", "z0-pp2-bf16", "z3-tp2-dp2", "z2-ep2-dp4-contiguous")
    ),
]


def source(name: str) -> Path:
    return FIXTURES / name / "checkpoint"


@cache
def index_of(name: str) -> Index:
    return ucp.inspect(source(name))


def write(name: str, topology: str, folder: Path, **settings: str) -> Path:
    """Files for a topology; a universal checkpoint for none."""
    wanted = ucp.Topology.parse(topology) if topology else None
    to = "deepspeed" if topology else "deepspeed-universal"
    ucp.convert(source(name), folder / "written", to=to, topology=wanted, settings=settings, workers=1)
    return folder / "written"


@pytest.mark.parametrize(("name", "topology"), CELLS, ids=[f"{name}-to-{own or 'universal'}" for name, own in CELLS])
def test_reads_back_equal(name: str, topology: str, tmp_path: Path) -> None:
    written = write(name, topology, tmp_path, **STAGES.get((name, topology), {}))
    assert not ucp.diff(source(name), written).changes
    before, after = index_of(name), ucp.inspect(written)
    assert after.step == before.step
    assert [(set(g.params), g.hyper) for g in after.groups] == [(set(g.params), g.hyper) for g in before.groups]
    if topology:
        assert after.topology == ucp.Topology.parse(topology)


def test_the_record_of_layouts_goes_along(tmp_path: Path) -> None:
    written = write("z1-pp2-tp2-dp2-bf16", "dp=3,tp=4,zero=1", tmp_path)
    root = read_archive(str(written / "global_step3" / "mp_rank_03_model_states.pt")).root
    assert isinstance(root, dict)
    assert root["universal_checkpoint_info"]["sub_param_shard_widths"] == {
        r"\d+.qkv.weight": [[2] * 4, [1] * 4, [1] * 4]
    }
    assert (root["mp_world_size"], root["checkpoint_parallel_dimensions"]) == (4, {"pp_degree": 1, "tp_degree": 4})


def without_record(name: str, folder: Path, to: str) -> Path:
    """The checkpoint as a run without tensor parallelism would have saved it: nothing says how ranks would cut it."""
    topology = None if to == "ucp" else "dp=2,zero=2"
    settings = {"drop": "universal_checkpoint_info"}
    ucp.convert(source(name), folder / "plain", to=to, topology=topology, settings=settings, workers=1)
    assert "universal_checkpoint_info" not in {extra.name for extra in ucp.inspect(folder / "plain").extras}
    return folder / "plain"


@pytest.mark.parametrize(
    ("between", "topology"),
    [("deepspeed", "dp=2,tp=2,zero=1"), ("ucp", "dp=1,tp=4,zero=3"), ("deepspeed", "dp=1,tp=2,zero=0")],
)
def test_rules_of_a_family_cut_as_the_record_does(between: str, topology: str, tmp_path: Path) -> None:
    recorded = write("z1-tp2-dp2", topology, tmp_path)
    plain, ruled = without_record("z1-tp2-dp2", tmp_path, between), tmp_path / "ruled"
    report = ucp.convert(plain, ruled, to="deepspeed", topology=topology, patterns=AUTOTP, workers=1, verify=True)
    assert any("the family autotp: chosen with --patterns" in note for note in report.notes)
    files = sorted(path.relative_to(recorded) for path in recorded.rglob("*.pt"))
    assert files == sorted(path.relative_to(ruled) for path in ruled.rglob("*.pt"))
    for file in files:
        a, b = (load_stubbed(folder / file) for folder in (recorded, ruled))
        for key in ("module", "optimizer_state_dict", "optimizer"):
            own = [value.get(key) for value in (a, b)]
            tensors = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in own]
            assert all(torch.equal(x, y) for x, y in zip(*tensors, strict=True))
    index = ucp.inspect(ruled)
    assert index.topology == ucp.Topology.parse(topology)
    assert ucp.diff(source("z1-tp2-dp2"), ruled).equal


@pytest.mark.parametrize(
    ("name", "topology"), [("z1-tp2-dp2", "tp=4"), ("z3-tp2-dp2", "tp=2"), ("z1-pp2-tp2-dp2-bf16", "tp=4,pp=2")]
)
def test_a_universal_checkpoint_for_ranks_reads_back_equal(name: str, topology: str, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    ucp.convert(source(name), dst, to="deepspeed-universal", topology=topology, workers=1, verify=True)
    assert ucp.diff(source(name), dst).equal


def test_a_universal_checkpoint_says_the_cuts_of_a_family(tmp_path: Path) -> None:
    plain, dst = without_record("z1-tp2-dp2", tmp_path, "deepspeed"), tmp_path / "dst"
    ucp.convert(plain, dst, to="deepspeed-universal", topology="tp=2", patterns=AUTOTP, workers=1, verify=True)
    files = [next(dst.rglob(f"{name}/fp32.pt")) for name in ("block.o.weight", "block.q.weight")]
    assert [torch.load(file, weights_only=False)["cat_dim"] for file in files] == [1, 0]


@pytest.mark.parametrize("to", ["deepspeed", "deepspeed-universal"])
def test_a_family_has_nothing_to_say_of_one_tensor_parallel_rank(to: str, tmp_path: Path) -> None:
    plain = without_record("z1-tp2-dp2", tmp_path, "deepspeed")
    topology = "dp=1,zero=1" if to == "deepspeed" else None
    with pytest.raises(IdleOptionError, match="drop --family and --patterns"):
        ucp.convert(plain, tmp_path / "dst", to=to, topology=topology, patterns=AUTOTP, workers=1)


def test_a_family_that_lacks_rules_is_refused_with_all_names(tmp_path: Path) -> None:
    plain = without_record("z1-tp2-dp2", tmp_path, "deepspeed")
    rules = tmp_path / "rules.toml"
    rules.write_text(AUTOTP.read_text().replace("block.o.", "block.p."))
    with pytest.raises(MisfitError, match=r"2 names .*\n.*block.o.weight\n.*block.o.bias"):
        ucp.convert(plain, tmp_path / "dst", to="deepspeed", topology="tp=2,zero=1", patterns=rules, workers=1)


def test_a_degree_that_a_family_cannot_cut_by(tmp_path: Path) -> None:
    plain = without_record("z1-tp2-dp2", tmp_path, "deepspeed")
    with pytest.raises(TopologyError, match=r"(?s)block.q.weight: \[8, 8\] along dim 0.*: 1, 2, 4, 8"):
        ucp.convert(plain, tmp_path / "dst", to="deepspeed", topology="tp=3,zero=1", patterns=AUTOTP, workers=1)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_run_of_megatron_is_cut_by_its_family(tp: int, tmp_path: Path) -> None:
    """Gate and up-projection lie in one tensor, each of them cut for itself."""
    src = FIXTURES.parent / "megatron" / "llama-tp2-pp2-dp2-full" / "checkpoint"
    dst, name = tmp_path / "dst", "decoder.layers.0.mlp.linear_fc1.weight"
    report = ucp.convert(src, dst, to="deepspeed", topology=f"dp=2,tp={tp},zero=1", workers=1, verify=True)
    assert any("from the family llama: " in note for note in report.notes)
    whole = ucp.open(src).read(name, "weight")
    gate, up = whole.chunk(2)
    for rank in range(tp):
        saved = torch.load(next(dst.rglob(f"mp_rank_{rank:02d}_model_states.pt")), weights_only=False)
        expected = torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
        assert torch.equal(saved["module"][name], expected.to(saved["module"][name].dtype))


def test_a_universal_checkpoint_says_how_to_cut_again(tmp_path: Path) -> None:
    zero = write("z1-pp2-tp2-dp2-bf16", "", tmp_path) / "global_step3" / "zero"
    saved = {name: read_archive(str(zero / name / "exp_avg.pt")).root for name in ("1.down.weight", "1.gate_up.weight")}
    assert saved["1.down.weight"]["cat_dim"] == 1  # type: ignore[index]
    assert saved["1.gate_up.weight"]["param_n_sub_params"] == 2  # type: ignore[index]
    qkv = read_archive(str(zero / "1.qkv.weight" / "fp32.pt")).root
    assert isinstance(qkv, dict)
    assert qkv["sub_param_shape"].attribute("shape") == ((8, 4, 4), 8)
    assert str(qkv["sub_param_shape"].made_by) == "deepspeed.checkpoint.universal_checkpoint.SubparamShape"


@pytest.mark.parametrize(
    ("name", "topology", "error", "message"),
    [
        ("z1-pp2-dp2", "dp=1,pp=5,zero=1", TopologyError, "pp=5"),
        ("z1-pp2-dp2", "dp=1,pp=2,zero=2", TopologyError, "got zero=2"),
        ("z1-pp2-dp2", "dp=1,tp=2,pp=2,zero=1", TopologyError, "model family .* 2 tensor-parallel ranks"),
        ("z1-dp4-fp32", "dp=1,tp=2,zero=1", TopologyError, "model family .* 2 tensor-parallel ranks"),
        ("z1-dp4-fp32", "dp=1,pp=2,zero=1", TopologyError, "DeepSpeed pipeline saved"),
        ("z1-dp4-fp32", "dp=2,ep=2,zero=1", TopologyError, "drop ep"),
        ("z1-tp2-dp2", "dp=1,tp=3,zero=1", TopologyError, r"block.q.weight: \[8, 8\] along dim 0"),
        ("z1-tp2-dp2", "dp=1,cp=2,zero=1", TopologyError, "drop cp"),
        ("z1-ep2-dp4", "dp=3,ep=3,zero=1", TopologyError, r"got dp=3,ep=3.*\n.*moe\."),
        ("z1-ep2-dp4", "dp=3,ep=2,zero=1", TopologyError, r"\n  dp=3\n.*ep among 1, 2, 4"),
        ("z1-ep2-dp4", "dp=2,ep=2,zero=3", TopologyError, "experts with ZeRO 3"),
        ("z0-ep2-fp16-one-group", "dp=2,ep=2,zero=1", MisfitError, "only experts"),
    ],
)
def test_what_cannot_be_written(name: str, topology: str, error: type[UcpError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        write(name, topology, tmp_path)


def test_a_gap_between_experts_is_not_written(tmp_path: Path) -> None:
    """DeepSpeed numbers experts without gaps, so that files without expert 1 of 4 could not be read."""
    with pytest.raises(MissingStateError, match=r"deepspeed_experts\.1\n"):
        ucp.convert(source("z1-ep2-dp4"), tmp_path, to="deepspeed", topology="dp=2,zero=0", exclude=["*1*/*"])


@pytest.mark.parametrize(
    ("name", "expected"), [("z1-pp2-dp2", True), ("z1-pp2-tp2-dp2-bf16", True), ("z1-tp2-dp2", False)]
)
def test_a_universal_checkpoint_says_that_it_is_of_a_pipeline(name: str, expected: bool, tmp_path: Path) -> None:
    for number, universal in enumerate([FIXTURES / name / "universal", write(name, "", tmp_path)]):
        ucp.convert(universal, tmp_path / str(number), to="deepspeed-universal", workers=1)
        state = read_archive(str(next((tmp_path / str(number)).glob("*/zero/optimizer_state.pt")))).root
        assert isinstance(state, dict)
        assert ("pipeline" in state) is expected


def test_a_universal_checkpoint_of_a_pipeline_says_why_it_makes_none(tmp_path: Path) -> None:
    universal = write("z1-pp2-dp2", "", tmp_path)
    with pytest.raises(TopologyError, match="layer files"):
        ucp.convert(universal, tmp_path / "b", to="deepspeed", topology="dp=1,pp=2,zero=1", workers=1)
