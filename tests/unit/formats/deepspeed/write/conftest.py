"""A source of made-up tensors, and a writer that carries out a plan without the engine."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ucp.contract.protocols import Target
from ucp.core.index import AtomIndex, Extra, Fragment, Index, Kind, ParamGroup, StateIndex
from ucp.core.region import Box
from ucp.core.target import OutputFile, TargetOptions, TargetPlan
from ucp.core.tensor import DType, InlineTensor, TensorRef, contiguous_strides
from ucp.core.topology import Topology
from ucp.io.pickle.values import Stub
from ucp.io.torch_file.archive import read_archive
from ucp.transfer.plan.job import check_target

Array = NDArray[np.generic]

BF16 = np.dtype("<u2")
"""bf16 kept as its bits; the numbers in these tests are small integers, exact in bf16."""


def to_bf16(array: NDArray[np.float32]) -> Array:
    return (array.astype("<f4").view("<u4") >> 16).astype(BF16)


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
    aliases: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self.path = self.root / "source.bin"
        self.arrays: dict[str, NDArray[np.float32]] = {}
        self._offsets: dict[str, int] = {}
        self._data = bytearray()
        group_of = {name: number for number, names in enumerate(self.groups) for name in names}
        for name, shape in self.shapes.items():
            kinds = ["weight", *(self.states[group_of[name]] if name in group_of else ())]
            for kind in kinds:
                self._add(f"{name}/{kind}", shape)
        self.path.write_bytes(self._data)

    def _add(self, key: str, shape: tuple[int, ...]) -> None:
        numel = int(np.prod(shape))
        first = sum(array.size for array in self.arrays.values()) + 1
        self.arrays[key] = (np.arange(first, first + numel, dtype="<f4") % 251).reshape(shape)
        self._offsets[key] = len(self._data)
        self._data += self.arrays[key].tobytes()

    def index(self) -> Index:
        group_of = {name: number for number, names in enumerate(self.groups) for name in names}
        atoms = {name: self._atom(name, group_of.get(name)) for name in self.shapes}
        return Index(
            path=str(self.root),
            format="test",
            evidence=(),
            producer="test",
            topology=self.topology,
            step=7,
            atoms=atoms,
            groups=tuple(
                ParamGroup(params=tuple(names), hyper=hyper)
                for names, hyper in zip(self.groups, self.hypers, strict=True)
            ),
            aliases=self.aliases or {},
            extras=tuple(self.extras),
        )

    def _atom(self, name: str, group: int | None) -> AtomIndex:
        kind = Kind.BUFFER if name in self.buffers else Kind.FROZEN if name in self.frozen else Kind.PARAMETER
        states = {
            key.removeprefix(f"{name}/"): self._state(key) for key in self.arrays if key.rpartition("/")[0] == name
        }
        if group is not None and self.steps and self.steps[group] is not None:
            states["step"] = self._step(self.steps[group])
        model_dtype = self.model_dtype if kind is not Kind.BUFFER else None
        return AtomIndex(name=name, global_shape=self.shapes[name], kind=kind, states=states, model_dtype=model_dtype)

    def _state(self, key: str) -> StateIndex:
        shape = self.arrays[key].shape
        ref = TensorRef(
            path=str(self.path),
            offset=self._offsets[key],
            dtype=DType.FLOAT32,
            shape=shape,
            strides=contiguous_strides(shape),
        )
        return StateIndex(dtype=DType.FLOAT32, global_shape=shape, fragments=(Fragment(box=Box.full(shape), ref=ref),))

    def _step(self, step: float | None) -> StateIndex:
        dtype = DType.INT64 if isinstance(step, int) else DType.FLOAT32
        ref = InlineTensor(data=struct.pack("<q" if isinstance(step, int) else "<f", step), dtype=dtype)
        return StateIndex(dtype=dtype, global_shape=(), fragments=(Fragment(box=Box((), ()), ref=ref),))


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


def _value_bytes(source: Source, plan: TargetPlan, number: int) -> bytes:
    own = plan.placements[number].slice
    if own.state == "step":
        ref = source.index().atoms[own.param].states["step"].fragments[0].ref
        assert isinstance(ref, InlineTensor)
        return ref.data
    flat = source.arrays[f"{own.param}/{own.state}"].reshape(-1)[own.start : own.stop]
    match own.dtype:
        case DType.FLOAT32:
            return flat.astype("<f4").tobytes()
        case DType.BFLOAT16:
            return to_bf16(flat).tobytes()
        case DType.FLOAT16:
            return flat.astype("<f2").tobytes()
    raise AssertionError(own.dtype)


def carry_out(
    source: Source, target: Target, topology: Topology | None, options: TargetOptions, dst: Path
) -> TargetPlan:
    """Write the plan of `target` to `dst`, checksums included."""
    index = source.index()
    plan = target.plan(index, topology, options)
    check_target(index, plan)
    filled: dict[str, bytearray] = {file.path: _blank(file) for file in plan.files}
    for number, place in enumerate(plan.placements):
        data = _value_bytes(source, plan, number)
        filled[place.path][place.offset : place.offset + len(data)] = data
    for copy in plan.raw:
        data = Path(copy.src.path).read_bytes()[copy.src.offset : copy.src.offset + copy.src.nbytes]
        filled[copy.path][copy.offset : copy.offset + len(data)] = data
    for file in plan.files:
        for part in file.crcs:
            crc = zlib.crc32(filled[file.path][part.start : part.stop])
            for at in part.at:
                filled[file.path][at : at + 4] = struct.pack("<I", crc)
    for file in target.seal(index, plan, ()):
        filled[file.path] = _blank(file)
    for path, written in filled.items():
        (dst / path).parent.mkdir(parents=True, exist_ok=True)
        (dst / path).write_bytes(written)
    return plan


def _blank(file: OutputFile) -> bytearray:
    written = bytearray(file.nbytes)
    for part in file.literals:
        written[part.offset : part.offset + len(part.data)] = part.data
    return written


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
