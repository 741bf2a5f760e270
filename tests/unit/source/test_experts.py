"""Experts: found by their names, measured, and their faults named; those of the threads that are cited, rebuilt."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import ucp
from ucp.contract.model import sort_by_number
from ucp.core.index import StateIndex
from ucp.errors import MalformedError, MissingLibraryError, UsageError
from ucp.moe.layers import Role, find_layers
from ucp.moe.plot import check_plot, plot_experts
from ucp.testing.handmade import Shards, inline, make_index, write_checkpoint
from ucp_cli.pages.documents import experts_document

Tensors = dict[tuple[str, str], NDArray[np.generic]]
LAYERS, EXPERTS, WIDTH = 2, 4, 8
STATES = ("weight", "exp_avg", "exp_avg_sq")


def make_model(*, stacked: bool = False) -> Tensors:
    """A healthy model: every tensor of it, by parameter and state."""
    random = np.random.default_rng(7)
    tensors: Tensors = {}
    for layer in range(LAYERS):
        base = f"layers.{layer}.moe"
        shapes: dict[str, tuple[int, ...]] = {f"{base}.router.gate.weight": (EXPERTS, WIDTH)}
        if stacked:
            shapes |= {f"{base}.experts.{name}": (EXPERTS, WIDTH, WIDTH) for name in ("w1", "w2")}
        else:
            shapes |= {f"{base}.experts.{e}.{name}": (WIDTH, WIDTH) for e in range(EXPERTS) for name in ("w1", "w2")}
        for param, shape in shapes.items():
            for state in STATES:
                tensors[param, state] = (random.normal(size=shape) ** (2 if state == "exp_avg_sq" else 1)).astype("f4")
    return tensors


def save(folder: Path, tensors: Tensors, steps: dict[str, int] | None = None) -> Path:
    shards = Shards(folder)
    states = {key: shards.whole(array) for key, array in tensors.items()}
    for param, step in (steps or {}).items():
        states[param, "step"] = StateIndex.from_tensor(inline(np.array(step, dtype="f4")))
    write_checkpoint(make_index(folder, states))
    return folder


def of_expert(tensors: Tensors, layer: int, expert: int) -> list[tuple[str, str]]:
    return [key for key in tensors if key[0].startswith(f"layers.{layer}.moe.experts.{expert}.")]


def renumber_ranks(tensors: Tensors) -> None:
    """KempnerForge#202: a rank's experts, numbered from 0, written over those of the other."""
    for layer in range(LAYERS):
        for expert in (2, 3):
            for key in of_expert(tensors, layer, expert):
                del tensors[key]


def leave_ranks_out(tensors: Tensors) -> None:
    """verl#2086: ranks beyond the first of their group save nothing."""
    for key in [*of_expert(tensors, 0, 0), *of_expert(tensors, 0, 1)]:
        del tensors[key]


def lack_projection(tensors: Tensors) -> None:
    for state in STATES:
        del tensors["layers.1.moe.experts.2.w2", state]


def change_dtype(tensors: Tensors) -> None:
    key = ("layers.0.moe.experts.3.w1", "exp_avg")
    tensors[key] = tensors[key].astype("f2")


def add_balancing_bias(tensors: Tensors) -> None:
    tensors["layers.0.moe.expert_bias", "weight"] = np.zeros(EXPERTS - 1, dtype="f4")


def number_twice(tensors: Tensors) -> None:
    """Two names, one number."""
    for param, state in of_expert(tensors, 1, 1):
        tensors[param.replace(".1.w", ".01.w"), state] = tensors[param, state] + np.float32(1)


@pytest.mark.parametrize(
    ("damage", "data"),
    [
        (number_twice, ["layers.1.moe: ", "experts.1.w2 and layers.1.moe.experts.01.w2"]),
        (renumber_ranks, ["layers.0.moe: expected 4 experts", "4 rows", "missing: 2-3"]),
        (leave_ranks_out, ["layers.0.moe", "missing: 0-1"]),
        (lack_projection, ["layers.1.moe", "expert 2 lacks w2"]),
        (change_dtype, ["layers.0.moe", "expert 3", "exp_avg float16", "exp_avg float32"]),
        (add_balancing_bias, ["layers.0.moe.expert_bias", "got 3"]),
    ],
)
def test_what_the_index_tells(damage: Callable[[Tensors], None], data: list[str], tmp_path: Path) -> None:
    """A conversion refuses it until it is accepted; `verify` and `experts` list it."""
    tensors = make_model()
    damage(tensors)
    source = save(tmp_path / "source", tensors)
    (doubt,) = ucp.plan(source, accept=["experts"]).source.doubts
    assert doubt.kind == "experts"
    assert all(datum in doubt.text for datum in data)
    with pytest.raises(MalformedError, match="--accept experts"):
        ucp.convert(source, tmp_path / "out")
    assert ucp.experts(source).problems == ucp.verify(source).experts == (doubt.text,)
    ucp.convert(source, tmp_path / "out", accept=["experts"])
    assert not ucp.verify(tmp_path / "out").ok
    report = ucp.verify(tmp_path / "out", accept=["experts"])
    assert report.ok
    assert any(note.startswith("--accept experts: ") for note in report.notes)


