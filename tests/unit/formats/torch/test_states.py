"""States of optimizers that are no tensors, and tensors that are not plain, in files of torch.save."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ucp
from ucp.core.tensor import DType
from ucp.errors import MalformedError, MisfitError, UnsupportedError


class Subclass(torch.Tensor):
    """A tensor of a class of the user's own."""


def _saved(folder: Path, **states: Any) -> Path:
    """A run whose optimizer has these states of every parameter."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    for own in saved["state"].values():
        own.update(states)
    folder.mkdir(exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": saved}, folder / "checkpoint.pt")
    return folder


@pytest.mark.parametrize(("step", "dtype"), [(3, DType.INT64), (3.0, DType.FLOAT64)])
def test_a_step_of_older_torch_is_a_state(step: float, dtype: DType, tmp_path: Path) -> None:
    checkpoint = ucp.open(_saved(tmp_path, step=step))
    assert checkpoint.index.atoms["weight"].states["step"].dtype is dtype
    assert checkpoint.read("weight", "step").item() == step


@pytest.mark.parametrize(
    "value", [[torch.ones(2)], torch.eye(2).to_sparse(), torch.ones(2, 3).as_subclass(Subclass), "text"]
)
def test_what_cannot_be_a_state_is_refused_by_name(value: object, tmp_path: Path) -> None:
    path = _saved(tmp_path, history=value)
    with pytest.raises(UnsupportedError, match="optimizer/state/0/history "):
        ucp.inspect(path)


@pytest.mark.parametrize(
    ("change", "error", "facts"),
    [
        (lambda state, group: state.update({5: torch.ones(2)}), UnsupportedError, "optimizer/state/0/5"),
        (lambda state, group: group.update(lr=torch.tensor(0.1)), UnsupportedError, "optimizer/param_groups/0/lr "),
        (
            lambda state, group: group["param_names"].reverse(),
            MalformedError,
            r"moments .*\n  weight: \(2, 3\), .*\(2,\)\n",
        ),
    ],
    ids=["state without a name", "setting that is a tensor", "names in another order"],
)
def test_an_optimizer_of_something_else_is_refused(change, error: type, facts: str, tmp_path: Path) -> None:
    path = _saved(tmp_path)
    saved = torch.load(path / "checkpoint.pt")
    change(saved["optimizer"]["state"][0], saved["optimizer"]["param_groups"][0])
    torch.save(saved, path / "checkpoint.pt")
    with pytest.raises(error, match=facts):
        ucp.inspect(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.ones(3).as_subclass(Subclass), "Subclass"),
        (lambda: torch.nn.Parameter(torch.ones(3).as_subclass(Subclass)), "Subclass"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "_rebuild_tensor_v2"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "_rebuild_tensor_v2"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "_rebuild_qtensor"),
        (lambda: torch.eye(3).to_sparse(), "_rebuild_sparse_tensor"),
        (lambda: torch.ones(3, device="meta"), "_rebuild_meta_tensor_no_storage"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu), "_rebuild_tensor_v3"),
        (lambda: torch.ones(3, dtype=torch.complex32), "_rebuild_tensor"),
    ],
)
def test_a_tensor_of_the_model_that_cannot_be_read_is_refused(
    make: Callable[[], torch.Tensor], kind: str, tmp_path: Path
) -> None:
    torch.save({"model": {"odd": make(), "plain": torch.ones(1)}}, tmp_path / "checkpoint.pt")
    with pytest.raises(UnsupportedError, match=rf"(?s) model; .*\n  odd: .*{kind}"):
        ucp.inspect(tmp_path)


@pytest.mark.parametrize("to", ["ucp", "torch"])
def test_lost_states_of_one_parameter_are_told(to: str, tmp_path: Path) -> None:
    path = _saved(tmp_path / "run")
    saved = torch.load(path / "checkpoint.pt")
    whole = saved["optimizer"]["state"].pop(1)
    torch.save(saved, path / "checkpoint.pt")
    done = ucp.convert(path, tmp_path / "all", to=to)
    assert any("without states, which other parameters have" in note and "bias" in note for note in done.notes)

    weight = saved["optimizer"]["state"][0]
    saved["model"]["bias2"] = torch.ones(2)
    saved["optimizer"]["param_groups"][0] |= {"params": [0, 1, 2], "param_names": ["weight", "bias", "bias2"]}
    saved["optimizer"]["state"] = {0: weight, 1: whole, 2: {key: whole[key] for key in ("step", "exp_avg")}}
    torch.save(saved, path / "checkpoint.pt")
    done = ucp.convert(path, tmp_path / "one", to=to)
    assert any("1 parameter lacks states" in text and "bias2: exp_avg_sq" in text for text in done.warnings)


@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("step", [float(2**24 + 1), 2**24 + 1, 1e39])
def test_a_step_that_float32_rounds_is_refused(step: float, to: str, tmp_path: Path) -> None:
    with pytest.raises(MisfitError, match=rf"weight/step = {re.escape(str(step))} in "):
        ucp.plan(_saved(tmp_path, step=step), to=to)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_a_step_in_a_tensor_of_whole_numbers_is_written(dtype: torch.dtype, tmp_path: Path) -> None:
    source = _saved(tmp_path / "source", step=torch.tensor(3, dtype=dtype))
    ucp.convert(source, tmp_path / "out", to="deepspeed-universal", verify=True)
    (written,) = tmp_path.glob("out/*/zero/weight/step.pt")
    assert torch.equal(torch.load(written), torch.tensor(3.0))
