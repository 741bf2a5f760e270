"""Folders of `zero/`: which parameters have one, and which DeepSpeed would mistake for something else."""

from __future__ import annotations

import re

import pytest
from ucp_formats.deepspeed.read.universal.parameter_folders import check_places, state_path

from ucp.errors import DestinationError

STEMS = ("fp32", "exp_avg", "step")


def refused(*names: str) -> str:
    try:
        check_places("global_step3", dict.fromkeys(names, STEMS))
    except DestinationError as error:
        return str(error)
    return ""


def test_the_path_is_the_one_that_deepspeed_joins() -> None:
    assert state_path("t", "a/b.w", "exp_avg") == "t/zero/a/b.w/exp_avg.pt"


def test_folders_in_folders_have_a_place() -> None:
    assert refused("a", "a/b", "a/b/c.w", "a/opt", "d/e", "prompt", "d/prompt") == ""


@pytest.mark.parametrize("inner", ["prompt", "fp32.pt", "x_ptr", "adapter.w"])
def test_what_deepspeed_takes_for_a_file_of_states(inner: str) -> None:
    """It searches for (.+).pt anywhere in the names of a parameter's folder, and opens what comes before as a file."""
    message = refused("a", f"a/{inner}/w", "good")
    assert re.search(rf"; got 1 .*\n  'a/{inner}/w': .*'{inner}' .*'a' ", message)
    assert refused(f"a/{inner}/w", "good") == ""


def test_the_file_of_what_all_share() -> None:
    assert "global_step3/zero/optimizer_state.pt" in refused("optimizer_state.pt")
    assert refused("a/optimizer_state.pt") == ""


def test_all_that_have_none_are_told_with_the_remedy() -> None:
    message = refused("..", "a/./b", "\0", "x" * 300, "w")
    assert "; got 4 " in message
    assert "--to deepspeed" in message


def test_a_state_with_a_folder_in_its_name() -> None:
    with pytest.raises(DestinationError, match="'m/v'"):
        check_places("t", {"w": ("fp32", "m/v")})
