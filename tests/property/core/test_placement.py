"""Laws of placements: exhaustive search, survival by counting, allocation, exchanges, files, migration."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product
from math import comb
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ucp
from ucp.errors import MalformedError, UsageError
from ucp.placement.arrange import (
    allocate,
    balance_nodes,
    group_replicas,
    pack_replicas,
    replicate_busiest,
    spread_replicas,
)
from ucp.placement.forms import FORMS, read_placement, write_placement
from ucp.placement.loads import read_loads
from ucp.placement.migrate import plan_migration
from ucp.placement.place import place
from ucp.placement.placement import Cluster, Placement
from ucp.placement.survival import LostNodes, exchange_slots, mask_of


def masks_of(slots: Sequence[Sequence[int]]) -> list[int]:
    experts = sorted({expert for held in slots for expert in held})
    return [mask_of([node for node, held in enumerate(slots) if expert in held]) for expert in experts]


def survival_by_counting(nodes: int, masks: Sequence[int]) -> tuple[float, ...]:
    rates = []
    for lost in range(nodes + 1):
        sets = [mask_of(chosen) for chosen in combinations(range(nodes), lost)]
        rates.append(sum(all(mask & ~gone for mask in masks) for gone in sets) / len(sets))
    return tuple(rates)


def allocations(total: int, experts: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    if experts == 1:
        yield (total,)
        return
    for first in range(least, total // experts + 1):
        for rest in allocations(total - first, experts - 1, first):
            yield (first, *rest)


def best_survival(nodes: int, slots: int, replicas: Sequence[int]) -> tuple[float, ...]:
    """The most sets of each size that any placement survives, by trying all: experts get sets of nodes.

    Nodes are alike, so the first expert gets the first of them.
    """
    reached = {((0,) * nodes, frozenset[int]())}
    for number, count in enumerate(replicas):
        choices = range(1, 1 << nodes) if number else [(1 << n) - 1 for n in range(1, nodes + 1)]
        reached = {
            (room, frozenset(minimal([*masks, mask])))
            for used, masks in reached
            for mask in choices
            if mask.bit_count() <= count
            and max(room := tuple(u + (mask >> n & 1) for n, u in enumerate(used))) <= slots
        }
    rates = {survival_by_counting(nodes, tuple(masks)) for masks in {masks for _, masks in reached}}
    return tuple(max(rate[lost] for rate in rates) for lost in range(nodes + 1))


def minimal(masks: Sequence[int]) -> list[int]:
    """Masks that contain no other one: only these decide what survives."""
    return [m for m in set(masks) if not any(other != m and other & m == other for other in masks)]


SMALL = [
    (nodes, slots, replicas)
    for nodes, slots, experts in product((2, 3, 4, 5), (1, 2, 3), range(2, 7))
    for replicas in allocations(nodes * slots, experts)
    if (nodes, slots) != (5, 3)  # which takes minutes
]
"""All allocations of up to six experts on two to five nodes (Lazarus' theorem)."""


@pytest.mark.timeout(300)
def test_no_placement_survives_better_than_what_is_chosen() -> None:
    worse = {}
    for nodes, slots, replicas in SMALL:
        (experts,) = ucp.place([replicas], nodes=nodes, slots=slots, threshold=1).layers.values()
        chosen = [experts[start : start + slots] for start in range(0, len(experts), slots)]
        assert sorted(Counter(experts).values()) == list(replicas)
        survival, best = LostNodes.of(nodes).survival(masks_of(chosen)), best_survival(nodes, slots, replicas)
        if any(rate < bound - 1e-9 for rate, bound in zip(survival, best, strict=True)):
            worse[nodes, slots, replicas] = (survival, best)
    assert worse == {}


def test_grouping_alone_is_not_the_best_where_groups_do_not_fit() -> None:
    grouped = group_replicas((2, 2, 2), nodes=3, slots=2)
    assert LostNodes.of(3).survival(masks_of(grouped))[1] < 1
    assert LostNodes.of(3).survival(masks_of(exchange_slots(grouped)))[1] == 1


def test_figures_of_lazarus() -> None:
    sets = LostNodes.of(10)
    ring = [mask_of((node, (node + 1) % 10)) for node in range(10)]
    assert sets.survival(ring)[4] == pytest.approx(25 / 210)
    groups = [mask_of((0, 1)), mask_of((2, 3)), mask_of((4, 5))]
    assert sets.survival(groups)[4] == pytest.approx(129 / 210)
    with pytest.raises(UsageError):  # 30 slots, where the threshold needs 32
        ucp.place([[1.0] * 16], nodes=5, slots=6, threshold=2)


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, (1 << n) - 1), min_size=1))))
def test_survival_is_the_share_of_sets_that_leave_every_expert(case: tuple[int, list[int]]) -> None:
    nodes, masks = case
    assert LostNodes.of(nodes).survival(masks) == pytest.approx(survival_by_counting(nodes, masks))


