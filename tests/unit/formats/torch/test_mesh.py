from __future__ import annotations

from ucp_formats.torch.mesh import mesh_of

from ucp.core.region import Box

RANKS = {0, 1, 2, 3}
QUARTERS = ((4, 4), [Box((row, column), (2, 2)) for row in (0, 2) for column in (0, 2)])
ROWS = ((8, 4), [Box((row, 0), (2, 4)) for row in (0, 2, 4, 6)])
UNEVEN = ((8, 4), [Box((start, 0), (rows, 4)) for start, rows in ((0, 1), (1, 3), (4, 2), (6, 2))])


def mesh(*tensors):
    named = {str(number): own for number, own in enumerate(tensors)}
    return mesh_of(named, dict.fromkeys(named, RANKS), ranks=4)


def test_degrees_that_place_most_tensors_are_those_of_the_run():
    found = mesh(UNEVEN, ROWS, ROWS)
    assert (str(found.topology), sorted(found.layouts)) == ("dp=4", ["1", "2"])


def test_degrees_that_place_a_minority_of_tensors_are_not_those_of_the_run():
    found = mesh(QUARTERS, UNEVEN, UNEVEN)
    assert (str(found.topology), dict(found.layouts)) == ("dp=4", {})
    assert str(mesh(QUARTERS).topology) == "dp=2,tp=2"