def copy_rank(tensors: Tensors) -> None:
    """megablocks#160: with a distributed optimizer, both ranks saved the experts of one."""
    for layer in range(LAYERS):
        for expert in (0, 1):
            for param, state in of_expert(tensors, layer, expert):
                tensors[param.replace(f"experts.{expert}.", f"experts.{expert + 2}."), state] = tensors[param, state]


def never_load(tensors: Tensors) -> None:
    """Megatron-LM#5844, imp#1190: the converter dropped the experts, and only the rest trains on."""
    for param, state in tensors:
        if ".experts." in param and state != "weight":
            tensors[param, state] = np.zeros_like(tensors[param, state])


def zero_expert(tensors: Tensors) -> None:
    for param in ("w1", "w2"):
        tensors[f"layers.1.moe.experts.3.{param}", "weight"][:] = 0


def lose_numbers(tensors: Tensors) -> None:
    tensors["layers.1.moe.experts.3.w2", "exp_avg"][-1, -1] = np.inf


def negate_square(tensors: Tensors) -> None:
    """No mean of squares is below zero."""
    tensors["layers.0.moe.experts.2.w1", "exp_avg_sq"][0, 0] = -1e-9


def copy_rows(tensors: Tensors) -> None:
    for state in STATES:
        router = tensors["layers.0.moe.router.gate.weight", state]
        router[3] = router[1]


@pytest.mark.parametrize(
    ("damage", "data"),
    [
        (copy_rank, ["layers.0.moe: experts 0,2 are equal", "layers.1.moe: experts 1,3 are equal"]),
        (never_load, ["layers.0.moe: no expert", "layers.1.moe: no expert"]),
        (zero_expert, ["layers.1.moe: the weights of experts 3"]),
        (lose_numbers, ["layers.1.moe: exp_avg of expert 3"]),
        (copy_rows, ["layers.0.moe: rows 1,3"]),
        (negate_square, ["layers.0.moe: exp_avg_sq of expert 2 has negative"]),
    ],
)
def test_what_the_bytes_tell(damage: Callable[[Tensors], None], data: list[str], tmp_path: Path) -> None:
    tensors = make_model()
    damage(tensors)
    source = save(tmp_path / "source", tensors)
    report = ucp.verify(source)
    assert not report.ok
    assert report.problems == report.experts == ucp.experts(source).problems
    assert all(any(line.startswith(datum) for line in report.problems) for datum in data)
    assert "experts" in str(report).splitlines()[0]


@pytest.mark.parametrize("stacked", [False, True])
def test_a_healthy_model_is_silent(stacked: bool, tmp_path: Path) -> None:
    source = save(tmp_path / "source", make_model(stacked=stacked))
    report = ucp.experts(source)
    assert (report.problems, report.notes) == ((), ())
    assert [(layer.number, layer.num_experts, len(layer.experts)) for layer in report.layers] == [(0, 4, 4), (1, 4, 4)]
    assert ucp.verify(source).ok


@pytest.mark.parametrize("stacked", [False, True])
def test_measures_are_those_of_numpy(stacked: bool, tmp_path: Path) -> None:
    tensors = make_model(stacked=stacked)
    (_, layer) = ucp.experts(save(tmp_path / "source", tensors)).layers
    for expert in layer.experts:
        parts = {state: [] for state in STATES}
        for (param, state), array in tensors.items():
            if stacked and param.startswith("layers.1.moe.experts."):
                parts[state].append(array[expert.number])
            elif param.startswith(f"layers.1.moe.experts.{expert.number}."):
                parts[state].append(array)
        weight, momentum, squares = (np.concatenate([part.ravel() for part in parts[state]]) for state in STATES)
        assert expert.weight_norm == pytest.approx(np.linalg.norm(weight), rel=1e-5)
        assert expert.gradient_norm == pytest.approx(np.linalg.norm(momentum), rel=1e-5)
        assert expert.squared_gradient == pytest.approx(squares.mean(), rel=1e-5)
        row = tensors["layers.1.moe.router.gate.weight", "weight"][expert.number]
        assert expert.router_norm == pytest.approx(np.linalg.norm(row), rel=1e-5)