def test_few_lost_nodes_are_exact_where_sets_are_sampled() -> None:
    nodes = 24
    ring = [mask_of((node, (node + 1) % nodes)) for node in range(nodes)]
    survival = LostNodes.of(nodes).survival(ring)
    assert survival[:3] == (1, 1, 1 - nodes / comb(nodes, 2))
    assert survival[3] == pytest.approx(1 - nodes * (nodes - 3) / comb(nodes, 3), abs=0.03)


LOADS = st.lists(st.floats(0, 1e6), min_size=1, max_size=12)


@example([699051.4224445841] * 3, 1, 3)
@given(LOADS, st.integers(1, 3), st.integers(0, 20))
def test_allocation_uses_all_slots_and_follows_the_loads(loads: list[float], least: int, extra: int) -> None:
    slots = least * len(loads) + extra
    for allocation in (allocate, replicate_busiest):
        replicas = allocation(loads, slots=slots, least=least)
        assert sum(replicas) == slots
        assert min(replicas) >= least
    order = sorted(range(len(loads)), key=lambda expert: (loads[expert], expert))
    shared = allocate(loads, slots=slots, least=least)
    assert [shared[expert] for expert in order] == sorted(shared)


CLUSTERS = st.builds(Cluster, nodes=st.integers(2, 5), gpus=st.integers(1, 2), slots=st.integers(1, 3))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    cluster = draw(CLUSTERS)
    threshold = draw(st.integers(1, 2))
    experts = draw(st.integers(1, max(cluster.num_slots // threshold, 1)))
    layers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3, unique=True))
    loads = {
        layer: draw(st.lists(st.integers(1, 1000), min_size=experts, max_size=experts)) for layer in sorted(layers)
    }
    return place(loads, cluster, threshold=threshold, goal=draw(st.sampled_from(["survival", "balance"])))


@given(placements())
def test_every_expert_is_on_enough_nodes_and_every_slot_is_used(placement: Placement) -> None:
    for layer in placement.layers:
        assert {*placement.layers[layer]} == set(range(len(placement.loads[layer])))
        assert min(mask.bit_count() for mask in placement.masks_of(layer).values()) >= placement.threshold
        assert placement.balance(layer) >= 1 - 1e-9  # type: ignore[operator]  # loads are known
        assert placement.survival()[1] <= placement.survival(layer)[1] + 1e-9


@given(CLUSTERS, st.data())
def test_the_choice_is_never_below_grouping_spreading_or_packing(cluster: Cluster, data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, cluster.num_slots))
    loads = data.draw(st.lists(st.integers(1, 100), min_size=experts, max_size=experts))
    nodes, slots, sets = cluster.nodes, cluster.slots_per_node, LostNodes.of(cluster.nodes)
    shared = allocate(loads, slots=cluster.num_slots, least=1)
    busiest = replicate_busiest(loads, slots=cluster.num_slots, least=1)
    ways = [
        group_replicas(shared, nodes=nodes, slots=slots),
        spread_replicas(shared, nodes=nodes),
        pack_replicas(loads, busiest, nodes=nodes, gpus=cluster.gpus, slots=cluster.slots),
    ]
    chosen = place({0: loads}, cluster, threshold=1)
    score = sets.score(sets.fatal(list(chosen.masks_of(0).values())))
    assert all(score <= sets.score(sets.fatal(masks_of(way))) + 1e-9 for way in ways)
    assert all(Counter(map(len, way)) == {slots: nodes} for way in ways)


@given(CLUSTERS, st.data())
def test_balancing_changes_no_survival(cluster: Cluster, data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, cluster.num_slots))
    loads = data.draw(st.lists(st.integers(1, 100), min_size=experts, max_size=experts))
    slots = spread_replicas(allocate(loads, slots=cluster.num_slots, least=1), nodes=cluster.nodes)
    assert sorted(masks_of(balance_nodes(slots, loads))) == sorted(masks_of(slots))


@settings(max_examples=20)
@given(placements())
def test_every_form_reads_back(placement: Placement) -> None:
    import tempfile

    cluster = placement.cluster
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMS:
            path = Path(folder) / form
            doubled = any(len({*e}) < len(e) for ranks in placement.experts_by_rank.values() for e in ranks)
            if form == "deepspeed" and doubled:  # it holds an expert once on each rank
                with pytest.raises(UsageError):
                    write_placement(placement, path, form)
                continue
            write_placement(placement, path, form)
            rows = {"nodes": cluster.nodes, "gpus": cluster.gpus}
            assert read_placement(path, form, **rows, moe_layers=placement.layers).layers == placement.layers
            layers = read_placement(path, **rows).layers
            expected = list(placement.layers.values())
            if form == "sglang":  # lists all layers, dense ones too
                assert [layers[layer] for layer in placement.layers] == expected
            else:
                assert list(layers.values()) == expected
                assert form == "vllm" or layers.keys() == placement.layers.keys()


