from __future__ import annotations

import json
from pathlib import Path

import pytest

from ucp.conversion.execute import Written, check_read
from ucp.conversion.journal import check_noted, to_line
from ucp.conversion.options import ConvertOptions
from ucp.conversion.prepare import prepare
from ucp.errors import CorruptError
from ucp.transfer.engines.serial import SerialEngine
from ucp.transfer.output_files import create_file

FIXTURES = Path(__file__).parents[3] / "fixtures"


@pytest.fixture
def run(source, tmp_path, small_blocks):
    """A job, its folder, and the journal of all its tasks."""
    job = prepare(source, ConvertOptions()).job
    root = tmp_path / "data"
    for file in job.target.files:
        create_file(root, file)
    done = list(SerialEngine().run(job, root, job.tasks, workers=1, threads=1))
    lines = [json.loads(json.dumps(to_line(own))) for own in done]
    return job, root, done, lines


def test_a_task_noted_twice_is_one(run):
    job, root, done, lines = run
    assert list(check_noted(job, root, lines + lines[:3])) == [own.task for own in done]


@pytest.mark.parametrize(
    "change",
    [
        {"task": 10_000},
        {"task": -1},
        {"task": "0"},
        {"task": None},
        {"sums": None},
        {"sums": []},
        {"sums": [[]]},
        {"sums": [[0, 0, 64]]},
        {"sums": [[0, 0, 64, "0" * 16, 0, 5]]},
        {"spans": [[1]]},
        {"spans": {}},
        {"drift": 3},
    ],
)
def test_a_line_that_says_something_else_is_not_believed(run, change):
    job, root, _, lines = run
    assert check_noted(job, root, [{**lines[0], **change}]) == {}
    assert check_noted(job, root, [{}]) == {}


def test_a_line_with_another_checksum_is_not_believed(run):
    """It would become the checksum of a file."""
    job, root, _, lines = run
    wrong = {**lines[0], "sums": [[*first_sum[:4], first_sum[4] ^ 1, *first_sum[5:]] for first_sum in lines[0]["sums"]]}
    assert check_noted(job, root, [wrong]) == {}
    assert list(check_noted(job, root, lines[:1])) == [0]


def test_checksums_that_only_the_journal_has(tmp_path):
    """The source is as it was saved, so it is not to blame."""
    prepared = prepare(FIXTURES / "deepspeed/z1-dp4-fp32/checkpoint", ConvertOptions())
    job, written = prepared.job, Written()
    for file in job.target.files:
        create_file(tmp_path, file)
    for done in SerialEngine().run(job, tmp_path, job.tasks, workers=1, threads=1):
        written.add(done)
    check_read(job.index, written)
    written.spans = [span._replace(crc32=span.crc32 ^ 1) for span in written.spans]
    with pytest.raises(CorruptError, match="journal"):
        check_read(job.index, written)


def test_a_line_of_other_sections_is_not_believed(run):
    """Blocks of another size, or tasks shared out in another way, are another run's."""
    job, root, _, lines = run
    assert check_noted(job, root, [{**lines[0], "task": lines[1]["task"]}]) == {}


def test_bytes_that_are_not_what_was_noted_are_not_believed(run):
    job, root, _, lines = run
    fill = job.tasks[3].fills[0]
    with (root / fill.path).open("r+b") as file:
        file.seek(fill.offset)
        file.write(b"\xff\xfe")
    assert 3 not in check_noted(job, root, lines)
    assert len(check_noted(job, root, lines)) == len(lines) - 1
    (root / fill.path).unlink()
    assert check_noted(job, root, lines) == {}
