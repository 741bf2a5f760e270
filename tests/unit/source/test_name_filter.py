from __future__ import annotations

import pytest

from ucp.errors import UsageError
from ucp.source.selection import NameFilter

NAMES = [("layers.0.w", "weight"), ("layers.0.w", "exp_avg"), ("layers.1.w", "weight"), ("head", "weight")]


@pytest.mark.parametrize(
    ("include", "exclude", "wanted"),
    [
        ((), (), [0, 1, 2, 3]),
        (("layers.*",), (), [0, 1, 2]),
        (("layers.*", "head"), ("layers.1.*",), [0, 1, 3]),
        (("*/weight",), (), [0, 2, 3]),
        ((), ("*/exp_avg",), [0, 2, 3]),
        (("layers.[01].w/exp_avg",), (), [1]),
        (("LAYERS.*",), (), []),
    ],
)
def test_a_name_is_kept_when_included_and_not_excluded(include, exclude, wanted):
    names = NameFilter(include=include, exclude=exclude)
    assert [n for n, pair in enumerate(NAMES) if names.keeps(*pair)] == wanted


def test_patterns_that_match_nothing_are_named():
    with pytest.raises(UsageError, match=r"'layer\.\*', 'tail'"):
        NameFilter(include=("head", "layer.*"), exclude=("tail",)).check_used(NAMES)
    NameFilter(include=("head",), exclude=("*/weight",)).check_used(NAMES)


def test_a_part_of_a_name_is_met_with_the_glob_that_matches():
    with pytest.raises(UsageError, match=r"'\*layers\*' matches layers\.0\.w"):
        NameFilter(include=("layers",)).check_used(NAMES)
    with pytest.raises(UsageError, match="'tail'; `ucp inspect`"):
        NameFilter(include=("tail",)).check_used(NAMES)


@pytest.mark.parametrize(
    ("asked", "near"), [("l1.wieght", "'l1.weight'"), ("l1.weight/exp_agv", "'l1.weight/exp_avg'")]
)
def test_a_name_that_is_nearly_right_is_told(asked, near):
    with pytest.raises(UsageError, match=f"'{asked}'; .*{near}"):
        NameFilter(include=(asked,)).check_used([("l1.weight", "weight"), ("l1.weight", "exp_avg"), ("emb", "weight")])
