"""Parameters of equal contents in the buckets of several pipeline stages, some of them frozen."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from ucp_formats.megatron.buffers.state_buffer import StateBuffer, StoredRange
from ucp_formats.megatron.torch_dist.buckets import MASTER, Bucket, ParallelDegrees, place_buckets
from ucp_formats.megatron.torch_dist.keys import BucketKey
from ucp_formats.megatron.torch_dist.states import DistStates
from ucp_formats.megatron.torch_dist.unstack import GlobalTensor, StoredBox

from ucp.core.index import WEIGHT
from ucp.core.region import Box
from ucp.core.tensor import DType, TensorRef
from ucp.errors import MalformedError
from ucp.transfer.probe import cast_bits

NAMES = tuple(f"{kind}{layer}" for layer in range(4) for kind in "nw")
"""A norm, all one, and a weight in each of four layers, in registration order."""


class Run:
    """Weights in one file, and the masters of those that are trained."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "data"
        self.path.write_bytes(b"")
        noise = np.random.default_rng(5)
        self.masters = {
            name: np.ones(64, np.float32) if name[0] == "n" else noise.standard_normal(64).astype(np.float32)
            for name in NAMES
        }

    def stored(self, values: np.ndarray, dtype: DType) -> TensorRef:
        at = self.path.stat().st_size
        with self.path.open("ab") as file:
            file.write(cast_bits(values.tobytes(), DType.FLOAT32, dtype))
        return TensorRef(path=str(self.path), offset=at, dtype=dtype, shape=(values.size,), strides=(1,))

    def weights(self) -> dict[str, GlobalTensor]:
        found = {}
        for name, values in self.masters.items():
            piece = StoredBox(Box.full((64,)), self.stored(values, DType.BFLOAT16))
            found[name] = GlobalTensor(name=name, shape=(64,), dtype=DType.BFLOAT16, boxes=[piece])
        return found

    def bucket(self, stage: int, trained: list[str], *, buffer: int = 0, number: int = 0) -> Bucket:
        """Masters of parameters, given in registration order, in its reverse."""
        stretches = tuple(
            StoredRange(64 * at, self.stored(self.masters[name], DType.FLOAT32))
            for at, name in enumerate(reversed(trained))
        )
        key = BucketKey(None, stage, buffer, "(bf16, fp32)", number, "")
        flat = StateBuffer(where=f"stage {stage}", ranges=stretches, numel=64 * len(trained))
        return Bucket(key=key, states={MASTER: flat}, in_chunks=True)

    def place(self, *buckets: Bucket) -> DistStates:
        return place_buckets(buckets, self.weights(), [NAMES], ParallelDegrees(tp=1, expert_tp=1, ep=1), layout="")


def starts(found: DistStates, name: str) -> list[int]:
    """Offsets of the masters of a parameter in the file."""
    return [piece.ref.offset for piece in found.fragments[name][WEIGHT]]


def test_a_frozen_norm_that_leaves_a_choice_is_refused(tmp_path: Path) -> None:
    """Of layer 1 only the norm is trained, or, as well, that of layer 2 is and all of layer 1 is frozen."""
    run = Run(tmp_path)
    buckets = [run.bucket(0, ["n0", "w0"]), run.bucket(1, ["n2", "w2", "n3", "w3"])]
    with pytest.raises(MalformedError, match=r"(?s)1 parameter has .*stage 1, element 192: .*n1, n2.*--no-save-optim"):
        run.place(*buckets)


def test_frozen_parameters_between_known_ones_leave_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    buckets = [run.bucket(0, ["w0", "w1"]), run.bucket(1, ["w2", "n3", "w3"])]
    found = run.place(*buckets)
    assert set(found.fragments) == {"w0", "w1", "w2", "n3", "w3"}
    assert [a < b for a, b in pairwise(starts(found, name)[0] for name in ("w3", "n3", "w2"))] == [True, True]
