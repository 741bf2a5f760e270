"""A source of made-up tensors, and what a target writes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ucp.contract.protocols import Target
from ucp.contract.registry import engine
from ucp.core.index import Extra, Index, Kind, ParamGroup, StateIndex
from ucp.core.target import TargetOptions, TargetPlan
from ucp.core.tensor import DType, TensorRef
from ucp.core.topology import Topology
from ucp.io.pickle.values import Stub
from ucp.io.torch_file.archive import read_archive
from ucp.testing.handmade import Shards, inline, make_index
from ucp.transfer.output_files import create_file
from ucp.transfer.plan.job import make_job


@dataclass
class Source:
    """A checkpoint of one file of raw float32."""

    root: Path
    shapes: Mapping[str, tuple[int, ...]]
    groups: Sequence[Sequence[str]]
    hypers: Sequence[Mapping[str, object]]
    states: Sequence[Sequence[str]]
    frozen: Sequence[str] = ()
    buffers: Sequence[str] = ()
    steps: Sequence[int | float | None] = ()
    model_dtype: DType | None = None
    extras: Sequence[Extra] = ()
    topology: Topology = field(default_factory=lambda: Topology(dp=4, zero=1))
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrays: dict[str, NDArray[np.float32]] = {}
        states_of = {name: states for names, states in zip(self.groups, self.states, strict=True) for name in names}
        first = 1
        for name, shape in self.shapes.items():
            numel = int(np.prod(shape))
            for state in ("weight", *states_of.get(name, ())):
                values = np.arange(first, first + numel, dtype="<f4") % 251
                self.arrays[f"{name}/{state}"] = values.reshape(shape)
                first += numel

    def index(self) -> Index:
        shards = Shards(self.root)
        states = {}
        for key, array in self.arrays.items():
            name, _, state = key.rpartition("/")
            states[name, state] = shards.whole(array, file="source.bin")
        for names, step in zip(self.groups, self.steps, strict=False):
            if step is not None:
                states |= {(name, "step"): self.step(step) for name in names}
        groups = [
            ParamGroup(params=tuple(names), hyper=hyper) for names, hyper in zip(self.groups, self.hypers, strict=True)
        ]
        made = make_index(self.root, states, extras=self.extras, groups=groups)
        atoms = {name: replace(atom, **self._kind(name)) for name, atom in made.atoms.items()}
        return replace(made, atoms=atoms, topology=self.topology, aliases=self.aliases)

    def _kind(self, name: str) -> dict[str, Any]:
        if name in self.buffers:
            return {"kind": Kind.BUFFER}
        return {"kind": Kind.FROZEN if name in self.frozen else Kind.PARAMETER, "model_dtype": self.model_dtype}

    @staticmethod
    def step(step: float) -> StateIndex:
        return StateIndex.from_tensor(inline(np.array(step, np.int64 if isinstance(step, int) else np.float32)))


ADAM = ("exp_avg", "exp_avg_sq")


def tiny(root: Path, **changes: object) -> Source:
    """Two Adam groups with sizes that no number of ranks divides, a frozen, an empty, a 0-d one and a buffer."""
    given: dict[str, object] = {
        "shapes": {
            "emb": (5, 3),
            "w": (2, 7),
            "frozen": (3, 3),
            "void": (0, 4),
            "gate": (3,),
            "scalar": (),
            "bias": (7,),
            "mean": (2,),
        },
        "groups": [["emb", "w"], ["gate", "scalar", "bias"]],
        "hypers": [{"lr": 0.1, "weight_decay": 0.1, "eps": 1e-8}, {"lr": 0.2, "weight_decay": 0.0, "eps": 1e-8}],
        "states": [ADAM, ADAM],
        "steps": [3.0, 3.0],
        "frozen": ["frozen", "void"],
        "buffers": ["mean"],
    }
    return Source(root, **{**given, **changes})  # type: ignore[arg-type]


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Source]:
    """Makes sources."""
    return lambda **changes: tiny(tmp_path, **changes)


def carry_out(
    source: Source, target: Target, topology: Topology | None, options: TargetOptions, dst: Path
) -> TargetPlan:
    """Write the plan of `target` to `dst`."""
    index = source.index()
    plan = target.plan(index, topology, options)
    job = make_job(index, plan)
    for file in plan.files:
        create_file(dst, file)
    for _ in engine("serial").run(job, dst, job.tasks, workers=1, threads=1):
        pass
    for file in target.seal(index, plan, ()):
        create_file(dst, file)
    return plan


@dataclass
class Written:
    """A destination, read back: every file's value with arrays for tensors."""

    root: Path
    plan: TargetPlan

    def load(self, path: str) -> object:
        return _arrays(read_archive(str(self.root / path)).root)

    def names(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}


def _arrays(value: object) -> object:
    """References replaced by arrays, stubs by (class name, arguments or attributes)."""
    match value:
        case TensorRef():
            data = Path(value.path).read_bytes()
            kinds = {DType.FLOAT32: "<f4", DType.BFLOAT16: "<u2", DType.FLOAT16: "<f2", DType.INT64: "<i8"}
            kind = np.dtype(kinds[value.dtype])
            flat = np.frombuffer(data[value.offset : value.offset + value.extent], kind)
            steps = [step * kind.itemsize for step in value.strides]
            if not value.numel:
                return np.zeros(value.shape, kind)
            return np.lib.stride_tricks.as_strided(flat, value.shape, steps)
        case Stub():
            return (value.made_by.qualname, _arrays(value.state) if value.has_state else value.args)
        case dict():
            return {key: _arrays(item) for key, item in value.items()}
        case list():
            return [_arrays(item) for item in value]
    return value


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Written]:
    """Writes a source through a target, and gives what was written."""

    def written(
        source: Source, target: Target, topology: Topology | None = None, options: TargetOptions | None = None
    ) -> Written:
        root = tmp_path / f"{target.name}-{topology}".replace("=", "").replace(",", "-")
        return Written(root, carry_out(source, target, topology, options or TargetOptions(), root))

    return written