@given(st.data())
def test_unequal_ranks_are_kept_by_the_forms_that_list_them(data: st.DataObject) -> None:
    """And refused by those that list slots alone. No form is taken for another one."""
    import tempfile

    nodes, count = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 6))
    owners = [data.draw(st.sets(st.integers(0, nodes - 1), min_size=1)) for _ in range(count)]
    ranks = tuple(tuple(e for e in range(count) if rank in owners[e]) for rank in range(nodes))
    placement = Placement.of_ranks({2: ranks}, nodes=nodes)
    is_uneven = len({*map(len, ranks)}) > 1
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMS:
            path = Path(folder) / form
            if is_uneven and form not in ("ascend", "deepspeed"):
                with pytest.raises(UsageError):
                    write_placement(placement, path, form)
                continue
            write_placement(placement, path, form)
            again = read_placement(path, nodes=nodes, moe_layers=[2])
            assert again.experts_by_rank == {2: ranks} == placement.experts_by_rank


def test_lists_of_tensorrt_llm_may_be_in_lines(tmp_path: Path) -> None:
    text = "num_slots: 4\ninitial_global_assignments:\n  3:\n  - 0\n  - 1\n  - 1\n  - 0\n  4: [1, 0,\n    0, 1]\n"
    (tmp_path / "p").write_text(text)
    found = read_placement(tmp_path / "p", nodes=2)
    assert found.layers == {3: (0, 1, 1, 0), 4: (1, 0, 0, 1)}


def test_forms_are_those_of_the_engines(tmp_path: Path) -> None:
    placement = Placement(cluster=Cluster(nodes=2, slots=2), layers={1: (0, 1, 1, 2)})
    written = {}
    for form in FORMS:
        write_placement(placement, tmp_path / form, form)
        written[form] = (tmp_path / form).read_text()
    assert json.loads(written["sglang"]) == {"physical_to_logical_map": [[0, 1, 2, 0], [0, 1, 1, 2]]}
    assert json.loads(written["vllm"]) == [[0, 1, 1, 2]]
    assert json.loads(written["eplb"])["initial_global_assignments"] == {"1": [0, 1, 1, 2]}
    assert written["trtllm"].splitlines()[:3] == ["num_slots: 4", "initial_global_assignments:", "  1: [0, 1, 1, 2]"]
    assert json.loads(written["ascend"])["layer_list"][0]["device_list"][1] == {"device_id": 1, "device_expert": [1, 2]}
    assert json.loads(written["deepspeed"])["1"]["ranks"][0] == {"rank": 0, "experts": [0, 1]}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("sglang", '{"physical_to_logical_map": [[0, -1]]}'),
        ("vllm", "[[0, 1"),
        ("eplb", "{}"),
        ("trtllm", "num_slots: 4"),
        ("deepspeed", '{"0": {"version": 2, "num_experts": 1, "ep_size": 1, "ranks": []}}'),
        ("ascend", '{"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 1, "device_list": "0"}]}'),
    ],
)
def test_damaged_forms_are_refused(form: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(MalformedError):
        read_placement(tmp_path / "p", form, nodes=1)


@settings(max_examples=40)
@given(placements(), st.data())
def test_a_migration_gives_every_node_what_it_lacks(before: Placement, data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.integers(0, before.cluster.nodes - 1), max_size=before.cluster.nodes - 1))
    left = before.cluster.nodes - len(lost)
    cluster = Cluster(nodes=left, gpus=before.cluster.gpus, slots=before.cluster.slots * before.cluster.nodes)
    after = place(before.loads, cluster, threshold=1)
    migration = plan_migration(before, after, lost=lost, nbytes_per_expert=dict.fromkeys(before.layers, 7))
    assert sorted(migration.nodes) == [node for node in range(before.cluster.nodes) if node not in lost]
    for node, earlier in enumerate(migration.nodes):
        needs = {t.expert for t in migration.transfers if t.node == node}
        for layer in before.layers:
            present = set(before.experts_of(layer=layer, node=earlier))  # type: ignore[arg-type]  # none is new
            wanted = set(migration.placement.experts_of(layer=layer, node=node))
            assert {expert for number, expert in needs if number == layer} == wanted - present
    for transfer in migration.transfers:
        layer, expert = transfer.expert
        holders = {n for n in range(before.cluster.nodes) if expert in before.experts_of(layer=layer, node=n)} - lost
        assert transfer.source in holders if holders else transfer.source is None
    assert migration.nbytes == 7 * len(migration.transfers)


