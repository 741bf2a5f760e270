"""How tensors of local shapes are cut: by attributes, by the rules of a family; and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn, optim

from tests.unit.live.cluster import module
from tests.unit.live.threads import ThreadRanks, run
from ucp.contract.plugins import pattern
from ucp.contract.protocols import SourceOptions
from ucp.core.layout import AxisLayout, Layout
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import LoadError, TopologyError, UsageError
from ucp.live.adapters import LiveModel, LiveRun
from ucp.live.load import load_into
from ucp.live.match.groups import LiveGroup
from ucp.live.model.parallel.place import place_run
from ucp.live.parts import LiveParam, LivePart, LiveTensor
from ucp.live.report import LoadReport
from ucp.live.run.mesh import RunMesh
from ucp.placement.placement import Cluster, Placement
from ucp.source.read import index_of
from ucp.testing.handmade import Shards, make_index, write_checkpoint

LAYER = "model.layers.0."
Q, K, V, OUT = (f"{LAYER}self_attn.{own}_proj.weight" for own in "qkvo")
GATE, UP, DOWN = (f"{LAYER}mlp.{own}_proj.weight" for own in ("gate", "up", "down"))
LLAMA = {
    "model.embed_tokens.weight": (10, 4),
    Q: (16, 4),
    K: (4, 4),
    V: (4, 4),
    OUT: (4, 16),
    GATE: (6, 4),
    UP: (6, 4),
    DOWN: (4, 6),
    f"{LAYER}input_layernorm.weight": (4,),
    f"{LAYER}post_attention_layernorm.weight": (4,),
    "model.norm.weight": (4,),
    "lm_head.weight": (10, 4),
}


class Saved:
    """Tensors of these shapes, each element another number; with moments where asked."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]], states: tuple[str, ...] = ("weight",)) -> None:
        shards, start = Shards(folder), 1
        self.arrays, found = {}, {}
        for name, shape in shapes.items():
            for state in states:
                array = np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
                start += array.size
                self.arrays[name, state] = array
                found[name, state] = shards.whole(array)
            if "exp_avg" in states:
                self.arrays[name, "step"] = np.array(9, dtype=np.float32)
                found[name, "step"] = shards.whole(self.arrays[name, "step"])
        self.path = write_checkpoint(make_index(folder, found))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name, "weight"]


def load(
    path: Path, topology: str | Topology | None, locals_of, *, mark=None, **options
) -> tuple[list[LoadReport], list[nn.Module]]:
    """Load on every rank, and assert that each holds what `locals_of` says. Raises what a rank raises."""

    def one(ranks: ThreadRanks) -> tuple[LoadReport, nn.Module]:
        wanted = locals_of(ranks.rank)
        own = module({name: array.shape for name, array in wanted.items()})
        if mark is not None:
            mark(own)
        report = load_into(own, topology, path, process_group=ranks, **options)
        for name, param in own.named_parameters():
            assert torch.equal(param.detach(), torch.from_numpy(np.ascontiguousarray(wanted[name]))), (ranks.rank, name)
        return report, own

    count = 2
    if topology is not None:
        count = (Topology.parse(topology) if isinstance(topology, str) else topology).ranks
    found = run(count, one)
    for own in found:
        if isinstance(own, Exception):
            raise own
    return [own[0] for own in found], [own[1] for own in found]


def split(array: np.ndarray, parts: int, at: int, dim: int = 0) -> np.ndarray:
    return np.split(array, parts, axis=dim)[at]


def llama(saved: Saved, rank: int, *, tp: int = 4, heads: int = 4) -> dict[str, np.ndarray]:
    """A rank of a Llama in Hugging Face's names: fewer heads of keys and values than ranks lie on neighbours."""
    few = rank * heads // tp
    found = {name: saved[name] for name in LLAMA}
    found |= {name: split(saved[name], tp, rank) for name in (Q,)}
    found |= {name: split(saved[name], heads, few) for name in (K, V)}
    found |= {OUT: split(saved[OUT], tp, rank, 1)}
    return found


def test_heads_that_are_fewer_than_ranks_lie_on_neighbours(tmp_path):
    saved = Saved(tmp_path, LLAMA)
    reports, _ = load(saved.path, "tp=4", lambda rank: llama(saved, rank, heads=2), family="llama")
    assert any(
        note.startswith("layout over the ranks of the run inferred from family llama: chosen with --family")
        for note in reports[0].notes
    )


