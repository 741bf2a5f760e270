"""Windows that are written here, in every form that the format has, beside a dense checkpoint of the same run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from ucp_formats.moevement.window import read_window

import ucp
from ucp.errors import MalformedError, ReplicaError, SourceError, UnsupportedError
from ucp.testing.handmade import Shards, make_index, write_checkpoint

Array = NDArray[np.generic]
STATES = ("weight", "exp_avg", "exp_avg_sq")
EXPERTS = 4
MODULE = "layers.0"
DTYPES = {"float32": "f32", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of one pipeline stage, and how it writes windows."""

    dp: int = 2
    ep: int = 1
    zero: bool = True
    is_uneven: bool = False
    """Whether ranks own ranges of unequal lengths."""
    version: int = 2
    has_full_shapes: bool = True
    has_scalars: bool = True
    slots: tuple[tuple[str, ...], ...] = (("experts",), ("gate", "non_expert"), ())
    """Kinds of the operators that are active in each iteration."""
    first: int = 1
    """First iteration of the window."""
    seed: int = 0

    def value(self, param: str, state: str, iteration: int) -> Array:
        """A state after an iteration; it changes slowly."""
        rng = np.random.default_rng(crc32(f"{self.seed} {param} {state}".encode()))
        shape = SHAPES[param]
        array = (rng.normal(size=shape) + iteration / 1000 * rng.normal(size=shape)).astype("f4")
        return np.abs(array) if state == "exp_avg_sq" else array

    def operators(self, rank: int) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Name and kind of each operator of a rank, and its names of parameters to those of the model."""
        yield "stage0_non_expert", "non_expert", {name: name for name in SHAPES if "deepspeed_moe" not in name}
        yield "stage0_layer_0_gate", "gate", {"wg.weight": f"{MODULE}.deepspeed_moe.gate.wg.weight"}
        local = EXPERTS // self.ep
        for number in range(local):
            path = f"{MODULE}.deepspeed_moe.experts.deepspeed_experts.{rank % self.ep * local + number}"
            names = {name: f"{path}.{name}" for name in ("weight", "bias")}
            yield f"stage0_layer_0_expert_{number}", "experts", names

    def slot(self, kind: str, rank: int) -> int:
        """Number of the iteration in which operators of that kind are active on a rank."""
        return next(number for number, kinds in enumerate(self.slots) if kind in kinds or f"{kind}@{rank}" in kinds)

    def split(self, param: str, array: Array, rank: int) -> Array | None:
        """The range of a flattened state that a rank owns; None if that has no elements."""
        sharing = [r for r in range(self.dp) if "experts" not in param or r % self.ep == rank % self.ep]
        uneven = self.is_uneven and array.size > 4
        cuts = [0, *(array.size * n // len(sharing) + uneven for n in range(1, len(sharing))), array.size]
        if array.size <= 4:
            cuts = [0] * len(sharing) + [array.size]  # all of it on the last rank
        place = sharing.index(rank)
        part = array.reshape(-1)[cuts[place] : cuts[place + 1]]
        return part if part.size or not array.size else None

    def tensors(
        self, params: dict[str, str], rank: int, iteration: int, *, active: bool
    ) -> Iterator[tuple[dict, Array]]:
        """Descriptors, without places, and elements of an operator's tensors."""
        for name, param in params.items():
            weight = self.value(param, "weight", iteration)
            if not active:
                yield {"key": f"compute_weights.{name}"}, weight.astype(bfloat16)
                continue
            for state in STATES:
                array = self.value(param, state, iteration)
                key = f"params.{name}" if state == "weight" else f"optimizer.{name}.{state}"
                part = self.split(param, array, rank) if self.zero else array
                if part is None:  # as MoEvement writes it: the weight of the model, without a master
                    if state == "weight":
                        yield {"key": key}, weight.astype(bfloat16)
                elif self.zero:
                    shape = {"full_shape": list(array.shape)} if self.has_full_shapes else {}
                    yield {"key": key, "fragment_numel": part.size, **shape}, part
                else:
                    yield {"key": key}, part

    def write(self, folder: Path, rank: int, *, file_rank: int | None = None) -> Path:
        """The file of a rank."""
        data, iterations = b"", []
        for number in range(len(self.slots)):
            operators = {}
            for name, kind, params in self.operators(rank):
                slot, descriptors = self.slot(kind, rank), []
                if slot < number:
                    continue
                for descriptor, array in self.tensors(params, rank, self.first + number, active=slot == number):
                    place = {"offset": len(data), "nbytes": array.nbytes}
                    dtype = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape)}
                    descriptors.append({**descriptor, **dtype, **place})
                    data += array.tobytes()
                operators[name] = {"is_active": slot == number, "tensors": descriptors}
            iterations.append({"iteration": self.first + number, "operators": operators})
        start = self.first - 1 + 2 * len(self.slots)
        metadata: dict[str, object] = {"window_start_iteration": start, "loss_scaler_state": {"dynamic": False}}
        if self.has_scalars:
            metadata["engine_scalars"] = {"global_steps": start}
        header = json.dumps({"metadata": metadata, "iterations": iterations, "byte_order": "little"}).encode()
        path = folder / f"window_rank{rank if file_rank is None else file_rank}.pt"
        path.write_bytes(b"MOEV" + bytes([self.version]) + len(header).to_bytes(8, "little") + header + data)
        return path

    def save(self, folder: Path, files: Sequence[int] = ()) -> Path:
        """The dense checkpoint and the windows of all ranks; the folder of these. `files`: the rank of each file."""
        shards = Shards(folder)
        after = self.first + 2 * len(self.slots)
        states = {(p, s): shards.whole(self.value(p, s, after)) for p in SHAPES for s in STATES}
        write_checkpoint(make_index(folder, states))
        (folder / "moevement").mkdir()
        for number, rank in enumerate(files or range(self.dp)):
            self.write(folder / "moevement", rank, file_rank=number)
        return folder / "moevement"