def test_experts_that_stand_out(tmp_path: Path) -> None:
    """Dead, starved and hot are told within a layer, not across layers: gradients of layers differ."""
    tensors = make_model()
    for expert, factor in ((0, 0.0), (1, 1e-3), (3, 1e3)):
        for param, state in of_expert(tensors, 0, expert):
            if state == "exp_avg_sq":
                tensors[param, state] *= np.float32(factor)
    first, second = ucp.experts(save(tmp_path / "source", tensors)).layers
    assert (first.dead, first.starved, first.hot) == ((0,), (1,), (3,))
    assert (second.dead, second.starved, second.hot) == ((), (), ())


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_numbers_that_are_not_finite_are_marked(bad: float, tmp_path: Path) -> None:
    """They neither stop the map nor count in the median by which the others are judged."""
    tensors = make_model()
    for number, state in ((1, "exp_avg_sq"), (2, "weight")):
        for key in of_expert(tensors, 0, number):
            if key[1] == state:
                tensors[key][:] = bad
    report = ucp.experts(save(tmp_path / "source", tensors))
    assert ("!" in str(report)) == (bad != 3e38)
    layer = report.layers[0]
    assert (layer.dead, layer.starved, layer.hot) == ((), (), (1,) if bad == 3e38 else ())
    if find_spec("matplotlib") is not None:
        plot_experts(report, tmp_path / "experts.svg")


@pytest.mark.parametrize("dtype", ["i1", "i8", "u1", "?"])
def test_integers_are_measured(dtype: str, tmp_path: Path) -> None:
    tensors = {key: array for key, array in make_model().items() if key[1] == "weight"}
    for key in of_expert(tensors, 0, 1) + of_expert(tensors, 0, 0):
        tensors[key] = np.arange(tensors[key].size).reshape(tensors[key].shape).astype(dtype)
    tensors["layers.0.moe.tokens_per_expert", "weight"] = np.array([5, 6, 7, 8], dtype="i8")
    first = ucp.experts(save(tmp_path / "source", tensors)).layers[0]
    array = np.arange(WIDTH * WIDTH).astype(dtype).astype("f8")
    assert first.experts[1].weight_norm == pytest.approx(np.sqrt(2) * np.linalg.norm(array))
    assert first.experts[1].numel == 2 * array.size
    assert [expert.tokens for expert in first.experts] == [5, 6, 7, 8]


def test_experts_without_elements(tmp_path: Path) -> None:
    tensors = {key: array for key, array in make_model().items() if key[1] == "weight"}
    for key in [*tensors]:
        if ".experts." in key[0]:
            tensors[key] = tensors[key][:0]
    report = ucp.experts(save(tmp_path / "source", tensors))
    assert [expert.numel for expert in report.layers[0].experts] == [0] * EXPERTS
    assert not find_layers({"mlp.experts.w1": (10**12, 0, 4), "mlp.router.weight": (10**12, 0)})


def test_numbers_of_any_length(tmp_path: Path) -> None:
    """int() refuses more than 4,300 digits."""
    name = f"model.{'9' * 5000}.mlp.experts.0.w1"
    source = save(tmp_path / "source", {(name, "weight"): np.ones((2, 2), dtype="f4")})
    assert ucp.experts(source).layers[0].number is None
    assert sort_by_number([name, "model.10.w", "model.9.w"])[:2] == ["model.9.w", "model.10.w"]


def test_a_model_made_of_a_dense_one(tmp_path: Path) -> None:
    """Its experts are equal until it trains: to be known, but no fault."""
    tensors = {key: array for key, array in make_model().items() if key[1] == "weight"}
    for layer in range(LAYERS):
        for expert in range(1, EXPERTS):
            for param, state in of_expert(tensors, layer, expert):
                tensors[param, state] = tensors[param.replace(f"experts.{expert}.", "experts.0."), state]
    report = ucp.verify(save(tmp_path / "source", tensors))
    assert report.ok
    assert sum("experts 0-3 are equal" in note for note in report.notes) == LAYERS