@pytest.mark.parametrize("chunked", [False, True])
def test_a_dim_that_does_not_divide_is_cut_as_all_ranks_have_it(tmp_path, chunked):
    """5 over 4 is 2, 1, 1, 1 or, as torch.chunk does, 2, 2, 1, 0: ranks 0 and 2 alone could not tell."""
    shapes = {**LLAMA, GATE: (5, 4), UP: (5, 4), DOWN: (4, 5)}
    saved = Saved(tmp_path, shapes)
    edges = [0, 2, 4, 5, 5] if chunked else [0, 2, 3, 4, 5]

    def locals_of(rank: int) -> dict[str, np.ndarray]:
        rows = slice(edges[rank], edges[rank + 1])
        cut = {GATE: saved[GATE][rows], UP: saved[UP][rows], DOWN: saved[DOWN][:, rows]}
        return {**llama(saved, rank), **cut}

    load(saved.path, "tp=4", locals_of, family="llama")


def test_queries_keys_and_values_in_one_tensor_are_cut_apart(tmp_path):
    """GPT-2 keeps [in, out], all queries before all keys before all values."""
    name, proj = "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_proj.weight"
    shapes = {
        "transformer.wte.weight": (10, 8),
        "transformer.wpe.weight": (4, 8),
        name: (8, 24),
        "transformer.h.0.attn.c_attn.bias": (24,),
        proj: (8, 8),
        "transformer.h.0.ln_1.weight": (8,),
        "transformer.h.0.mlp.c_fc.weight": (8, 16),
        "transformer.h.0.mlp.c_proj.weight": (16, 8),
        "transformer.ln_f.weight": (8,),
    }
    saved = Saved(tmp_path / "ckpt", shapes)
    (tmp_path / "mine.toml").write_text('name = "mine"\nextends = ["gpt"]\n[given]\nheads = 2\nhidden = 8\n')

    def locals_of(rank: int) -> dict[str, np.ndarray]:
        found = {own: saved[own] for own in shapes}
        for own in (name, "transformer.h.0.attn.c_attn.bias"):
            found[own] = np.concatenate([split(block, 2, rank, -1) for block in np.split(saved[own], 3, axis=-1)], -1)
        found[proj] = split(saved[proj], 2, rank)
        found["transformer.h.0.mlp.c_fc.weight"] = split(saved["transformer.h.0.mlp.c_fc.weight"], 2, rank, 1)
        found["transformer.h.0.mlp.c_proj.weight"] = split(saved["transformer.h.0.mlp.c_proj.weight"], 2, rank)
        return found

    load(saved.path, "tp=2", locals_of, patterns=tmp_path / "mine.toml")


def marked(**marks: tuple[int, int]):
    """Mark parameters as Megatron does: name to dim and stride."""

    def mark(own: nn.Module) -> None:
        for name, (dim, stride) in marks.items():
            param = own.get_parameter(name)
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride

    return mark


def test_attributes_say_dim_and_blocks_where_no_family_knows_the_names(tmp_path):
    saved = Saved(tmp_path, {"up": (8, 3), "down": (3, 8), "norm": (3,)})

    def locals_of(rank: int) -> dict[str, np.ndarray]:
        gate, up = np.split(saved["up"], 2)
        return {
            "up": np.concatenate([split(gate, 2, rank), split(up, 2, rank)]),
            "down": split(saved["down"], 2, rank, 1),
            "norm": saved["norm"],
        }

    load(saved.path, "tp=2", locals_of, mark=marked(up=(0, 2), down=(1, 1)))


def test_attributes_go_before_rules(tmp_path):
    """A model that cuts columns of what its family cuts by rows."""
    saved = Saved(tmp_path, LLAMA)

    def locals_of(rank: int) -> dict[str, np.ndarray]:
        return {**{name: saved[name] for name in LLAMA}, Q: split(saved[Q], 2, rank, 1)}

    load(saved.path, "tp=2", locals_of, family="llama", mark=marked(**{Q: (1, 1)}))


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_cut_tensor_of_the_shape_of_the_whole_is_refused(tmp_path, stride):
    """A model of twice the width of the checkpoint: what a rank holds has the checkpoint's shape."""
    saved = Saved(tmp_path, {"w": (4, 3)})
    cut = r"w has shape \[4, 3\] .*; tp=2 shard\(.*\[2, 3\] of \[4, 3\]"
    with pytest.raises(LoadError, match=cut):
        load(saved.path, "tp=2", lambda _: {"w": saved["w"]}, mark=marked(w=(0, stride)))


