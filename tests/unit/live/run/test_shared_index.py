"""Rank 0 reads the index for all ranks that see the same files."""

import os
import shutil
from pathlib import Path

import pytest

from tests.unit.live.threads import run
from ucp.core.index import Index
from ucp.errors import UnknownFormatError
from ucp.live.run.shared_index import read_once
from ucp.source.read import index_of

CHECKPOINT = Path(__file__).parents[4] / "fixtures/deepspeed/z3-dp4-bf16/checkpoint"


def read_on_ranks(count: int, path_of: dict[int, Path]) -> tuple[list[Index | Exception], list[int]]:
    """What each rank gets, and the ranks that read files."""
    readers: list[int] = []

    def work(ranks):
        path = path_of.get(ranks.rank, CHECKPOINT)

        def read():
            readers.append(ranks.rank)
            return index_of(path)

        return read_once(ranks, path, read)

    return run(count, work), sorted(readers)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_one_rank_reads_and_all_have_the_same_index(count):
    indexes, readers = read_on_ranks(count, {})
    assert readers == [0]
    expected = index_of(CHECKPOINT)
    for index in indexes:
        assert (index.path, index.files, index.atoms) == (expected.path, expected.files, expected.atoms)


def copy_of_checkpoint(folder: Path) -> Path:
    """The same files elsewhere, as on a disk of another node."""
    return Path(shutil.copytree(CHECKPOINT, folder, copy_function=shutil.copyfile))


def test_a_rank_with_files_at_another_path_reads_for_itself(tmp_path):
    copy = copy_of_checkpoint(tmp_path / "copy")
    indexes, readers = read_on_ranks(3, {2: copy})
    assert readers == [0, 2]
    assert [index.path.startswith(str(tmp_path)) for index in indexes] == [False, False, True]


def test_a_rank_that_sees_a_file_of_another_time_reads_for_itself(tmp_path, monkeypatch):
    copy = copy_of_checkpoint(tmp_path / "copy")
    touched = False

    def work(ranks):
        def read():
            nonlocal touched
            index = index_of(copy)
            if not touched:
                os.utime(next(Path(file.path) for file in index.files), ns=(1, 1))
                touched = True
            return index

        return read_once(ranks, copy, read)

    indexes = run(2, work)
    assert [1 in {file.mtime_ns for file in index.files} for index in indexes] == [False, True]


def test_a_checkpoint_that_no_rank_finds_is_one_error(tmp_path):
    missing = tmp_path / "missing"
    errors, readers = read_on_ranks(3, dict.fromkeys(range(3), missing))
    assert readers == [0, 1, 2]
    assert {type(error) for error in errors} == {UnknownFormatError}
    assert len({str(error) for error in errors}) == 1
    assert not str(errors[0]).startswith("rank")
