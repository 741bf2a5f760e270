"""All verbs on one checkpoint, in this process, each within limits of time and memory."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import FrameType

from click.testing import CliRunner

import ucp
from tests.fuzz.bases import BASES, Base, Words
from tests.fuzz.mutations import Mutation, Place, damage_output, mutate
from tests.fuzz.oracle import Attempt, Contents, Label, Trial, contents, judge, judge_resumed, lines_of, tree
from ucp.errors import UcpError
from ucp_cli.verbs import cli

CPU_SECONDS = 15.0
"""Of a verb, which takes tenths on these checkpoints."""
WALL_SECONDS = 90.0
"""Of a verb that waits, on a machine that is busy."""
MORE_MEMORY = 512 << 20
"""Bytes by which a verb may raise the peak of the process."""
RESUMED = 0.06
"""Share of mutations that are made to what a conversion wrote, which is then resumed."""
ADDRESS_SPACE = 4 << 30
"""Bytes beyond what a process has at first, after which there are none."""


class Overrun(BaseException):
    """A verb took too long; no `except Exception` may keep it."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise Overrun


@contextmanager
def within_time() -> Iterator[None]:
    """Raise Overrun when the time of a verb is over."""
    signal.signal(signal.SIGPROF, _stop)
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def limit_memory() -> None:
    """From now on this process cannot have much more memory than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _watched(verb: str, run: Callable[[], Attempt]) -> Attempt:
    """What a verb did, or how it failed."""
    before, failure = _peak(), None
    try:
        with within_time():
            attempt = run()
    except Overrun as error:
        failure = Label.HANG, f"more than {CPU_SECONDS:.0f} s {_where(error)}"
    except MemoryError as error:
        failure = Label.MEMORY, f"MemoryError {_where(error)}"
    except Exception as error:  # noqa: BLE001  # that it is none of those expected is what is looked for
        failure = Label.TRACEBACK, f"{type(error).__name__}: {str(error)[:150]} {_where(error)}"
    if failure is None and _peak() - before > MORE_MEMORY:
        failure = Label.MEMORY, f"{(_peak() - before) >> 20} MiB more"
    return Attempt(verb=verb, code=-1, failure=failure) if failure else attempt


def _where(error: BaseException) -> str:
    frames = [own for own in traceback.extract_tb(error.__traceback__) if "/ucp" in own.filename]
    return f"in {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""


def command(verb: str, *words: object) -> Attempt:
    """`ucp ...`, as it is typed."""

    def run() -> Attempt:
        result = CliRunner().invoke(cli, [str(word) for word in words], prog_name="ucp")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        told = frozenset[str]()
        if "--json" in words and not result.exit_code:
            told = lines_of(json.loads(result.stdout))
        return Attempt(verb=verb, code=result.exit_code, text=result.output, told=told)

    return _watched(verb, run)


def read(path: Path, rng: Random) -> Attempt:
    """`ucp.open` and a few states of it."""

    def run() -> Attempt:
        try:
            checkpoint = ucp.open(path)
            names = [(name, state) for name, atom in checkpoint.atoms.items() for state in atom.states]
            for name, state in rng.sample(names, min(3, len(names))):
                checkpoint.read(name, state)
        except (UcpError, OSError) as error:
            return Attempt(verb="read", code=1, text=str(error))
        return Attempt(verb="read")

    return _watched("read", run)


def trial(path: Path, pristine: Path, target: Words, out: Path, rng: Random, known: Contents | None = None) -> Trial:
    """All verbs. `known`: the atoms that there should be."""
    before = _stamps(path)
    found = Trial(
        inspect=command("inspect", "inspect", path),
        plan=command("plan", "plan", path, *_ALONE),
        verify=command("verify", "verify", path, *_ALONE),
        diff=command("diff", "diff", pristine, path, *_ALONE),
        read=read(path, rng),
        atoms=_to_atoms("atoms", path, out / "atoms"),
        target=_to_target(path, out, target),
    )
    if found.atoms.written and known is not None and found.atoms.written != known:
        found = replace(found, against=command("against", "verify", out / "atoms", "--against", path, *_ALONE))
    kept = [own.verb for own in (found.atoms, found.target) if own.code and (out / own.verb).exists()]
    leftover = f"{kept} left" if kept else "" if _stamps(path) == before else "the source was written to"
    return replace(found, leftover=leftover)


_ALONE = ("--workers", "1")


def _to_atoms(verb: str, path: Path, atoms: Path) -> Attempt:
    found = command(verb, "convert", path, atoms, "--json", "--no-fsync", *_ALONE)
    return found if found.code or not atoms.exists() else replace(found, written=contents(atoms))


def _to_target(path: Path, out: Path, target: Words) -> Attempt:
    """What is written for a framework, with the atoms that are in it."""
    found = command("target", "convert", path, out / "target", "--json", "--no-fsync", *_ALONE, *target)
    if found.code:
        return found
    again = _to_atoms("target read again", out / "target", out / "back")
    unread = (Label.CONTRADICTION, f"what was written is not read: {again.text[:200]}") if again.code else None
    return replace(found, tree=tree(out / "target"), written=again.written, failure=again.failure or unread)


def _stamps(path: Path) -> dict[str, tuple[int, int, int]]:
    """Kind, length and time of change of everything in a folder."""
    return {str(own): (s.st_mode, s.st_size, s.st_mtime_ns) for own in path.rglob("*") for s in (own.lstat(),)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A checkpoint changed in one way: the same for a seed and a number, whatever was done before."""

    base: Base
    pristine: Path
    path: Path
    mutation: Mutation
    target: Words
    rng: Random


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a checkpoint that is whole."""

    trial: Trial
    targets: dict[Words, Attempt] = field(default_factory=dict)
    """What is written from it for each target, as far as it was asked for."""


class Fuzzer:
    """Changes checkpoints below a folder of its own and judges what the verbs make of them."""

    def __init__(self, folder: Path, seed: int, bases: tuple[Base, ...]) -> None:
        self._folder, self._seed, self._bases = folder, seed, bases
        self._truths: dict[str, _Known] = {}

    def change(self, number: int) -> Case:
        """Make a copy of a checkpoint and change it."""
        rng = Random(f"{self._seed}/{number}")
        base = rng.choice(self._bases)
        target = rng.choice(base.targets)
        kept = self._folder / "kept"
        pristine, work = base.keep(kept), self._fresh("work")
        whole = base.make(work, pristine)
        root = work / "source" if base.is_virtual and rng.random() < 0.6 else whole
        is_store = base.is_store and root == whole
        others = () if base.is_store else tuple(own.keep(kept) for own in BASES if own.format == base.format)
        mutation = mutate(Place(root=root, others=others, is_store=is_store), rng)
        path, pristine = whole / base.inner, pristine / base.inner
        return Case(base=base, pristine=pristine, path=path, mutation=mutation, target=target, rng=rng)

    def run(self, number: int) -> tuple[Case, Label, str]:
        """What was done to a checkpoint, and what became of it."""
        if Random(f"resume {self._seed}/{number}").random() < RESUMED:
            return self._run_resumed(number)
        case = self.change(number)
        truth = self._truth(case)
        found = trial(case.path, case.pristine, case.target, self._fresh("out"), case.rng, truth.atoms.written)
        return case, *judge(case.base, case.mutation, truth, found)

    def _run_resumed(self, number: int) -> tuple[Case, Label, str]:
        """What `convert --resume` makes of a destination that was finished and then damaged."""
        rng = Random(f"{self._seed}/{number}")
        while True:
            base = rng.choice(self._bases)
            source, out = base.keep(self._folder / "kept") / base.inner, self._fresh("out") / "finished"
            words = rng.choice(((), ("--layout", "packed"), rng.choice(base.targets)))
            convert = ("convert", source, out, "--no-fsync", *_ALONE, *words)
            if not command("convert", *convert).code:
                break
        before = tree(out)
        mutation = damage_output(Place(root=out, others=(), is_store="--to" not in words), rng)
        mutation = replace(mutation, name=f"resume_{mutation.name}")
        resumed = command("resume", *convert, "--resume")
        verify = command("verify", "verify", out, *_ALONE)
        case = Case(base=base, pristine=source, path=out, mutation=mutation, target=words, rng=rng)
        return case, *judge_resumed(resumed, verify, is_equal=tree(out) == before)

    def _truth(self, case: Case) -> Trial:
        """The verbs on the undamaged checkpoint, with the target of the case."""
        base, target = case.base, case.target
        known = self._truths.get(base.name)
        if known is None or target not in known.targets:
            path = base.make(self._fresh("whole"), base.keep(self._folder / "kept")) / base.inner
            out = self._fresh("out")
            known = known or _Known(trial(path, case.pristine, target, out, Random(0)))
            known.targets[target] = _to_target(path, self._fresh("out"), target)
            self._truths[base.name] = known
        return replace(known.trial, target=known.targets[target])

    def _fresh(self, name: str) -> Path:
        folder = self._folder / name
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder
