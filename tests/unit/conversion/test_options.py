"""What users ask for, in the forms that Python and the shell have for it."""

from __future__ import annotations

import re

import pytest
import torch

import ucp
from ucp.conversion.option import parse_memory
from ucp.conversion.options import make_options
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import TopologyError, UsageError


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.bfloat16, DType.BFLOAT16, "torch.bfloat16"])
def test_dtypes(dtype):
    assert make_options(dtypes={"weight": dtype}).target.dtypes == {"weight": "bfloat16"}


@pytest.mark.parametrize("dtype", ["float", "int32", torch.int64, None, 3])
def test_dtypes_that_nothing_is_cast_to(dtype):
    with pytest.raises(UsageError, match=r"STATE=DTYPE .*got weight="):
        make_options(dtypes={"weight": dtype})


@pytest.mark.parametrize("topology", ["dp=4,zero=3", {"dp": 4, "zero": 3}, Topology(dp=4, zero=3)])
def test_topologies(topology):
    assert make_options(topology=topology).topology == Topology(dp=4, zero=3)


@pytest.mark.parametrize(
    ("topology", "error", "got"),
    [
        (3, UsageError, "3"),
        (["dp=4"], UsageError, r"\['dp=4'\]"),
        ({"dp": "four"}, TopologyError, "'dp=four'"),
        ({"ranks": 4}, TopologyError, "'ranks=4'"),
        ({}, TopologyError, "''"),
        ("", TopologyError, "''"),
    ],
)
def test_topologies_that_are_none(topology, error, got):
    with pytest.raises(error, match=f"got {got}"):
        make_options(topology=topology)


@pytest.mark.parametrize("memory", ["", "lots", "-1G", "0", 0, True, 1.5, None])
def test_memory_that_is_none(memory):
    with pytest.raises(UsageError, match=f"512M .*got '?{re.escape(str(memory))}"):
        parse_memory(memory)


@pytest.mark.parametrize("name", ["drift", "zero_moments", "companions"])
def test_choices(name):
    with pytest.raises(UsageError, match="got 'perhaps'"):
        make_options(**{name: "perhaps"})


@pytest.mark.parametrize("accept", [True, None, 3, [3], "equal", ["all"]])
def test_doubts_that_are_none(accept):
    with pytest.raises(UsageError, match=f"equal-ranks, .*got {re.escape(repr(accept))}"):
        make_options(accept=accept)


@pytest.mark.parametrize("name", ["overwrite", "resume", "verify", "virtual", "fsync"])
def test_what_is_on_or_off_is_true_or_false(name):
    """`overwrite="no"` replaced what was there."""
    with pytest.raises(UsageError, match=name):
        make_options(**{name: "no"})


@pytest.mark.parametrize("path", ["", None, 3, b"run"])
def test_paths_that_are_none(path, tmp_path):
    """An empty variable of the shell was the current folder."""
    with pytest.raises(UsageError, match=repr(path)):
        ucp.convert(path, tmp_path / "out")


@pytest.mark.parametrize("options", [{"names": 3}, {"engine": 3}, {"settings": {1: 1}}])
def test_texts_that_are_none(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        make_options(**options)


def test_extras_of_a_diff_are_compared_or_not():
    with pytest.raises(UsageError, match=r"extras .*got 'no'"):
        ucp.diff("a", "b", extras="no")
