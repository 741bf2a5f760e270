"""A destination in a bucket, where nothing can be renamed or written in place.

A few files at a time are written to a scratch folder (`ucp.transfer.plan.rounds`), and uploaded when they are complete.
A journal in the bucket records each upload, so that any machine can resume. The metadata files, by which frameworks and
`ucp` recognise a finished checkpoint, are uploaded last.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ucp.contract.output_names import check_fits
from ucp.contract.protocols import Observer
from ucp.conversion.destination.bucket_journal import BucketJournal
from ucp.conversion.destination.disk import WRONG_SOURCE, explain_write_failure
from ucp.conversion.destination.existing import (
    ConversionId,
    check_apart,
    check_distinct,
    check_foreign,
    check_replaceable,
    other_conversion,
)
from ucp.conversion.destination.protocol import ResumePoint
from ucp.conversion.destination.uploads import Scratch, Upload, Uploads, scratch_parent, start_uploads
from ucp.conversion.journal import parse_done, to_line
from ucp.conversion.options import ConvertOptions
from ucp.conversion.prepare import Prepared
from ucp.core.target import OutputFile, Receipts
from ucp.errors import DestinationError, UcpError, UsageError, format_count, format_list
from ucp.io.folder import MARK, PARTIAL, path_of
from ucp.io.provenance import is_complete, read_mark
from ucp.io.remote.connections import connect, preview
from ucp.io.remote.listing import forget
from ucp.io.remote.url import key_of
from ucp.io.remote.write import MEMORY, StoredObject, check_writable, find_objects, put_file, remove
from ucp.transfer.output_files import create_file, fill_checksums, make_receipts
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.rounds import Room, Round, plan_room, split_rounds
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done, Sum

_SCRATCH_NAME = f"ucp-scratch-{'0' * 25}"
"""A name as long as that of any scratch folder, to check the length of paths."""

_MAX_KEY = 1024
"""Bytes of a key that S3 and Google Cloud Storage allow."""


class BucketDestination:
    """A prefix of a bucket."""

    upload_memory = MEMORY

    def __init__(self, dst: str, options: ConvertOptions) -> None:
        """Raises UsageError for a store that cannot be written to, DestinationError without a scratch folder."""
        check_writable(dst)
        self.dst = dst
        self.root = self._scratch_parent = scratch_parent(options.scratch)
        self.scratch_bytes = 0
        self._options = options
        self._is_owner = False
        self._journal = BucketJournal(dst)
        self._scratch: Scratch | None = None
        self._uploads: Uploads | None = None
        self._room = Room(limit=0, nbytes=0)
        self._numbers: dict[str, int] = {}
        self._rounds: tuple[Round, ...] = ()
        self._pending: dict[str, _PendingFile] = {}
        self._uploaded: dict[str, StoredObject] = {}
        self._metadata: tuple[OutputFile, ...] = ()

    def check(self, src: Path, job: Job | None = None) -> int:
        """Most bytes that files take in the scratch folder at once.

        Raises OverlapError if writing could change the source; DestinationError if keys are too long, or a file
        does not fit the scratch folder; UsageError for a part.
        """
        if job is None:
            if self._options.part is not None or self._options.finalize:
                raise UsageError(
                    "parts of a conversion share a folder on disk, and the destination is in a bucket: write to a "
                    "folder that all of them see, and upload that; or leave out --part and --finalize"
                )
            check_distinct(src, path_of(self.dst))
            return 0
        check_apart(path_of(self.dst), job.index.path, (file.path for file in job.index.files))
        check_fits(self._scratch_parent / f"{_SCRATCH_NAME}/data", (file.path for file in job.target.files))
        prefix = len(key_of(self.dst).partition("/")[2].encode()) + 1
        too_long = [file.path for file in job.target.files if prefix + len(file.path.encode()) > _MAX_KEY]
        if too_long:
            raise DestinationError(
                f"expected keys of at most {_MAX_KEY} bytes below {self.dst}; got "
                f"{format_count(len(too_long), 'longer one')}:\n{format_list(too_long)}\nchoose a shorter destination, "
                "or a layout or target that names no file after a parameter"
            )
        free = shutil.disk_usage(self._scratch_parent).free
        self._room = plan_room(job, _tensor_files(job), free=free, place=str(self._scratch_parent))
        return self._room.nbytes

    def begin(self, prepared: Prepared, observer: Observer) -> ResumePoint | None:
        """Take over the prefix, and find the objects that an earlier run uploaded; none of them is read.

        Does not wait for another run. Raises DestinationError, OSError.
        """
        options, job, journal = self._options, prepared.job, self._journal
        self._job, self._observer = job, observer
        self._numbers = {file.path: number for number, file in enumerate(job.target.files)}
        conversion = ConversionId(prepared.fingerprint, prepared.facts)
        forget(self.dst)
        may_be_complete = options.resume and not journal.exists()
        if may_be_complete and is_complete(path_of(self.dst), conversion.fingerprint, overwrite=options.overwrite):
            return None
        self._scratch = Scratch(self._scratch_parent, self.dst)
        self.root = self._scratch.root
        self._take_over(conversion)
        self._is_owner = True
        finished = self._find_uploaded(job)
        job = replace(job, fsync=False)  # what is uploaded need not reach the disk
        self._job, self._rounds = split_rounds(job, _tensor_files(job), limit=self._room.limit, finished=finished)
        self._uploads = start_uploads(journal)
        todo = self._job.tasks[len(self._job.tasks) - sum(len(group.tasks) for group in self._rounds) :]
        return ResumePoint(job=self._job, done=tuple(finished.values()), todo=todo)

    def rounds(self, todo: Sequence[Task]) -> Iterator[Sequence[Task]]:
        """The tasks of each round, once the scratch folder has room for its files."""
        del todo  # the same tasks as in the rounds
        for group in self._rounds:
            while self._pending_nbytes() + group.nbytes > self._room.nbytes and self._collect():
                pass
            self._create_files(group)
            if group.tasks:
                yield group.tasks

    def note(self, done: Done) -> None:
        """Upload the files that a task completed."""
        sums: dict[str, list[Sum]] = {fill.path: [] for fill in self._job.tasks[done.task].fills}
        for written in done.sums:
            sums[_path_of(self._job, written.placement)].append(written)
        for path, file_sums in sums.items():
            pending = self._pending[path]
            pending.add(done, file_sums)
            if not pending.missing:
                self._upload(pending)
        while self._collect(block=False):
            pass

    def finish(self, job: Job, sums: Sequence[Sum]) -> tuple[Receipts, dict[str, int]]:
        """Wait for all uploads."""
        nbytes = self._pending_nbytes()
        if nbytes:
            self._observer.begin(title="upload", nbytes=nbytes)
            try:
                while self._collect():
                    self._observer.advance(nbytes - self._pending_nbytes())
                    nbytes = self._pending_nbytes()
            finally:
                self._observer.end()
        self._stop_uploads()
        sizes = {file.path: file.nbytes for file in job.target.files}
        return make_receipts(job, sums), sizes | {path: stored.nbytes for path, stored in self._uploaded.items()}

    def commit(self, files: Sequence[OutputFile], *, fsync: bool, verify: Callable[[Path], None] | None) -> None:
        """Upload the metadata files in order, then remove the journal."""
        del fsync  # objects are durable once they are uploaded
        planned = [file for file in self._job.target.files if file.path in self._job.target.last]
        self._metadata = (files[0], *planned, *files[1:])
        for file in self._metadata:
            create_file(self.root, file)
        fill_checksums(self._job, self.root, planned, ())
        if verify is not None:
            forget(self.dst)
            with preview(self.dst, {file.path: self.root / file.path for file in self._metadata}, hidden=PARTIAL):
                verify(path_of(self.dst))
            forget(self.dst)
        self._journal.check_ours()
        objects = find_objects(self.dst)
        changed = [path for path, stored in self._uploaded.items() if objects.get(path) != stored]
        if changed:
            raise DestinationError(
                f"{format_count(len(changed), 'object')} below {self.dst} changed after they were uploaded, by another "
                f"conversion or by hand:\n{format_list(changed)}\nSee that nothing else writes there, then continue "
                "with --resume"
            )
        self._journal.note_last([file.path for file in self._metadata])
        for file in self._metadata:
            put_file(f"{self.dst}/{file.path}", str(self.root / file.path))
        self._journal.clear()

    def __enter__(self) -> Self:
        """The destination itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Keep what was uploaded for --resume; remove it if it is wrong and no other process has taken over."""
        self._stop_uploads()
        if self._is_owner and isinstance(error, WRONG_SOURCE):
            with suppress(UcpError):
                self._journal.check_ours()
                connect(self.dst).abort_uploads(self.dst)
                remove(f"{self.dst}/{name}" for name in self._names())
                self._journal.clear()
        forget(self.dst)
        if self._scratch is not None:
            self._scratch.close()
        if isinstance(error, OSError):
            raise DestinationError(
                f"cannot write {error.filename or self.root}, where files are put before their upload (--scratch names "
                f"another folder): {explain_write_failure(error)}"
            ) from error

    def _take_over(self, conversion: ConversionId) -> None:
        """Record this conversion in the journal, as a new one or as one to resume, and remove the objects it replaces.

        Raises DestinationError when something else is there.
        """
        journal, resume, overwrite = self._journal, self._options.resume, self._options.overwrite
        head = journal.head()
        if head and not resume and not overwrite:
            raise DestinationError(
                f"an unfinished conversion lies at {self.dst}, last written by {journal.owner()}. If that still "
                "runs, wait for it; if not, continue with --resume, or discard it and start over with --overwrite"
            )
        if head and resume and head.get("fingerprint") != conversion.fingerprint:
            raise other_conversion(self.dst, conversion, head)
        just_begun = DestinationError(f"another conversion to {self.dst} has just begun. Run one at a time")
        forget(self.dst)
        objects = find_objects(self.dst)
        if objects and not head:
            if journal.exists():
                raise just_begun
            check_replaceable(path_of(self.dst), conversion, resume=resume, overwrite=overwrite)
        obsolete = self._obsolete(head, set(objects))
        if not (head and resume):
            facts = {"fingerprint": conversion.fingerprint, "made": dict(conversion.facts)}
            if not journal.begin({**facts, "clears": obsolete, "files": self._names()}, replace=bool(head)):
                raise just_begun
        journal.take_over()
        if head:
            connect(self.dst).abort_uploads(self.dst)
        if head and not resume:
            journal.forget_files()
        self._remove(obsolete)

    def _obsolete(self, head: dict[str, Any], objects: set[str]) -> list[str]:
        """Objects to remove, first the file that makes them a checkpoint. `head`: head of the journal that is there.

        Raises DestinationError for objects that no conversion wrote.
        """
        mark, resume = read_mark(path_of(self.dst)), self._options.resume
        if not head:
            return [*(name for name in mark.files if name in self._job.target.last), *reversed(list(mark.files))]
        # a run that was killed while it removed its journal had uploaded all metadata files
        last = self._journal.last() or (mark.files if mark.fingerprint == head.get("fingerprint") else ())
        obsolete = [*head.get("clears", ())]
        if not resume:
            obsolete = [*last, *obsolete, *head.get("files", ())]
        known = {*obsolete, *last, *(self._names() if resume else ())}
        check_foreign(self.dst, {name for name in objects if not name.startswith(f"{PARTIAL}/")} - known)
        return obsolete

    def _remove(self, names: Sequence[str]) -> None:
        """Remove objects, except those that this conversion uploaded; the first one before all others."""
        objects = find_objects(self.dst) if names else {}
        uploaded = {str(line.get("file")) for line in self._journal.lines()} if names else set()
        urls = [f"{self.dst}/{name}" for name in dict.fromkeys(names) if name in objects and name not in uploaded]
        remove(urls[:1])
        remove(urls[1:])

    def _names(self) -> list[str]:
        """Names of the files that this conversion writes, as far as they are known yet."""
        planned = [file.path for file in self._job.target.files]
        return list(dict.fromkeys([*(file.path for file in self._metadata), MARK, *planned]))

    def _find_uploaded(self, job: Job) -> dict[str, Done]:
        """Reports of files whose objects are as the journal says, by path."""
        lines = list(self._journal.lines())
        objects = find_objects(self.dst) if lines else {}
        sections: dict[str, set[tuple[int, int, int]]] = {file.path: set() for file in job.target.files}
        for fill in (fill for task in (job.tasks if lines else ()) for fill in task.fills):
            sections[fill.path].update((section.placement, section.start, section.nbytes) for section in fill.sections)
        reports: dict[str, Done] = {}
        for line in lines:
            path, done = str(line.get("file")), parse_done(line)
            stored = objects.get(path)
            if (
                done is None
                or stored is None
                or (stored.nbytes, stored.version) != (line.get("nbytes"), line.get("version"))
            ):
                continue
            if path in sections and {(s.placement, s.start, s.nbytes) for s in done.sums} == sections[path]:
                reports[path] = done
                self._uploaded[path] = stored
        return reports

    def _create_files(self, group: Round) -> None:
        """Create the files of a round; upload those that no task writes to."""
        missing: dict[str, set[int]] = defaultdict(set)
        for task in group.tasks:
            for fill in task.fills:
                missing[fill.path].add(task.number)
        for file in group.files:
            create_file(self.root, file)
            number = self._numbers[file.path]
            self._pending[file.path] = _PendingFile(number, file, group.room[file.path], missing[file.path])
        self.scratch_bytes = max(self.scratch_bytes, self._pending_nbytes())
        for file in group.files:
            if not missing[file.path]:
                self._upload(self._pending[file.path])

    def _upload(self, pending: _PendingFile) -> None:
        path = pending.file.path
        fill_checksums(self._job, self.root, [pending.file], pending.done.sums)
        line = {"file": path, **to_line(pending.done)}
        assert self._uploads is not None  # `begin` was called
        file = self.root / path
        nbytes = file.stat().st_size  # the size of a compressed pack is known only now
        self._uploads.put(Upload(number=pending.number, path=path, file=str(file), nbytes=nbytes, line=line))

    def _collect(self, *, block: bool = True) -> bool:
        """Take the report of one upload; whether there was one."""
        uploaded = self._uploads.wait(block=block) if self._uploads is not None else None
        if uploaded is None:
            return False
        self._uploaded[uploaded.path] = uploaded.stored
        del self._pending[uploaded.path]
        return True

    def _pending_nbytes(self) -> int:
        return sum(pending.nbytes for pending in self._pending.values())

    def _stop_uploads(self) -> None:
        if self._uploads is not None:
            self._uploads.close()
            self._uploads = None


class _PendingFile:
    """A file that is not uploaded yet."""

    def __init__(self, number: int, file: OutputFile, nbytes: int, missing: set[int]) -> None:
        self.number = number
        self.file = file
        self.nbytes = nbytes
        self.missing = missing
        """Tasks that have not written to it yet."""
        self.done = Done(task=number, sums=(), spans=(), drift=())
        """Reports of the tasks that have written to it, merged into one."""

    def add(self, done: Done, sums: Iterable[Sum]) -> None:
        """Add the report of a task. `sums`: its checksums for this file; a task may write to several files."""
        self.missing.discard(done.task)
        self.done = Done(
            task=self.number,
            sums=(*self.done.sums, *sums),
            spans=(*self.done.spans, *done.spans),
            drift=(*self.done.drift, *done.drift),
        )


def _tensor_files(job: Job) -> list[OutputFile]:
    """Files that tasks write; the others are metadata files."""
    return [file for file in job.target.files if file.path not in job.target.last]


def _path_of(job: Job, number: int) -> str:
    """File of a placement; numbers above those are raw copies."""
    placements = job.target.placements
    return placements[number].path if number < len(placements) else job.target.raw[number - len(placements)].path
