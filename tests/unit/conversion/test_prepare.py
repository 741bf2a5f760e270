from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

import ucp
from ucp.conversion.options import ConvertOptions, make_options
from ucp.conversion.prepare import SilentObserver, prepare
from ucp.core.index import LostStates
from ucp.errors import MemoryBudgetError, UsageError
from ucp.source.read import index_of
from ucp.source.replica_policy import Drift, resolve_drift
from ucp.source.selection import NameFilter
from ucp.testing.handmade import Shards, make_index, write_checkpoint


@pytest.mark.parametrize("memory", [32 << 20, 100 << 20, 128 << 20, 1 << 30])
@pytest.mark.parametrize("workers", [0, 1, 3, 100])
def test_the_projected_memory_is_within_the_budget(source, memory, workers):
    prepared = prepare(source, ConvertOptions(memory=memory, workers=workers))
    assert 0 < prepared.projected_bytes <= memory
    assert prepared.workers >= 1
    assert prepared.threads >= 1


def test_a_number_of_workers_may_be_left_out(source, monkeypatch):
    assert ucp.plan(source, workers=1).workers == 1
    monkeypatch.setattr("ucp.conversion.prepare.count_cores", lambda: 3)
    assert ucp.plan(source).workers == 3


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
@pytest.mark.parametrize("ask", [make_options, lambda workers: ucp.verify("a", workers=workers)])
def test_a_number_of_workers_is_one_or_more(ask, wrong):
    with pytest.raises(UsageError, match=f"workers, 1 or more, .*got {wrong}"):
        ask(workers=wrong)


def test_too_little_memory_names_the_flag(source):
    with pytest.raises(MemoryBudgetError, match="Raise --memory"):
        prepare(source, ConvertOptions(memory=1 << 20))


def test_a_fingerprint_is_of_what_decides_the_bytes(source):
    same = [{}, {"workers": 1}, {"memory": 64 << 20}, {"resume": True}, {"overwrite": True}]
    others = [
        {"layout": "per-parameter"},
        {"compress": True},
        {"dtypes": {"weight": "bfloat16"}},
        {"exclude": ("norm",)},
    ]
    assert len({prepare(source, ConvertOptions(**options)).fingerprint for options in same}) == 1
    assert len({prepare(source, ConvertOptions(**options)).fingerprint for options in [{}, *others]}) == 5


def test_a_fingerprint_is_of_the_source_as_it_is(source, tmp_path):
    ucp.convert(source, tmp_path / "store")
    before = prepare(tmp_path / "store", ConvertOptions()).fingerprint
    os.utime(tmp_path / "store" / "packs" / "00000.safetensors")
    assert prepare(tmp_path / "store", ConvertOptions()).fingerprint != before


def test_a_fingerprint_is_of_the_index_too(source, tmp_path):
    """The bytes of the tensors are the same, what is said of them is not."""
    ucp.convert(source, tmp_path / "store")
    before = prepare(tmp_path / "store", ConvertOptions()).fingerprint
    manifest = tmp_path / "store" / "ucp.json"
    text = manifest.read_text()
    manifest.write_text(text[: text.rindex(',"xxh3"')].replace('"step":7', '"step":8') + "}")
    assert prepare(tmp_path / "store", ConvertOptions()).fingerprint != before


def test_a_selection_keeps_why_states_are_lost_and_counts_what_it_leaves_out(tmp_path):
    """Names with a colon, and more of them than a message lists; of what is not kept nothing is told."""
    shards = Shards(tmp_path / "source")
    names = [f"w.{n}: odd" for n in range(30)]
    array = np.arange(6, dtype="float32")
    states = {(name, state): shards.whole(array) for name in (*names, "a", "b") for state in ("weight", "exp_avg")}
    shifted = {name: LostStates(reason="shifted", detail="by 3 elements") for name in names}
    for name in names:
        del states[name, "exp_avg"]
    write_checkpoint(replace(make_index(shards.folder, states), lost=shifted))
    kept = NameFilter(include=("w.29*", "a/weight", "b"))
    index = index_of(shards.folder, kept)
    assert index.loss_reasons(["w.29: odd"]) == ("shifted:\n  w.29: odd: by 3 elements",)
    assert index.unselected == 29
    assert list(index.lost) == ["w.29: odd", "a"]
    assert index.lost["a"].is_chosen
    assert index.lost["a"].reason.startswith("exp_avg of these parameters, left out by --include/--exclude")
    assert index_of(shards.folder, NameFilter(include=("*/weight",))).lost == shifted
    assert resolve_drift(index, Drift.FIRST, SilentObserver(), memory=1 << 30).lost == index.lost
