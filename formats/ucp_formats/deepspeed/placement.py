"""Records of which expert-parallel rank holds which stacked experts: `expert_placement` and `affine_maps`.

`ds_autoep_layers` has both since 0.19.8 (checkpoint/autoep_affine.py): the numbers of the experts, and for each
parameter the pieces of the global tensor that this means. They must agree.

>>> by_rank = ((0, 2), (1, 2))
>>> saved = write_affine_map(by_rank, (3, 4))
>>> saved["ranks"][1]["pieces"][1]
{'shape': [1, 4], 'source': [8, [4, 1]], 'dest': [4, [4, 1]], 'locations': [0, 1]}
>>> read_affine_map(saved, "the map") == by_rank
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from ucp.core.tensor import contiguous_strides
from ucp.core.text.typed import convert
from ucp.core.topology import ExpertsByRank
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.fields import Shape, require_integer, require_mapping, require_sequence
from ucp.placement.descriptor import ExpertPlacement
from ucp_formats.deepspeed.tp.layout import AFFINE_VERSION, MisfitError, RefusedError, affine_layout

PLACEMENT = "expert_placement"
"""Key of the numbers of the experts."""
MAPS = "affine_maps"
"""Key of the pieces."""


def divide_evenly(count: int, ep: int) -> ExpertsByRank:
    """The experts of each rank without a record: rank 0 has the first ones, and so on."""
    share = count // ep
    return tuple(tuple(range(rank * share, (rank + 1) * share)) for rank in range(ep))


def read_experts_by_rank(
    layer: Mapping[object, object], names: Sequence[str], count: int, ep: int, where: str
) -> ExpertsByRank:
    """The experts of each rank that `layer`, an entry of `ds_autoep_layers`, records.

    `names`: its stacked parameters. `count`: its experts. `ep`: its ranks. Raises MalformedError for records that
    contradict one another, UnsupportedError.
    """
    maps = require_mapping(layer.get(MAPS) or {}, f"{MAPS} of {where}")
    versions = {key: require_mapping(layer[key], key).get("version") for key in (PLACEMENT, MAPS) if layer.get(key)}
    if newer := [f"{key} of version {version}" for key, version in versions.items() if version != AFFINE_VERSION]:
        raise UnsupportedError(f"expected {PLACEMENT} and {MAPS} of version 1 in {where}; got {', '.join(newer)}")
    params = require_mapping(maps.get("params", {}), f"{MAPS} of {where}")
    if maps and (missing := [name for name in names if name not in params]):
        raise MalformedError(f"expected {MAPS} of {where} to have {', '.join(missing)}; it has not")
    if layer.get(PLACEMENT) is not None:
        by_rank = _read_placement(layer[PLACEMENT], count, ep, where)
    elif maps:
        by_rank = read_affine_map(params[names[0]], f"{MAPS} of {names[0]} in {where}")
    elif count % ep:
        raise MalformedError(f"expected ep_size of {where} to divide num_experts {count}; got {ep}")
    else:
        by_rank = divide_evenly(count, ep)
    rank, local = layer.get("ep_rank"), layer.get("num_local_experts")
    if isinstance(rank, int) and local is not None and (not 0 <= rank < ep or len(by_rank[rank]) != local):
        raise MalformedError(
            f"expected {PLACEMENT} of {where} to give rank {rank} num_local_experts {local}; the ranks have "
            f"{list(map(len, by_rank))} experts. The files are damaged, or from different runs"
        )
    for name in names if maps else ():
        saved = require_mapping(params[name], name)
        shape = tuple(require_integer(n, name) for n in require_sequence(saved.get("logical_shape"), name))
        if shape[:1] != (count,) or (
            saved != write_affine_map(by_rank, shape)
            and read_affine_map(saved, f"{MAPS} of {name} in {where}") != by_rank
        ):
            raise MalformedError(
                f"expected {MAPS} of {name} in {where} to give each rank the experts of {PLACEMENT}: "
                f"{list(map(list, by_rank))}; it gives others. One of the two records is damaged"
            )
    return by_rank


def _read_placement(saved: object, count: int, ep: int, where: str) -> ExpertsByRank:
    try:
        record = convert(saved, ExpertPlacement)
    except ValueError as error:
        raise MalformedError(f"expected {PLACEMENT} of {where} as DeepSpeed 0.19.8 saves it; {error}") from error
    problem = record.problem
    if (record.num_experts, record.ep_size) != (count, ep):
        problem = f"it is of {record.num_experts} experts on {record.ep_size} ranks"
    if problem:
        raise MalformedError(
            f"expected {PLACEMENT} of {where} to put {count} experts on {ep} expert-parallel ranks; {problem}"
        )
    return record.experts_by_rank


def write_affine_map(by_rank: ExpertsByRank, shape: Shape) -> dict[str, object]:
    """The pieces of a tensor [experts, ...] that each rank holds, as DeepSpeed saves them."""
    owners: dict[int, list[int]] = {}
    for rank, experts in enumerate(by_rank):
        for expert in experts:
            owners.setdefault(expert, []).append(rank)
    numel, strides = prod(shape[1:]), list(contiguous_strides(shape))
    ranks = {}
    for rank, experts in enumerate(by_rank):
        # experts that follow one another, each on one rank only, are one piece
        ends = [
            at
            for at, (a, b) in enumerate(pairwise(experts), 1)
            if b != a + 1 or owners[a] != owners[b] or len(owners[a]) > 1
        ]
        shard = (len(experts), *shape[1:])
        pieces = [
            {
                "shape": [stop - start, *shape[1:]],
                "source": [experts[start] * numel, strides],
                "dest": [start * numel, list(contiguous_strides(shard))],
                "locations": owners[experts[start]],
            }
            for start, stop in pairwise([0, *ends, len(experts)] if experts else [])
        ]
        ranks[rank] = {"shard_shape": list(shard), "pieces": pieces}
    return {"logical_shape": list(shape), "ranks": ranks}


def read_affine_map(saved: object, where: str) -> ExpertsByRank:
    """The experts of each rank that the pieces of a tensor [experts, ...] give. Raises MalformedError."""
    records = require_mapping(require_mapping(saved, where).get("ranks"), where).values()
    shapes = [require_sequence(require_mapping(record, where).get("shard_shape"), where) for record in records]
    try:
        layout = affine_layout(saved, [tuple(require_integer(n, where) for n in shape) for shape in shapes], where)
        by_rank = []
        for rank in range(layout.parts):
            boxes = [pair.global_box for pair in layout.regions(rank) if pair.global_box.numel]
            if any(box.sizes[1:] != layout.global_shape[1:] for box in boxes):
                raise MisfitError(f"rank {rank} has parts of experts")
            by_rank.append(tuple(expert for box in boxes for expert in range(box.offsets[0], box.stops[0])))
    except (MisfitError, RefusedError) as error:
        raise MalformedError(f"expected whole experts on each rank in {where}; {error}") from error
    return tuple(by_rank)
