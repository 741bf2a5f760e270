from __future__ import annotations

import numpy as np
import pytest

from ucp.core.gaps import check_cover
from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box
from ucp.core.tensor import DType
from ucp.errors import CoverError
from ucp.testing.handmade import Shards, make_index


def index_of(tmp_path, boxes, *, shape=(4, 3), overlap=Overlap.EXCLUSIVE, terms=None, replicas=None):
    shards = Shards(tmp_path / "source")
    fragments = tuple(
        Fragment(
            box=box,
            ref=shards.put(np.zeros(box.sizes, "float32"), file=f"{n}.bin"),
            term=terms[n] if terms else 0,
            replica=replicas[n] if replicas else 0,
        )
        for n, box in enumerate(boxes)
    )
    state = StateIndex(dtype=DType.FLOAT32, global_shape=shape, fragments=fragments, overlap=overlap)
    return make_index(shards.folder, {("w", "weight"): state})


WHOLE = Box((0, 0), (4, 3))
TOP, BOTTOM = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))


def test_pieces_that_tile_are_proved(tmp_path):
    check_cover(index_of(tmp_path, [TOP, BOTTOM]))


def test_copies_need_not_tile(tmp_path):
    check_cover(index_of(tmp_path, [WHOLE, TOP, TOP], replicas=[0, 1, 2]))


def test_every_term_of_a_mean_tiles(tmp_path):
    boxes, terms = [WHOLE, TOP, BOTTOM], [0, 1, 1]
    check_cover(index_of(tmp_path, boxes, overlap=Overlap.MEAN, terms=terms))
    with pytest.raises(CoverError, match=r"w/weight .*\[2:4, 0:3\] of \[4, 3\]: .*nothing"):
        check_cover(index_of(tmp_path, boxes[:2], overlap=Overlap.MEAN, terms=terms))


def test_terms_without_a_mean_are_an_overlap(tmp_path):
    with pytest.raises(CoverError, match=r"0\.bin and .*1\.bin"):
        check_cover(index_of(tmp_path, [WHOLE, WHOLE], terms=[0, 1]))


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("box", [Box((3, 0), (2, 3)), Box((0,), (4,)), Box((0, 0, 0), (1, 1, 1))])
def test_a_piece_past_the_shape_is_named(tmp_path, box, replica):
    with pytest.raises(CoverError, match=r"w/weight .*1\.bin, .*\[4, 3\]"):
        check_cover(index_of(tmp_path, [WHOLE, box], replicas=[0, replica]))


def test_no_piece_at_all_is_a_hole(tmp_path):
    with pytest.raises(CoverError, match=r"w/weight .*\[0:4, 0:3\] of \[4, 3\]: .*nothing"):
        check_cover(index_of(tmp_path, []))


def test_nothing_to_hold_needs_no_piece(tmp_path):
    check_cover(index_of(tmp_path, [], shape=(0, 3)))


def test_bytes_add_up(tmp_path):
    index = index_of(tmp_path, [TOP, BOTTOM])
    assert index.nbytes == index.atoms["w"].nbytes == index.atoms["w"].states["weight"].nbytes == 48