def test_nodes_are_assigned_so_that_fewest_experts_move() -> None:
    before = Placement(cluster=Cluster(nodes=4, slots=2), layers={0: (0, 1, 2, 3, 0, 2, 1, 3)})
    after = Placement(cluster=Cluster(nodes=3, slots=2), layers={0: (1, 2, 0, 3, 1, 0)})
    migration = plan_migration(before, after, lost={2})
    wanted = [set(after.experts_of(layer=0, node=node)) for node in range(3)]
    present = [set(before.experts_of(layer=0, node=node)) for node in (0, 1, 3)]
    fewest = min(sum(len(w - p) for w, p in zip(order, present, strict=True)) for order in permutations(wanted))
    assert len(migration.transfers) == fewest


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(UsageError):
        ucp.place([[1.0] * 8], nodes=2, slots=6)  # 12 slots for 8 experts twice
    with pytest.raises(UsageError):
        ucp.place([[1.0] * 2], nodes=2, slots=6, threshold=3)
    with pytest.raises(UsageError):
        ucp.place([[1.0, float("nan")]], nodes=2, slots=6)
    with pytest.raises(UsageError):
        Placement(cluster=Cluster(nodes=2, slots=1), layers={0: (0, 2)})


def test_loads_of_engines_and_checkpoints(tmp_path: Path) -> None:
    import torch

    counts = torch.tensor([[[0, 0, 0], [1, 2, 3]], [[0, 0, 0], [4, 5, 6]]])
    torch.save({"rank": 0, "logical_count": counts}, tmp_path / "stat.pt")
    slots = torch.tensor([[[1, 2, 3, 4]], [[1, 1, 1, 1]]])
    mapping = torch.tensor([[0, 1, 1, 2]])
    records = [{"forward_pass_id": n, "global_physical_count": row} for n, row in enumerate(slots)]
    torch.save({"records": records, "last_physical_to_logical_map": mapping}, tmp_path / "per_pass.pt")
    lines = [{"record_type": "eplb_load_meta", "version": 1}] + [
        {
            "record_type": "eplb_load_stats",
            "version": 1,
            "step": n,
            "expert_load": row.tolist(),
            "p2l_map": [[0, 1, 1, 2]],
        }
        for n, row in enumerate(slots)
    ]
    (tmp_path / "eplb.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "named.json").write_text('{"7": [1, 2], "5": [3, 4]}')
    assert read_loads(tmp_path / "stat.pt") == {1: (5, 7, 9)}
    assert read_loads(tmp_path / "per_pass.pt") == {0: (2, 7, 5)}
    assert read_loads(tmp_path / "eplb.jsonl") == {0: (2, 7, 5)}
    assert read_loads(tmp_path / "named.json") == {5: (3, 4), 7: (1, 2)}
    for text in ("[]", "[[0, 0]]", '[["a"]]', "[[1, -1]]", '{"x": 3}', "{"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises((UsageError, MalformedError)):
            read_loads(tmp_path / "bad.json")


@settings(max_examples=60, deadline=None)
@given(placements(), st.data(), st.sampled_from([0.0, 0.05, 0.5]))
def test_exchanged_experts_move_less_and_survive_as_well(
    before: Placement, data: st.DataObject, tolerance: float
) -> None:
    loads = {n: data.draw(st.permutations(tokens)) for n, tokens in before.loads.items()}
    cluster = Cluster(nodes=before.cluster.nodes, gpus=before.cluster.gpus, slots=before.cluster.slots + 1)
    after = place(loads, cluster, threshold=1)
    fixed = plan_migration(before, after, lost=set())
    exchanged = plan_migration(before, after, lost=set(), tolerance=tolerance)
    assert len(exchanged.transfers) <= len(fixed.transfers)
    for layer in loads:
        assert exchanged.placement.survival(layer) == pytest.approx(after.survival(layer))
        assert (exchanged.placement.balance(layer) or 0) <= (1 + tolerance) * (after.balance(layer) or 0) * (1 + 1e-9)
        assert sorted(exchanged.placement.layers[layer]) == sorted(after.layers[layer])
    assert exchanged.placement.survival() == pytest.approx(after.survival())


def test_equal_experts_stay_where_they_are() -> None:
    """Of equal loads any order is as balanced: with a tolerance nothing moves, although the plan has another order."""
    cluster = Cluster(nodes=4, slots=2)
    loads = {0: (1.0,) * 8, 1: (1.0,) * 8}
    before = Placement(cluster=cluster, layers={0: (0, 5, 1, 4, 2, 7, 3, 6), 1: (0, 1, 7, 2, 3, 4, 5, 6)})
    after = Placement(cluster=cluster, layers={0: tuple(range(8)), 1: tuple(range(8))}, loads=loads)
    assert plan_migration(before, after, lost=set()).transfers
    assert plan_migration(before, after, lost=set(), tolerance=0.0).transfers == ()
