from __future__ import annotations

import re

import pytest

from ucp.conversion.option import find_slurm_part, parse_part
from ucp.errors import UsageError
from ucp.transfer.plan.tasks import Share


def array(own, *, first, last, count, step=1, **more):
    names = {"ID": own, "MIN": first, "MAX": last, "STEP": step, "COUNT": count}
    return {**{f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in names.items()}, **more}


@pytest.mark.parametrize("asked", ["3/8", " 3 / 8 ", (3, 8), "003/008"])
def test_a_part_is_counted_from_one(asked):
    assert parse_part(asked) == Share(3, 8)


@pytest.mark.parametrize(
    "asked",
    ["", "3", "0/8", "9/8", "3/0", "a/b", "-1/4", "1/2/3", (0, 8), (9, 8), (1,), 3, None, "Auto", "1.5/2", "²/3"],
)
def test_what_is_no_part_is_refused(asked):
    with pytest.raises(UsageError, match=f"K/N .*got {re.escape(repr(asked))}"):
        parse_part(asked)


def test_tasks_of_a_step(monkeypatch):
    found = [find_slurm_part({"SLURM_PROCID": str(task), "SLURM_NTASKS": "3"}) for task in range(3)]
    assert found == [Share(1, 3), Share(2, 3), Share(3, 3)]
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "3")
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    assert parse_part("auto") == Share(2, 3)


@pytest.mark.parametrize(
    ("indexes", "step"), [(range(8), 1), (range(1, 9), 1), (range(5, 6), 1), (range(0, 16, 4), 4), (range(3, 10, 2), 2)]
)
def test_tasks_of_an_array(indexes, step):
    said = {"first": indexes[0], "last": indexes[-1], "count": len(indexes), "step": step}
    assert [find_slurm_part(array(own, **said)) for own in indexes] == [
        Share(number, len(indexes)) for number in range(1, len(indexes) + 1)
    ]


def test_a_batch_script_in_an_array_is_one_task_whatever_it_may_start():
    assert find_slurm_part(array(1, first=0, last=3, count=4, SLURM_PROCID="0", SLURM_NTASKS="16")) == Share(2, 4)


def test_steps_in_an_array_are_parts_of_all():
    """Four indexes of three tasks each are twelve parts."""
    found = [
        find_slurm_part(
            array(own, first=0, last=3, count=4, SLURM_STEP_ID="0", SLURM_PROCID=str(task), SLURM_NTASKS="3")
        )
        for own in range(4)
        for task in range(3)
    ]
    assert found == [Share(number, 12) for number in range(1, 13)]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "no SLURM_PROCID"),
        ({"SLURM_PROCID": "0"}, "no SLURM_NTASKS"),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, "SLURM_PROCID=x"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "2"}, "below SLURM_NTASKS"),
        ({"SLURM_ARRAY_TASK_ID": "1"}, "no SLURM_ARRAY_TASK_MIN"),
        (array(1, first=0, last=3, count=4, step=0), "index 1 among 4 from 0 to 3 in steps of 0"),
        (array(7, first=0, last=3, count=4), "index 7 among 4 from 0 to 3 in steps of 1"),
        *((array(own, first=1, last=9, count=3), f"index {own} among 3 from 1 to 9 ") for own in (1, 5, 9)),
    ],
)
def test_what_slurm_does_not_say_is_not_guessed(environment, said):
    with pytest.raises(UsageError, match=f"(?s){said}.*--part"):
        find_slurm_part(environment)
