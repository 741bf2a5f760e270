"""States that megatron-core wrote shifted: every one is named in data, however few the message for people lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ucp_formats.megatron.torch_dist.shifted import check_masters

from ucp.core.index import AtomIndex, Fragment, Kind, StateIndex
from ucp.core.region import Box
from ucp.core.tensor import DType
from ucp.testing.handmade import Shards

MANY = 30
"""More than a message lists."""
NUMEL, SHIFT = 256, 16


def atom(shards: Shards, name: str, *, shift: int) -> AtomIndex:
    """A parameter whose master, in float32, lies `shift` elements too early beside its float16 weight."""
    weight = np.random.default_rng(len(name)).standard_normal(NUMEL).astype("float16")
    master = np.zeros(NUMEL, "float32")
    master[: NUMEL - shift] = weight[shift:]
    box = Box.full((NUMEL,))
    copies = tuple(
        Fragment(box=box, ref=shards.put(array), replica=number) for number, array in enumerate((master, weight))
    )
    states = {
        "weight": StateIndex(dtype=DType.FLOAT32, global_shape=(NUMEL,), fragments=copies),
        "exp_avg": shards.whole(np.ones(NUMEL, "float32")),
    }
    return AtomIndex(name=name, global_shape=(NUMEL,), kind=Kind.PARAMETER, states=states)


def test_every_shifted_parameter_is_named_with_its_reason(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    names = [f"layer.{n}: odd" for n in range(MANY)]
    atoms = {name: atom(shards, name, shift=SHIFT) for name in names} | {"sound": atom(shards, "sound", shift=0)}
    checked = check_masters(atoms, layout="fully_reshardable", tied=False)
    assert list(checked.lost) == names
    assert {loss.detail for loss in checked.lost.values()} == {f"by {SHIFT} elements"}
    assert not any(loss.is_chosen for loss in checked.lost.values())
    assert all(list(checked.atoms[name].states) == ["weight"] for name in names)
    assert checked.atoms["sound"] is atoms["sound"]
    (line,) = checked.dropped
    assert "(+10 more)" in line
