"""`make fuzz`: thousands of damaged checkpoints in minutes; what became of them is counted, what may not be is shown.

Worker processes take numbers one after another; one that does not answer is killed and replaced. Exit code 1 when any
outcome is not allowed; each is shown with the command that does it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.fuzz.bases import BASES
from tests.fuzz.mutations import Mutation
from tests.fuzz.oracle import ALLOWED, Label
from tests.fuzz.trial import Fuzzer, limit_memory

SILENT_SECONDS = 400.0
"""After which a worker that says nothing is killed; its verbs stop themselves before, if Python runs at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one mutation."""

    number: int
    base: str
    mutation: Mutation | None
    """What was done to it; None where the worker was lost."""
    label: Label
    why: str

    @property
    def way(self) -> str:
        """In which way it was changed."""
        return self.mutation.name if self.mutation else "?"


def main() -> None:
    """Run until the time or the count is reached, and report."""
    asked = _arguments()
    begun, counts, findings = time.monotonic(), Counter[tuple[str, Label]](), []
    for outcome in outcomes(asked):
        counts[outcome.way, outcome.label] += 1
        if not counts.total() % 100:
            print(f"{counts.total():,} in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        if outcome.label not in ALLOWED:
            findings.append(outcome)
            print(_shown(outcome, asked), flush=True)
        elif asked.only or asked.all:
            print(_shown(outcome, asked), flush=True)
    print(_table(counts))
    print(f"{counts.total():,} mutations in {time.monotonic() - begun:.0f} s; {len(findings):,} not allowed")
    sys.exit(1 if findings else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="begin none after so long (%(default)s)")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="so many at most")
    parser.add_argument("--only", type=int, action="append", help="this number, with every outcome shown")
    parser.add_argument("--base", action="append", metavar="GLOB", help="of these only; numbers mean others then")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--all", action="store_true", help="show every outcome, allowed or not")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the checkpoint and what was written there")
    return parser.parse_args()


def outcomes(asked: argparse.Namespace) -> Iterator[Outcome]:
    """Outcomes as they come. Workers are forked from here, where everything is imported."""
    import torch  # noqa: F401  # `read` needs it, and a worker must not count it

    numbers = iter(asked.only or range(asked.count))
    folder = Path(tempfile.mkdtemp(prefix="ucp-fuzz-")) if asked.keep is None else asked.keep
    stop = time.monotonic() + asked.seconds
    workers = [_Worker(folder / str(job), asked) for job in range(1 if asked.only else asked.jobs)]
    try:
        for worker in workers:
            worker.begin(next(numbers, None))
        while busy := [worker for worker in workers if worker.number is not None]:
            ready = wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                outcome = worker.answer() if worker.pipe in ready else worker.lost()
                if outcome is not None:
                    yield outcome
                    worker.begin(next(numbers, None) if time.monotonic() < stop else None)
    finally:
        for worker in workers:
            worker.end()
        if asked.keep is None:
            shutil.rmtree(folder)


class _Worker:
    """A process that does one mutation after another."""

    def __init__(self, folder: Path, asked: argparse.Namespace) -> None:
        self._folder, self._asked = folder, asked
        self.number: int | None = None
        self._begun = 0.0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._folder, self._asked), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, number: int | None) -> None:
        """Let it do that one."""
        self.number, self._begun = number, time.monotonic()
        if number is not None:
            self.pipe.send(number)

    def answer(self) -> Outcome | None:
        """What it says."""
        try:
            outcome: Outcome = self.pipe.recv()
        except (EOFError, ConnectionError):
            return self._replaced(Label.TRACEBACK, "the process died")
        if outcome.label is Label.MEMORY:  # its peak hides what comes after
            return self._replaced(outcome.label, outcome.why, outcome)
        return outcome

    def lost(self) -> Outcome | None:
        """That it says nothing, if it is time to."""
        if time.monotonic() - self._begun < SILENT_SECONDS:
            return None
        return self._replaced(Label.HANG, "nothing ended it but to kill the process")

    def _replaced(self, label: Label, why: str, outcome: Outcome | None = None) -> Outcome:
        number = self.number
        assert number is not None
        self.end()
        self._start()
        return outcome or Outcome(number=number, base="?", mutation=None, label=label, why=why)

    def end(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _work(pipe: Connection, folder: Path, asked: argparse.Namespace) -> None:
    bases = tuple(base for base in BASES if any(fnmatch(base.name, glob) for glob in asked.base or ["*"]))
    fuzzer = Fuzzer(folder, asked.seed, bases)
    limit_memory()
    while True:
        number = pipe.recv()
        case, label, why = fuzzer.run(number)
        pipe.send(Outcome(number=number, base=case.base.name, mutation=case.mutation, label=label, why=why))


def _shown(outcome: Outcome, asked: argparse.Namespace) -> str:
    again = f"python -m tests.fuzz --seed {asked.seed} --only {outcome.number}"
    again += "".join(f" --base '{glob}'" for glob in asked.base or ())
    what = f"{outcome.mutation.kind}: {outcome.mutation.name}: {outcome.mutation.what}" if outcome.mutation else ""
    return f"{outcome.label}  {outcome.base}\n  {what[:400]}\n  {outcome.why[:600]}\n  {again}"


def _table(counts: Counter[tuple[str, Label]]) -> str:
    """Outcomes by the way checkpoints were changed."""
    labels = [label for label in Label if any(label is own for _, own in counts)]
    ways = sorted({way for way, _ in counts})
    rows = [["", *labels], *([way, *(str(counts[way, label] or "-") for label in labels)] for way in ways)]
    rows.append(["all", *(str(sum(counts[way, label] for way in ways)) for label in labels)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join("  ".join(f"{own:>{width}}" for own, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    main()
