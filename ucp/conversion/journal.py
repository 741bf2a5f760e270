"""The journal of a conversion: which tasks an earlier run finished, checked against the bytes on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash
from zlib_ng import zlib_ng

from ucp.contract.protocols import Observer
from ucp.core.text.typed import convert
from ucp.errors import CorruptError
from ucp.io.elements import codec_name, decode_block
from ucp.transfer.gather import Gatherer, ThreadedReader
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done

Line = dict[str, object]


def to_line(done: Done) -> Line:
    """The journal line of a finished task."""
    return {"task": done.task, "sums": done.sums, "spans": done.spans, "drift": done.drift}


def check_noted(
    job: Job, root: Path, lines: Iterable[Line], *, observer: Observer | None = None, threads: int = 1
) -> dict[int, Done]:
    """Finished tasks whose bytes are there as reported, by task number; all other tasks must be done again.

    `threads`: number of threads that read; each holds one section in memory at a time.
    """
    reports_by_task: dict[int, list[Done]] = {}
    for line in lines:
        done = parse_done(line)
        if done is not None and done not in (same_task := reports_by_task.setdefault(done.task, [])):
            same_task.append(done)
    tasks = {task.number: task for task in job.tasks if task.number in reports_by_task} if reports_by_task else {}
    reports = {number: reports_by_task[number] for number in reports_by_task if number in tasks}
    if not reports:
        return {}

    confirmed: dict[int, Done] = {}

    def look(number: int, _gatherer: Gatherer) -> None:
        done = next((report for report in reports[number] if _holds_bytes(root, tasks[number], report)), None)
        if done is not None:
            confirmed[number] = done
        if observer is not None:
            observer.advance(tasks[number].nbytes)

    if observer is not None:
        observer.begin(title="check", nbytes=sum(tasks[number].nbytes for number in reports))
    try:
        with ThreadedReader(threads) as reader:
            reader.run_all(reports, look)
        return {number: confirmed[number] for number in reports if number in confirmed}
    finally:
        if observer is not None:
            observer.end()


def parse_done(line: Line) -> Done | None:
    """The report that `to_line` was given; None when the line says something else."""
    try:
        return convert(line, Done)
    except ValueError:
        return None


def is_report_of(task: Task, done: Done) -> bool:
    """Whether a report covers exactly what a task writes."""
    wanted = [(section.placement, section.start, section.nbytes) for fill in task.fills for section in fill.sections]
    return wanted == [(section.placement, section.start, section.nbytes) for section in done.sums]


def _holds_bytes(root: Path, task: Task, done: Done) -> bool:
    if not is_report_of(task, done):
        return False
    sections = [(fill.path, section) for fill in task.fills for section in fill.sections]
    try:
        for (path, section), section_sum in zip(sections, done.sums, strict=True):
            offset, nbytes = section_sum.block or (section.offset, section.nbytes)
            with (root / path).open("rb") as file:
                file.seek(offset)
                data = memoryview(file.read(nbytes))
            if section_sum.block:
                data = decode_block(data, codec_name(section.nbytes // (section.stop - section.start)))
            if xxhash.xxh3_64_hexdigest(data) != section_sum.digest or zlib_ng.crc32(data) != section_sum.crc32:
                return False
    except (OSError, CorruptError):
        return False
    return True