def test_a_marked_tensor_that_its_rule_leaves_whole_on_neighbours_is_loaded(tmp_path):
    """One head of keys and values for two ranks: marked as cut, and each holds all of it."""
    saved = Saved(tmp_path, LLAMA)
    mark = marked(**{K: (0, 1), V: (0, 1)})
    load(saved.path, "tp=2", lambda rank: llama(saved, rank, tp=2, heads=1), family="llama", mark=mark)


def test_dims_count_from_the_end_too(tmp_path):
    saved = Saved(tmp_path, {"w": (2, 4)})
    load(saved.path, "tp=2", lambda rank: {"w": split(saved["w"], 2, rank, 1)}, mark=marked(w=(-1, 1)))


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_a_parameter_has_not_is_refused(tmp_path, dim):
    saved = Saved(tmp_path, {"w": (2, 4)})
    with pytest.raises(UsageError, match=rf"w: partition_dim={dim}, .*-2 to 1"):
        load(saved.path, "tp=2", lambda rank: {"w": split(saved["w"], 2, rank, 1)}, mark=marked(w=(dim, 1)))


def test_blocks_that_do_not_divide_a_dim_are_refused(tmp_path):
    saved = Saved(tmp_path, {"w": (4, 1)})
    with pytest.raises(LoadError, match=r"partition_stride=3 .*dim 0"):
        load(saved.path, "tp=2", lambda rank: {"w": split(saved["w"], 2, rank)}, mark=marked(w=(0, 3)))