SHAPES: dict[str, tuple[int, ...]] = {
    "0.lin.weight": (4, 3),
    "0.lin.bias": (3,),
    "0.none": (0, 2),
    f"{MODULE}.deepspeed_moe.gate.wg.weight": (EXPERTS, 3),
}
for _number in range(EXPERTS):
    SHAPES |= {
        f"{MODULE}.deepspeed_moe.experts.deepspeed_experts.{_number}.{_name}": _shape
        for _name, _shape in (("weight", (4, 3)), ("bias", (4,)))
    }

FORMS = {
    "zero": Run(),
    "ranges of unequal lengths": Run(is_uneven=True),
    "no zero": Run(zero=False),
    "version 1": Run(version=1, zero=False),
    "experts on two ranks": Run(ep=2),
    "experts on two ranks, no zero": Run(ep=2, zero=False),
    "two expert-data-parallel ranks": Run(dp=4, ep=2),
    "three ranks": Run(dp=3),
    "no full shapes": Run(has_full_shapes=False),
    "no scalars": Run(has_scalars=False),
    "one iteration": Run(slots=(("experts", "gate", "non_expert"),), first=9),
    "every other slot is empty": Run(slots=((), ("gate",), (), ("non_expert", "experts"), ())),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_state_is_that_of_its_iteration(form: str, tmp_path: Path) -> None:
    run = FORMS[form]
    window = run.save(tmp_path / "run")
    assert ucp.verify(window).ok
    checkpoint, weights = ucp.open(window), ucp.open(window, at=run.first)
    kinds = {
        param: kind for rank in range(run.dp) for _, kind, names in run.operators(rank) for param in names.values()
    }
    assert set(checkpoint) == set(weights) == set(SHAPES)
    for param, kind in kinds.items():
        iteration = run.first + run.slot(kind, 0)
        assert checkpoint.read(param, "step").item() == iteration
        for state in STATES:
            assert np.array_equal(checkpoint.read(param, state).numpy(), run.value(param, state, iteration)), param
        first, expected = weights.read(param).float().numpy(), run.value(param, "weight", run.first)
        assert np.array_equal(first, expected if iteration == run.first else expected.astype(bfloat16).astype("f4"))
    assert any("do not record" in note for note in checkpoint.index.notes) is not run.has_scalars


@pytest.mark.parametrize(("at", "is_active"), [(1, False), (None, True)])
def test_copies_on_data_parallel_ranks_are_compared(at: int | None, is_active: bool, tmp_path: Path) -> None:
    window = Run(zero=False).save(tmp_path / "run")
    path = window / "window_rank1.pt"
    data = bytearray(path.read_bytes())
    for _, name, operator, tensor, ref in read_window(path).tensors():
        if "gate" in name and operator.is_active is is_active and tensor.key.endswith("wg.weight"):
            data[ref.offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(ReplicaError, match=r"window_rank1\.pt"):
        ucp.convert(window, tmp_path / "out", at=at)


def test_no_beginning_of_a_file_is_a_window(tmp_path: Path) -> None:
    path = Run(zero=False, slots=(("experts", "gate", "non_expert"),)).write(tmp_path, 0)
    data = path.read_bytes()
    read_window(path)
    for length in {*range(14), *range(14, len(data), 11), len(data) - 1}:
        path.write_bytes(data[:length])
        with pytest.raises(SourceError):
            read_window(path)


@pytest.mark.parametrize("version", [0, 3, 255])
def test_other_versions_are_refused(version: int, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=str(version)):
        ucp.inspect(Run(version=version).save(tmp_path / "run"))


@pytest.mark.parametrize(
    "run", [Run(), Run(ep=2), Run(ep=2, zero=False), Run(dp=4, ep=2)], ids=["zero", "ep", "ep no zero", "dp4 ep"]
)
def test_files_of_two_ranks_that_are_exchanged_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(MalformedError, match=r"window_rank0\.pt"):
        ucp.inspect(run.save(tmp_path / "run", [1, 0, *range(2, run.dp)]))


@pytest.mark.parametrize(
    "other",
    [
        Run(first=4),
        Run(slots=(("gate", "non_expert"), ("experts",), ())),
        Run(slots=(("experts", "gate", "non_expert"),)),
        Run(ep=2),
    ],
    ids=["later", "other order", "shorter", "other experts"],
)
def test_a_file_of_another_run_is_refused(other: Run, tmp_path: Path) -> None:
    window = Run().save(tmp_path / "run")
    other.write(window, 1)
    with pytest.raises(MalformedError):
        ucp.inspect(window)


def test_ranks_that_order_their_experts_differently_are_refused(tmp_path: Path) -> None:
    """The ranges of an expert are then of two iterations."""
    run = replace(Run(), slots=(("experts@0", "gate"), ("experts@1", "non_expert")))
    with pytest.raises(MalformedError, match=r"experts\.0\.weight: \[1, 2\]"):
        ucp.inspect(run.save(tmp_path / "run"))
