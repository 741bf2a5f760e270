"""Parts of DTensors by our patterns are those that torch computes."""

from itertools import product

from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ucp.contract.layouts import DTensorPlacement, placements_to_axes
from ucp.core.layout import Layout, compute_local_shape, place

LENGTHS = st.integers(1, 9)


@st.composite
def meshes(draw):
    """A shape, degrees of a mesh, and how each axis of it places a tensor of the shape."""
    shape = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=3)))
    degrees = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    placements = [draw(st.one_of(st.just(Replicate()), st.builds(Shard, dims))) for _ in degrees]
    return shape, degrees, placements


def ours(shape, degrees, placements, coordinate):
    """Local shape and first element by patterns."""
    names = [f"mesh_{at}" for at in range(len(degrees))]
    known = [
        DTensorPlacement(type(p).__name__, getattr(p, "dim", 0), getattr(p, "split_factor", 0)) for p in placements
    ]
    layout = Layout(placements_to_axes(names, degrees, known, "a test"))
    coords = dict(zip(names, coordinate, strict=True))
    return compute_local_shape(layout, shape, coords), [own.box for own in place(layout, shape, coords=coords)]


@given(meshes())
def test_shards_are_those_of_torch(mesh):
    shape, degrees, placements = mesh
    for coordinate in product(*map(range, degrees)):
        held, offset = _compute_local_shape_and_global_offset(shape, degrees, list(coordinate), placements)
        found, boxes = ours(shape, degrees, placements, coordinate)
        assert found == held
        assert [(box.sizes, box.offsets) for box in boxes] == ([] if 0 in held else [(held, offset)])


@given(LENGTHS, st.integers(1, 4), st.integers(2, 4))
def test_fsdp_cuts_what_tensor_parallelism_leaves(rows, dp, tp):
    """`_init_sharded_param` of FSDP2 chunks the local tensor of tensor parallelism; torch.chunk says how."""
    import torch

    assume(dp > 1)
    for tp_rank, dp_rank in product(range(tp), range(dp)):
        left = [*torch.arange(rows).chunk(tp), *[torch.arange(0)] * tp][tp_rank]
        wanted = ([*left.chunk(dp), *[torch.arange(0)] * dp][dp_rank] if len(left) else left).tolist()
        placements = [_StridedShard(0, split_factor=tp), Shard(0)]
        found, boxes = ours((rows,), (dp, tp), placements, (dp_rank, tp_rank))
        assert found == (len(wanted),)
        assert [at for box in boxes for at in range(box.offsets[0], box.stops[0])] == wanted