def test_gate_and_up_that_megatron_marks_as_one_block_are_two(tmp_path):
    """Up to 0.15 its gated projections have partition_stride 1: the rule knows better than the attribute."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    saved = Saved(tmp_path, {name: (8, 4), "decoder.layers.0.mlp.linear_fc2.weight": (4, 4)})

    def locals_of(rank: int) -> dict[str, np.ndarray]:
        gate, up = np.split(saved[name], 2)
        down = split(saved["decoder.layers.0.mlp.linear_fc2.weight"], 2, rank, 1)
        return {
            name: np.concatenate([split(gate, 2, rank), split(up, 2, rank)]),
            "decoder.layers.0.mlp.linear_fc2.weight": down,
        }

    load(saved.path, "tp=2", locals_of, family="llama", mark=marked(**{name: (0, 1)}))


def test_experts_are_cut_over_ranks_of_their_own(tmp_path):
    """`allreduce = False` marks an expert: cut over etp, of which there are fewer than tp."""
    saved = Saved(tmp_path, {"moe.w": (4, 8), "dense.w": (4, 8)})

    def mark(own: nn.Module) -> None:
        marked(**{"moe.w": (1, 1), "dense.w": (1, 1)})(own)
        own.get_parameter("moe.w").allreduce = False

    def locals_of(rank: int) -> dict[str, np.ndarray]:
        return {"moe.w": split(saved["moe.w"], 2, rank % 2, 1), "dense.w": split(saved["dense.w"], 4, rank, 1)}

    load(saved.path, "tp=4,etp=2", locals_of, mark=mark)


STACKED = "layers.0.experts.up"


def test_experts_in_one_tensor_dealt_out_by_a_map(tmp_path):
    saved = Saved(tmp_path, {STACKED: (3, 2)})
    held = [[2, 0], [0, 0, 1]]
    dealt = {2: 0, 0: [0, 1, 1], 1: 1}
    load(saved.path, "dp=2,ep=2", lambda rank: {STACKED: saved[STACKED][held[rank]]}, placement=dealt)


def test_experts_in_one_tensor_by_a_placement(tmp_path):
    saved = Saved(tmp_path, {STACKED: (3, 2)})
    placement = Placement(cluster=Cluster(nodes=2, slots=3), layers={0: (2, 0, 0, 1, 2, 0)})
    held = [[2, 0, 0], [1, 2, 0]]
    load(saved.path, "dp=2,ep=2", lambda rank: {STACKED: saved[STACKED][held[rank]]}, placement=placement)
    topology = Topology(dp=2, ep=2, placement=placement)
    load(saved.path, topology, lambda rank: {STACKED: saved[STACKED][held[rank]]})
    with pytest.raises(UsageError):
        load(saved.path, topology, lambda rank: {STACKED: saved[STACKED][held[rank]]}, placement=placement)
    with pytest.raises(UsageError):
        load(saved.path, "dp=1,ep=1", lambda rank: {STACKED: saved[STACKED]}, placement=placement)
    with pytest.raises(TopologyError):
        Topology(dp=4, ep=4, placement=placement)


def test_replicas_of_experts_with_names_of_their_own_are_read_once(tmp_path):
    names = [f"layers.0.experts.{expert}.up" for expert in range(3)]
    saved = Saved(tmp_path, dict.fromkeys(names, (64, 32)))
    placement = Placement(cluster=Cluster(nodes=2, slots=2), layers={0: (2, 0, 1, 0)})
    held = [[2, 0], [1, 0]]

    def locals_of(rank: int) -> dict[str, np.ndarray]:
        return {names[at]: saved[names[expert]] for at, expert in enumerate(held[rank])}

    reports, _ = load(saved.path, "dp=2,ep=2", locals_of, placement=placement, exchange="always")
    assert sum(report.nbytes_read for report in reports) == sum(saved[name].nbytes for name in names)


@pytest.mark.parametrize(
    ("dealt", "error", "said"),
    [
        ({4: 0, 3: 0, 2: 1, 1: 1}, UsageError, r"layers.0.experts.up: placement=\{4: ...\}, expected 0 to 3"),
        ({5: {3: 0, 2: 0, 1: 1, 0: 1}}, UsageError, r"\(0\); got one .*layer 5"),
        ({0: [0, 0], 1: [1, 1]}, LoadError, r"layers.0.experts.up: experts 2, 3 are"),
    ],
)
def test_a_map_of_experts_that_is_not_that_of_the_tensor_is_refused(tmp_path, dealt, error, said):
    saved = Saved(tmp_path, {STACKED: (4, 3, 2)})
    with pytest.raises(error, match=said):
        load(saved.path, "dp=2,ep=2", lambda rank: {STACKED: split(saved[STACKED], 2, rank)}, placement=dealt)


@pytest.mark.parametrize(
    ("name", "topology", "error", "said"),
    [
        (STACKED, "dp=2,ep=2", LoadError, r"; ep=2 indexes.*\[2, 3, 2\] of \[4, 3, 2\]"),
        (STACKED, None, UsageError, "no topology"),
        ("w", "dp=2,ep=2", UsageError, r"\(none .*; got .*all layers"),
    ],
)
def test_a_map_of_experts_is_not_dropped_where_all_is_held_or_there_are_none(tmp_path, name, topology, error, said):
    saved = Saved(tmp_path, {name: (4, 3, 2)})
    with pytest.raises(error, match=said):
        load(saved.path, topology, lambda rank: {name: saved[name]}, placement={3: 0, 2: 0, 1: 1, 0: 1})


def test_experts_in_one_tensor_are_cut_over_expert_tensor_ranks_too(tmp_path):
    saved = Saved(tmp_path, {STACKED: (4, 6, 2)})

    def mark(own: nn.Module) -> None:
        marked(**{STACKED: (1, 1)})(own)

    def locals_of(rank: int) -> dict[str, np.ndarray]:
        return {STACKED: split(split(saved[STACKED], 2, rank // 2), 2, rank % 2, 1)}

    load(saved.path, "dp=2,tp=2,ep=2", locals_of, mark=mark)


def test_replicas_of_an_expert_each_get_its_states(tmp_path):
    names = [f"layers.0.experts.{number}.w" for number in range(2)]
    saved = Saved(tmp_path, dict.fromkeys(names, (3,)), states=("weight", "exp_avg", "exp_avg_sq"))
    own = module(dict.fromkeys([f"layers.0.experts.{number}.w" for number in range(3)], (3,)))
    optimizer = optim.Adam(own.parameters())
    report = load_into(own, "dp=1", saved.path, optimizer=optimizer, placement={1: [0, 0], 0: 0})
    for number, whole in enumerate([1, 1, 0]):
        param = own.get_parameter(f"layers.0.experts.{number}.w")
        for state, held in {**optimizer.state[param], "weight": param.detach()}.items():
            assert torch.equal(held, torch.from_numpy(saved.arrays[names[whole], state]))
    assert any("are loaded from one tensor" in note and "replicas" in note for note in report.notes)


WORDS = "model.embed_tokens.weight"


@pytest.mark.parametrize(("tp", "rows"), [(1, 16), (2, 8), (4, 4)])
def test_rows_beyond_the_vocabulary_are_padding(tmp_path, tp, rows):
    """10 words are padded to 16; what the checkpoint lacks is 0, in every state."""
    saved = Saved(tmp_path, LLAMA, states=("weight", "exp_avg", "exp_avg_sq"))

    def one(ranks: ThreadRanks) -> LoadReport:
        cut = llama(saved, ranks.rank, tp=tp, heads=min(tp, 4))
        own = module({**{name: array.shape for name, array in cut.items()}, WORDS: (rows, 4)})
        optimizer = optim.Adam(own.parameters())
        report = load_into(own, f"tp={tp}", saved.path, optimizer=optimizer, family="llama", process_group=ranks)
        param = own.get_parameter(WORDS)
        first = ranks.rank * rows
        kept = max(min(10 - first, rows), 0)
        held_by = {**optimizer.state[param], "weight": param.detach()}
        for state in ("weight", "exp_avg", "exp_avg_sq"):
            held = held_by[state]
            assert held.shape == (rows, 4)
            assert torch.equal(held[:kept], torch.from_numpy(saved.arrays[WORDS, state][first : first + kept]))
            assert not held[kept:].any()
        return report

    reports = run(tp, one)
    assert all(isinstance(own, LoadReport) for own in reports), reports
    assert any(
        f"{WORDS} has 16 rows in the model, with padding, and 10 in the checkpoint" in note
        for note in reports[-1].notes
    )


@pytest.mark.parametrize("rows", [5, 7])
def test_rows_that_no_padding_explains_are_refused(tmp_path, rows):
    """10 words over 2 ranks: 14 rows is no padding to a power of 2; 3 x 5 is too many for one rank."""
    saved = Saved(tmp_path, LLAMA)
    height = rows if rows != 5 else 4
    wrong = {WORDS: np.zeros((height, 4))}
    with pytest.raises(LoadError, match=rf"{WORDS} has shape \[{height}, 4\] .*\[10, 4\]"):
        load(saved.path, "tp=2", lambda rank: {**llama(saved, rank, tp=2), **wrong}, family="llama")


def test_only_a_vocabulary_is_padded(tmp_path):
    saved = Saved(tmp_path, LLAMA)
    with pytest.raises(LoadError, match=rf"{GATE} has shape \[8, 4\] .*\[6, 4\]"):
        load(
            saved.path, "tp=1", lambda rank: {**llama(saved, 0, tp=1, heads=1), GATE: np.zeros((8, 4))}, family="llama"
        )


def test_a_tensor_that_nothing_explains_is_refused_by_name(tmp_path):
    saved = Saved(tmp_path, {"odd": (8, 3), "norm": (3,)})
    found = r"odd .*\[4, 3\] .*\[8, 3\] .*; .* tp=2 .*family= or patterns=, .*tensor_model_parallel and partition_dim"
    with pytest.raises(LoadError, match=found) as raised:
        load(saved.path, "tp=2", lambda rank: {"odd": split(saved["odd"], 2, rank), "norm": saved["norm"]})
    assert "norm has" not in str(raised.value)


def test_without_a_topology_several_ranks_are_told_to_pass_one(tmp_path):
    saved = Saved(tmp_path, {"odd": (8, 3)})
    with pytest.raises(LoadError, match=r"odd .*\[4, 3\] .*\[8, 3\] .*; pass .*topology"):
        load(saved.path, None, lambda rank: {"odd": split(saved["odd"], 2, rank)})


def test_a_cut_that_does_not_leave_the_shape_is_refused(tmp_path):
    saved = Saved(tmp_path, {"w": (8, 3)})
    with pytest.raises(LoadError, match=r"w has shape \[3, 3\] .*\[8, 3\] .*; tp=2 shard\(dim=0\)"):
        load(saved.path, "tp=2", lambda rank: {"w": saved["w"][:3]}, mark=marked(w=(0, 1)))


def test_a_model_that_ties_what_the_checkpoint_does_not_is_refused(tmp_path):
    """Megatron marks the embedding and the head that the first and the last stage share."""
    shapes = {"embed.w": (4, 2), "head.w": (4, 2)}
    saved = Saved(tmp_path / "untied", shapes)

    def mark(own: nn.Module) -> None:
        for param in own.parameters():
            param.shared_embedding = True

    def locals_of(rank: int) -> dict[str, np.ndarray]:
        return {("embed.w", "head.w")[rank]: saved["embed.w"]}

    with pytest.raises(LoadError, match=r"and 2 .*: embed\.w and head\.w"):
        load(saved.path, "pp=2", locals_of, mark=mark)
    tied = Saved(tmp_path / "tied", {"embed.w": (4, 2)})
    load(tied.path, "pp=2", lambda rank: {("embed.w", "head.w")[rank]: tied["embed.w"]}, mark=mark)


def test_what_is_no_module_is_refused(tmp_path):
    saved = Saved(tmp_path, {"w": (2,)})
    with pytest.raises(UsageError, match="; got Linear, str"):
        load_into([nn.Linear(1, 1), "x"], checkpoint=saved.path)
    with pytest.raises(UsageError, match=r"LiveOptimizer, .*; got dict"):
        load_into(module({"w": (2,)}), checkpoint=saved.path, optimizer={})


class Stretches:
    """A hand-written ZeRO-1: each data-parallel rank keeps half of the row-major order of every local tensor."""

    def __init__(self, own: nn.Module, dp: int) -> None:
        self.memory = {
            (name, state): torch.full((param.numel() // 2,), torch.nan)
            for name, param in own.named_parameters()
            for state in ("weight", "exp_avg", "exp_avg_sq")
        }
        self.shapes = {name: tuple(param.shape) for name, param in own.named_parameters()}
        self.dp = dp

    def groups(self) -> list[LiveGroup]:
        return [LiveGroup(params=tuple(self.shapes), hyper={})]

    def params(self, hyper: object) -> list[LiveParam]:
        flat = Layout(flat=(AxisLayout("dp", 2, pattern("chunk", dim=0)),))
        keeps = dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), DType.FLOAT32)
        return [
            LiveParam(name=name, keeps=keeps, part=LivePart(local_shape=shape, layout=flat, coords={"dp": self.dp}))
            for name, shape in self.shapes.items()
        ]

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        return self.memory[name, state]

    def put(self, states: object, counts: object) -> None:
        """Everything is in place already."""

    def put_hyper(self, hyper: object) -> None:
        """It has none."""


def test_an_optimizer_of_ones_own_that_cuts_local_tensors_in_stretches(tmp_path):
    """Tensor-parallel parts, halved over data-parallel ranks: stretches of parts of the whole."""
    saved = Saved(tmp_path, {"up": (8, 3), "down": (3, 8)}, states=("weight", "exp_avg", "exp_avg_sq"))

    def one(ranks: ThreadRanks) -> None:
        dp, tp = divmod(ranks.rank, 2)
        own = module({"up": (4, 3), "down": (3, 4)})
        marked(up=(0, 1), down=(1, 1))(own)
        optimizer = Stretches(own, dp)
        load_into(own, "dp=2,tp=2", saved.path, optimizer=optimizer, process_group=ranks)
        for (name, state), held in optimizer.memory.items():
            part = split(saved.arrays[name, state], 2, tp, 1 if name == "down" else 0)
            assert torch.equal(held, torch.from_numpy(part.reshape(-1)[dp * 6 : dp * 6 + 6].copy())), (name, state)

    assert run(4, one) == [None] * 4


def test_ranks_whose_models_lie_in_other_ways_wait_for_one_another(tmp_path):
    """A stage without distributed tensors beside one that has them: whether names are global differs by rank."""
    saved = Saved(tmp_path, {"w": (4,)})
    index = index_of(saved.path)
    tensor = LiveTensor(names=("w",), dtype=DType.FLOAT32, part=LivePart.full((4,)))
    model = LiveModel(tensors=(tensor,), handles={"w": torch.zeros(4)}, owners={})

    def place(ranks: ThreadRanks) -> tuple[str, ...]:
        live = LiveRun(model=model, has_global_names=ranks.rank == 0, has_global_parts=ranks.rank == 0)
        mesh = RunMesh.from_topology(None, rank=ranks.rank)
        placed = place_run(live, index, mesh, ranks, options=SourceOptions(), rename=None, placement=None)
        return placed.model.tensors[0].global_names

    assert run(2, place) == [("w",), ("w",)]