def test_counts_and_steps_that_differ_are_notes(tmp_path: Path) -> None:
    tensors = make_model()
    for key in [*tensors]:
        if key[0] == "layers.1.moe.router.gate.weight":
            tensors[key] = tensors[key][:3]
    for key in of_expert(tensors, 1, 3):
        del tensors[key]
    steps = {param: 7 if ".experts.2." in param else 9 for param, _ in tensors}
    report = ucp.experts(save(tmp_path / "source", tensors, steps))
    assert not report.problems
    counts, *unequal = report.notes
    assert "3 in 1 layer" in counts
    assert ["9" in note and "7" in note for note in unequal] == [True, True]


def test_a_bias_and_counts_are_shown(tmp_path: Path) -> None:
    tensors = make_model(stacked=True)
    tensors["layers.0.moe.expert_bias_E", "weight"] = np.array([0.1, -0.2, 0.0, 0.3], dtype="f4")
    tensors["layers.0.moe.tokens_per_expert", "weight"] = np.array([5, 6, 7, 8], dtype="f4")
    first, second = ucp.experts(save(tmp_path / "source", tensors)).layers
    assert [expert.balancing_bias for expert in first.experts] == pytest.approx([0.1, -0.2, 0.0, 0.3])
    assert [expert.tokens for expert in first.experts] == [5, 6, 7, 8]
    assert second.experts[0].balancing_bias is None


@pytest.mark.parametrize(
    ("names", "module", "experts"),
    [
        (["decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight"], "decoder.layers.3.mlp", [1]),
        (["decoder.layers.3.mlp.experts.linear_fc2.weight0"], "decoder.layers.3.mlp", [0]),
        (["moe.deepspeed_moe.experts.deepspeed_experts.2.bias"], "moe", [2]),
        (["model.layers.0.block_sparse_moe.experts.7.w1.weight"], "model.layers.0.block_sparse_moe", [7]),
        (["layers.0.moe.routed_experts.inner_experts.w1"], "layers.0.moe", [0, 1]),
        (["model.layers.0.mlp.experts.gate_up_proj"], "model.layers.0.mlp", [0, 1]),
        (["model.layers.0.mlp.shared_experts.up_proj.weight"], None, []),
    ],
)
def test_names(names: list[str], module: str | None, experts: list[int]) -> None:
    layers = find_layers(dict.fromkeys(names, (2, 4, 8)))
    assert [layer.module for layer in layers] == ([] if module is None else [module])
    assert [*(number for layer in layers for number in layer.experts)] == experts


def test_experts_side_by_side_in_a_matrix_are_left_alone() -> None:
    """DBRX keeps [experts * rows, hidden]: nothing says how many experts these are."""
    shapes = {"blocks.0.ffn.experts.mlp.w1": (64, 8), "blocks.0.ffn.router.layer.weight": (4, 8)}
    assert not find_layers(shapes)


def test_routers_of_every_framework() -> None:
    shapes = {"mlp.experts.0.w": (4, 4), "mlp.gate.weight": (1, 4), "mlp.gate.e_score_correction_bias": (1,)}
    (layer,) = find_layers(shapes)
    assert layer.rows == {Role.ROUTER: 1, Role.BALANCE: 1}


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {("l1.weight", "weight"): np.ones((2, 2), dtype="f4")})
    with pytest.raises(UsageError, match="source"):
        ucp.experts(source)


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tensors = make_model()
    renumber_ranks(tensors)
    report = ucp.experts(save(tmp_path / "source", tensors))
    plot_experts(report, tmp_path / "experts.svg")
    assert (tmp_path / "experts.svg").read_text().rstrip().endswith("</svg>")
    for wrong in ("experts.txt", "nowhere/experts.svg"):
        with pytest.raises(UsageError, match=wrong):
            check_plot(tmp_path / wrong)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucp.moe.plot.find_spec", lambda _: None)
    with pytest.raises(MissingLibraryError, match=r"ucp.*plot|plot"):
        check_plot(tmp_path / "experts.svg")


def test_the_document_is_json(tmp_path: Path) -> None:
    """Numbers that JSON cannot express are marked."""
    tensors = make_model()
    lose_numbers(tensors)
    document = experts_document(ucp.experts(save(tmp_path / "source", tensors)))
    expert = json.loads(json.dumps(document, allow_nan=False))["layers"][1]["experts"][3]
    assert expert["gradient_norm"] == {"!float": "inf"}
