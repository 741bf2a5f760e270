"""`ucp.stream` with several ranks: each reads a part of what they hold alike."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ucp
from tests.unit.live.streaming.test_stream import Model, save
from tests.unit.live.threads import ThreadRanks, run
from ucp.errors import LoadError, MissingFileError, UsageError
from ucp.streaming import ring, share, stream

TOKENS = torch.arange(12).reshape(3, 4)


def start(path: Path, ranks: ThreadRanks, kind: str = "", exchange: str = "always") -> tuple[nn.Module, ucp.Stream]:
    with torch.device("meta"):
        model = Model(kind)
    return model, ucp.stream(model, f"dp={ranks.count}", path, process_group=ranks, exchange=exchange)  # type: ignore[arg-type]  # a str


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", ["", "rows"])
def test_each_rank_reads_its_part(kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "_PART", 128)  # many windows
    model = Model(kind)
    path = save(model, tmp_path)
    expected = model(TOKENS)

    def work(ranks: ThreadRanks) -> tuple[list[Tensor], int]:
        streamed, opened = start(path, ranks, kind)
        outputs = [streamed(TOKENS) for _ in range(3)]
        opened.close()
        return outputs, opened.nbytes_read - opened.cache_misses * 2 * 8 * 16 * 4  # experts are read directly

    results = run(count, work)
    assert not any(isinstance(result, Exception) for result in results), results
    assert all(torch.equal(output, expected) for outputs, _ in results for output in outputs)
    shares = [nbytes_read for _, nbytes_read in results]
    dense = sum(param.nbytes for name, param in model.layers[0].named_parameters() if ".experts." not in name)
    assert sum(shares) == (2 + 3 * 5) * dense  # the layers of a pass, and those that are read ahead, once in all
    assert max(shares) < sum(shares) * 0.7


def test_without_exchange_each_rank_is_on_its_own(tmp_path: Path) -> None:
    model = Model()
    path = save(model, tmp_path)
    expected = model(TOKENS)

    def work(ranks: ThreadRanks) -> int:
        streamed, opened = start(path, ranks, exchange="auto")
        assert all(torch.equal(streamed(TOKENS), expected) for _ in range(1 + ranks.rank))
        opened.close()
        return opened.nbytes_read * 5 // opened.nbytes

    assert run(2, work) == [7, 12]


def test_all_ranks_learn_of_a_failure(tmp_path: Path) -> None:
    path = save(Model(), tmp_path)

    def fail(*_: object) -> int:
        raise MissingFileError("gone")

    def work(ranks: ThreadRanks) -> None:
        streamed, opened = start(path, ranks)
        if ranks.rank == 1:
            opened._reader._read = fail  # type: ignore[method-assign]  # reads of this rank fail from now on
        try:
            for _ in range(2):
                streamed(TOKENS)
        finally:
            opened.close()

    assert [type(error) for error in run(2, work)] == [LoadError, MissingFileError]


def test_layers_out_of_step_are_refused(tmp_path: Path) -> None:
    path = save(Model(), tmp_path)

    def work(ranks: ThreadRanks) -> None:
        streamed, opened = start(path, ranks)
        try:
            streamed.layers[3 + ranks.rank](torch.zeros(1, 8))  # type: ignore[index,operator]  # a list of modules
        finally:
            opened.close()

    assert [type(error) for error in run(2, work)] == [UsageError] * 2


@pytest.mark.parametrize("fails", ["load", "read ahead"])
def test_a_stream_that_fails_leaves_no_group(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(Model(), tmp_path)
    current, groups = threading.local(), list[object]()

    def refuse(*_: object, **__: object) -> None:
        raise MissingFileError("gone")

    def make_group(backend: str) -> object:
        groups.append(current.ranks)
        return current.ranks

    monkeypatch.setattr(stream, "find_ranks", lambda *_: current.ranks)
    monkeypatch.setattr(stream, "ProcessGroupRanks", lambda group, _: group)
    monkeypatch.setattr(torch.distributed, "new_group", make_group)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", groups.remove)
    monkeypatch.setattr(*((stream, "decide_load") if fails == "load" else (ring, "plan_layers")), refuse)

    def work(ranks: ThreadRanks) -> None:
        current.ranks = ranks
        with pytest.raises(MissingFileError):
            ucp.stream(Model(), "dp=2", path, exchange="always")

    assert run(2, work) == [None, None]
    assert groups == []
