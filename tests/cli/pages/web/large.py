"""An index of 100,000 tensors on 1,024 ranks: a mixture of experts under ZeRO-1, whose partitions are all different."""

from __future__ import annotations

from math import prod

from ucp_patterns.partition import Partition
from ucp_patterns.shard import Shard
from ucp_patterns.unique import Unique

from ucp.core.index import AtomIndex, Index, Kind, SourceFile, StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.core.topology import Topology

TENSORS = 100_000
TOPOLOGY = Topology(dp=16, tp=8, pp=8, zero=1)
LAYERS = 64
SHARE = 1 << 62


def make_large_index() -> Index:
    """The index; every layer has 1,562 tensors or so, each cut over `tp`, on one stage, and partitioned over `dp`."""
    atoms, start = {}, 0
    shapes = {"w1": (4096, 1024), "w2": (1024, 4096), "w3": (4096, 1024)}
    for number in range(TENSORS):
        layer, rest = divmod(number * LAYERS, TENSORS)
        expert, kind = divmod(rest // LAYERS, 3)
        name = f"model.layers.{layer}.mlp.experts.{expert}.{[*shapes][kind]}.weight"
        shape = [*shapes.values()][kind]
        numel = prod(shape) // 8
        if number * LAYERS // TENSORS != (number - 1) * LAYERS // TENSORS:
            start = 0
        share = 1 + 4096 * 1024 // 8 * (TENSORS // LAYERS + 2) // 16
        layout = Layout(
            (
                AxisLayout("pp", 8, Unique(layer * 8 // LAYERS), "names"),
                AxisLayout("tp", 8, Shard(dim=int(kind == 1)), "family"),
            ),
            (AxisLayout("dp", 16, Partition(start=start, share=share), "param_shapes"),),
        )
        start += numel
        states = {}
        for at, state in enumerate(("weight", "exp_avg", "exp_avg_sq")):
            ref = TensorRef(
                path=f"/run/zero_pp_rank_{number % 128}_mp_rank_{at:02}.pt", offset=0, dtype=DType.FLOAT32, shape=shape,
                strides=contiguous_strides(shape),
            )  # fmt: skip
            states[state] = StateIndex.from_tensor(ref)
        atoms[name] = AtomIndex(name=name, global_shape=shape, kind=Kind.PARAMETER, states=states, layout=layout)
    files = tuple(
        SourceFile(path=f"/run/zero_pp_rank_{rank}_mp_rank_{mp:02}.pt", nbytes=1 << 30, mtime_ns=0, role="states")
        for rank in range(128)
        for mp in range(8)
    )
    return Index(
        path="/run",
        format="deepspeed",
        evidence=(),
        producer="",
        topology=TOPOLOGY,
        step=1000,
        atoms=atoms,
        files=files,
    )
