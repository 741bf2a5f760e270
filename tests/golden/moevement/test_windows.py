"""Sparse windows that MoEvement wrote, against the states that the runs recorded; and damaged ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from ucp.errors import (
    IdleOptionError,
    MalformedError,
    MissingFileError,
    SourceError,
    UnsupportedError,
    UsageError,
)

FIXTURES = Path(__file__).parents[3] / "fixtures/moevement"
LOCAL = 2
"""Experts of a rank."""
_HEAD = 13


def window(case: str) -> Path:
    return FIXTURES / case / "checkpoint/moevement"


def truth(case: str, iteration: int) -> dict[str, torch.Tensor]:
    """Parameter, or "parameter|state", to its flattened fp32 elements after an iteration; experts by global number."""
    files = sorted((FIXTURES / case).glob("hist*.pt"))
    ranks_of_stage = len(files) // 2
    parts: dict[str, list[torch.Tensor]] = {}
    for rank, file in enumerate(files):
        history = torch.load(file, weights_only=False)["hist"][iteration]
        for name, tensor in history.items():
            before, experts, after = name.partition("deepspeed_experts.")
            if experts:
                number, _, rest = after.partition(".")
                name = f"{before}{experts}{int(number) + LOCAL * (rank % ranks_of_stage)}.{rest}"  # noqa: PLW2901
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


@pytest.mark.parametrize("case", ["boundary", "ep2-dp2"])
def test_every_parameter_is_that_of_its_iteration(case: str) -> None:
    checkpoint = ucp.open(window(case))
    truths = {iteration: truth(case, iteration) for iteration in (1, 2, 3)}
    dense = ucp.open(FIXTURES / case / "checkpoint")
    assert list(checkpoint) == list(dense)
    slots = set()
    for name, atom in checkpoint.items():
        iteration = atom.index.iteration
        assert iteration is not None
        slots.add(iteration)
        assert atom.global_shape == dense[name].global_shape
        assert set(atom.states) == {"weight", "exp_avg", "exp_avg_sq", "step"}
        assert checkpoint.read(name, "step").item() == iteration
        for state in ("weight", "exp_avg", "exp_avg_sq"):
            key = name if state == "weight" else f"{name}|{state}"
            assert torch.equal(checkpoint.read(name, state).flatten(), truths[iteration][key]), (name, state)
    assert slots == {1, 2}  # the third slot of these windows is empty


@pytest.mark.parametrize("case", ["boundary", "ep2-dp2"])
def test_the_first_iteration_has_all_weights(case: str, tmp_path: Path) -> None:
    """As the model computed with them, once what was active is cast as the run casts it."""
    ucp.convert(window(case), tmp_path / "weights", at=1, dtypes={"weight": "bfloat16"}, verify=True)
    weights, expected = ucp.open(tmp_path / "weights"), truth(case, 1)
    assert weights.step == 1
    for name, atom in weights.items():
        assert atom.states == ("weight",)
        assert torch.equal(weights.read(name).flatten(), expected[name].bfloat16()), name


@pytest.mark.parametrize(("at", "data"), [(2, "--at 1"), (3, "--at 1"), (7, "--at 1")])
def test_of_no_other_iteration(at: int, data: str) -> None:
    with pytest.raises(UsageError, match=data):
        ucp.inspect(window("boundary"), at=at)


def test_its_own_files_are_read() -> None:
    assert not any("window_rank" in note for note in ucp.inspect(window("boundary")).notes)


def test_what_goes_where(tmp_path: Path) -> None:
    """Mixed iterations are marked, and go where a parameter has its own step; never into a group of one step."""
    report = ucp.convert(window("boundary"), tmp_path / "atoms", verify=True)
    assert any("iterations 1 to 3" in note for note in report.notes)
    ucp.convert(
        window("boundary"), tmp_path / "out", to="deepspeed", topology="dp=1,zero=1", step="newest", verify=True
    )
    ucp.convert(
        window("boundary"),
        tmp_path / "new",
        to="deepspeed",
        topology="dp=1,zero=1",
        at=1,
        optimizer="zero",
        verify=True,
    )
    with pytest.raises(SourceError, match="--exact"):
        ucp.convert(window("boundary"), tmp_path / "out", exact=True)
    with pytest.raises(IdleOptionError, match="--at"):
        ucp.inspect(FIXTURES / "boundary/checkpoint", at=1)


def test_saved_after_its_last_step() -> None:
    """The bytes of 30 of its 48 tensors are of later iterations than their labels."""
    with pytest.raises(MalformedError, match=r"window_rank0\.pt(?s:.*)step 6(?s:.*)after 7"):
        ucp.inspect(window("off-boundary"))


def test_what_is_not_proved_is_told() -> None:
    assert any("no checksums" in note and "peer" in note for note in ucp.verify(window("ep2-dp2")).notes)


def test_ranges_of_a_peer() -> None:
    """What MoEvement ships: with data parallelism, the masters of the first iteration are the peer's."""
    with pytest.raises(MalformedError) as error:
        ucp.inspect(window("ep2-dp2-as-shipped"))
    for rank in range(4):
        assert f"window_rank{rank}.pt" in str(error.value)
    assert not ucp.verify(window("ep2-dp2-as-shipped")).ok


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / "ep2-dp2/checkpoint", tmp_path / "checkpoint")
    return tmp_path / "checkpoint/moevement"


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a window's file."""
    data = path.read_bytes()
    length = int.from_bytes(data[5:_HEAD], "little")
    header = json.loads(data[_HEAD : _HEAD + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(data[:5] + len(text).to_bytes(8, "little") + text + data[_HEAD + length :])


def operators(header: dict[str, Any], iteration: int) -> dict[str, Any]:
    return next(entry["operators"] for entry in header["iterations"] if entry["iteration"] == iteration)


def activate_twice(header: dict[str, Any]) -> None:
    operators(header, 2)["stage0_layer_0_expert_0"] = operators(header, 1)["stage0_layer_0_expert_0"]


def shorten_fragment(header: dict[str, Any]) -> None:
    tensor = operators(header, 1)["stage0_layer_0_expert_0"]["tensors"][0]
    tensor["shape"], tensor["nbytes"], tensor["fragment_numel"] = [255], 1020, 255


def lose_operator(header: dict[str, Any]) -> None:
    del operators(header, 1)["stage0_layer_0_expert_1"]


def skip_iteration(header: dict[str, Any]) -> None:
    header["iterations"][1]["iteration"] = 9


def grow_layers(header: dict[str, Any]) -> None:
    operators(header, 1)["stage0_layer_9_gate"] = operators(header, 1)["stage0_layer_0_gate"]


def freeze_master(header: dict[str, Any]) -> None:
    operators(header, 1)["stage0_layer_0_expert_0"]["is_active"] = False


def shift(header: dict[str, Any]) -> None:
    operators(header, 1)["stage0_layer_0_expert_0"]["tensors"][1]["offset"] += 4


def lose_weight(header: dict[str, Any]) -> None:
    operators(header, 1)["stage0_layer_0_expert_0"]["tensors"][0]["key"] = "params.weighs"


def lose_shape(header: dict[str, Any]) -> None:
    tensor = operators(header, 1)["stage0_layer_0_expert_0"]["tensors"][2]
    del tensor["full_shape"], tensor["fragment_numel"]


def rename_state(header: dict[str, Any]) -> None:
    operators(header, 1)["stage0_layer_0_expert_0"]["tensors"][2]["key"] = "optimizer.weight.exp_avo"


def write_big_endian(header: dict[str, Any]) -> None:
    header["byte_order"] = "big"


def empty_window(header: dict[str, Any]) -> None:
    header["iterations"] = []


@pytest.mark.parametrize(
    ("change", "error", "data"),
    [
        (activate_twice, MalformedError, r"experts\.0\.weight: \[1, 2\]"),
        (shorten_fragment, MalformedError, "255"),
        (lose_operator, MalformedError, r"experts\.1\.weight"),
        (skip_iteration, MalformedError, r"\[1, 9, 3\]"),
        (grow_layers, MalformedError, "stage0_layer_9_gate"),
        (freeze_master, MalformedError, "stage0_layer_0_expert_0"),
        (shift, MalformedError, "params.bias"),
        (lose_weight, MalformedError, "weighs?"),
        (lose_shape, MalformedError, "exp_avg"),
        (rename_state, MalformedError, "exp_avo"),
        (write_big_endian, UnsupportedError, "big-endian"),
        (lambda header: header.pop("metadata"), MalformedError, "metadata"),
    ],
)
def test_damaged_headers(
    change: Callable[[dict[str, Any]], None], error: type[Exception], data: str, copy: Path
) -> None:
    edit(copy / "window_rank0.pt", change)
    with pytest.raises(error, match=data):
        ucp.inspect(copy)


def test_a_window_that_does_not_say_when_it_was_saved(copy: Path) -> None:
    for rank in range(4):
        edit(copy / f"window_rank{rank}.pt", lambda header: header["metadata"].pop("engine_scalars"))
    assert any("4 files" in note for note in ucp.inspect(copy).notes)


def test_before_the_first_window(copy: Path) -> None:
    for rank in range(4):
        path = copy / f"window_rank{rank}.pt"
        edit(path, empty_window)
        data = path.read_bytes()
        path.write_bytes(data[: _HEAD + int.from_bytes(data[5:_HEAD], "little")])
    with pytest.raises(UnsupportedError, match="window_rank"):
        ucp.inspect(copy)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:20],
        lambda data: data[:4],
        lambda data: b"",
        lambda data: b"PK\3\4" + data[4:],
        lambda data: data[:4] + b"\3" + data[5:],
        lambda data: data[:5] + b"\xff" * 8 + data[13:],
        lambda data: data[:13] + b"[" * (len(data) - 13),
    ],
)
def test_torn_files(damage: Callable[[bytes], bytes], copy: Path) -> None:
    path = copy / "window_rank2.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=r"window_rank2\.pt"):
        ucp.inspect(copy)


def test_files_of_two_stages_that_are_exchanged(copy: Path) -> None:
    for a, b in ((0, 9), (2, 0), (9, 2)):
        (copy / f"window_rank{a}.pt").rename(copy / f"window_rank{b}.pt")
    with pytest.raises(MalformedError, match="stage 0: ranks 1, 2"):
        ucp.inspect(copy)


def test_missing_files(copy: Path) -> None:
    (copy / "window_rank1.pt").unlink()
    with pytest.raises(MissingFileError, match=r"window_rank1\.pt"):
        ucp.inspect(copy)


def test_without_the_dense_checkpoint(copy: Path, tmp_path: Path) -> None:
    shutil.copytree(copy, tmp_path / "alone/moevement")
    with pytest.raises(MissingFileError, match="alone"):
        ucp.inspect(tmp_path / "alone/moevement")
