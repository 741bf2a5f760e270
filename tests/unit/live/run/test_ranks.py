import threading

import numpy as np
import pytest
import torch
from torch import distributed

from tests.unit.live.threads import run
from ucp.errors import LoadError, MissingFileError, UcpError, UsageError
from ucp.live.run.ranks import ProcessGroupRanks, Ranks, SingleRank, find_ranks, run_together


def failing(errors):
    """Work that raises the error of its rank, if it has one."""

    def work(ranks):
        def one():
            if errors.get(ranks.rank) is not None:
                raise errors[ranks.rank]
            return ranks.rank

        return run_together(ranks, one)

    return work


def test_one_failure_is_raised_by_all_with_its_class_and_rank():
    found = run(3, failing({1: MissingFileError("no file x")}))
    assert [type(error) for error in found] == [MissingFileError] * 3
    assert {str(error) for error in found} == {"rank 1 of 3: no file x"}


def test_the_same_failure_everywhere_is_said_once():
    found = run(2, failing({0: UsageError("bad"), 1: UsageError("bad")}))
    assert {(type(error), str(error)) for error in found} == {(UsageError, "bad")}


def test_several_failures_are_listed_by_rank():
    found = run(4, failing({0: UsageError("bad"), 2: UsageError("bad"), 3: MissingFileError("gone")}))
    assert {(type(e), str(e)) for e in found} == {(LoadError, "ranks 0, 2 of 4: bad\nrank 3 of 4: gone")}


def test_an_unexpected_error_reaches_the_other_ranks_and_keeps_its_trace():
    found = run(2, failing({0: RuntimeError("boom")}))
    assert {(type(e), str(e)) for e in found} == {(LoadError, "rank 0 of 2: RuntimeError: boom")}
    assert isinstance(found[0].__cause__, RuntimeError)


def test_errors_from_outside_the_tree_are_load_errors_elsewhere():
    class PrivateError(UcpError):
        pass

    found = run(2, failing({1: PrivateError("x")}))
    assert [type(error) for error in found] == [LoadError, LoadError]


def test_a_process_that_is_alone_raises_what_was_raised():
    with pytest.raises(RuntimeError, match=r"^boom$"):
        failing({0: RuntimeError("boom")})(SingleRank())


def test_without_torch_distributed_a_process_is_alone():
    ranks = find_ranks(None, torch.device("cpu"))
    assert isinstance(ranks, Ranks)
    assert (ranks.rank, ranks.count, ranks.share("x")) == (0, 1, ["x"])
    part = torch.arange(4, dtype=torch.uint8)
    whole = torch.zeros(1, 4, dtype=torch.uint8)
    ranks.gather(part, whole, (0,))
    assert torch.equal(whole[0], part)
    numbers = np.arange(3, dtype=np.uint64)
    assert [own.tolist() for own in ranks.swap([numbers])] == [[0, 1, 2]]


def test_ranks_of_the_caller_are_taken_as_they_are():
    own = SingleRank()
    assert find_ranks(own, torch.device("cpu")) is own


@pytest.mark.parametrize("into_one", [True, False])
def test_no_thread_of_gloo_refers_to_tensors_once_a_collective_is_over(into_one, monkeypatch):
    """If it did at the end of the program, the process would abort."""
    lent = []

    def let_go_later(*tensors):
        lent.append(tensors)
        threading.Timer(0.01, lent.clear).start()

    def gather_into_one(gathered, part, group):
        if not into_one:
            raise NotImplementedError
        gathered.copy_(part)
        let_go_later(gathered, part)

    def gather(rows, part, group):
        rows[0].copy_(part)
        let_go_later(*rows, part)

    def exchange(received, sent, received_sizes, sizes, group):
        received.copy_(sent)
        let_go_later(received, sent)

    monkeypatch.setattr(distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(distributed, "all_gather_single", gather_into_one, raising=False)
    monkeypatch.setattr(distributed, "all_gather", gather)
    monkeypatch.setattr(distributed, "all_to_all_single", exchange)
    ranks = ProcessGroupRanks(None, torch.device("cpu"))
    assert not lent
    assert ranks.share({"step": 3}) == [{"step": 3}]
    assert not lent
    assert ranks.swap([np.arange(3, dtype=np.uint64)])[0].tolist() == [0, 1, 2]
    assert not lent
