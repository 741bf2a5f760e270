"""`make bench`: convert real checkpoints beside `cp -r`, and the tools of their own projects; write the table.

Sources (`tests.bench.sources`) are at least 2.5 GB of what real DeepSpeed, Megatron and FSDP wrote on 4 ranks, and
20,000 small tensors of torch, made once and kept under .bench/. Every command is a whole process, started anew. The
commands of a round run one after another, in another order every round, so that neither a noisy moment nor what ran
before (memory that was just freed is quick to get) favours one of them; medians are reported. Written files are removed
between runs; sources are read from the page cache. A first round is not counted.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from subprocess import CalledProcessError

from tests.bench.chains import experts, fold, links, save
from tests.bench.loading import load, load_plan
from tests.bench.measure import Sample, run
from tests.bench.report import Row, write_report
from tests.bench.rivals.contest import beside_dcp, beside_deepspeed
from tests.bench.sources import SOURCES, Source
from tests.bench.streaming import contest

REPEATS = 5
LIVE = {
    "load": load.main,
    "load-plan": load_plan.main,
    "load-dcp": beside_dcp,
    "load-deepspeed": beside_deepspeed,
    "save": save.main,
    "chain": links.main,
    "deltas": fold.main,
    "experts": experts.main,
    "stream": contest.main,
}
"""Cases that print what they measure, and write no report; only where asked for."""

CONVERTER_WORKERS = (1, 2, 4)
"""Worker counts tried with DeepSpeed's converter; the best is compared with."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A command that is timed."""

    name: str
    command: tuple[str, ...]


def main() -> None:
    """Run everything and write docs/benchmarks/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--without-others", action="store_true", help="leave the tools of other projects out")
    parser.add_argument("--case", action="append", choices=(*SOURCES, *LIVE), help="only this one")
    parser.add_argument("--medium", action="append", choices=("RAM", "disk"), help="only there (RAM or disk)")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="where the report goes")
    asked = parser.parse_args()
    root = Path.cwd()
    rows = []
    for case in asked.case or ():
        if case in LIVE:
            LIVE[case](asked.repeats)
    wanted = [case for case in asked.case or SOURCES if case not in LIVE]
    if not wanted:
        return
    for case in wanted:
        checkpoint = SOURCES[case].ready(root / ".bench" / case)
        for medium, place in _places(root):
            if not asked.medium or medium in asked.medium:
                rows.extend(_contest(case, checkpoint, medium, place, asked))
    write_report(asked.out, rows, machine=_machine(), sources=_titles(rows))


def _places(root: Path) -> Iterator[tuple[str, Path]]:
    if os.path.ismount("/dev/shm"):
        yield "RAM", Path("/dev/shm/ucp-bench")
    yield "disk", root / ".bench" / "work"


def _contest(case: str, checkpoint: Path, medium: str, place: Path, asked: argparse.Namespace) -> list[Row]:
    source = SOURCES[case]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        src, dst = place / "src", place / "dst"
        shutil.copytree(checkpoint, src)
        nbytes = sum(path.stat().st_size for path in src.rglob("*") if path.is_file())
        contestants = [*_ours(source, src, dst), *([] if asked.without_others else _rivals(source, src, dst))]
        samples: dict[str, list[Sample]] = {c.name: [] for c in contestants}
        for contestant in contestants:
            _timed(contestant, dst)
        order = random.Random(case + medium)
        for _ in range(asked.repeats):
            for contestant in order.sample(contestants, len(contestants)):
                samples[contestant.name].append(_timed(contestant, dst))
        if source.by_deepspeed and not asked.without_others:
            samples.update(_deepspeed(src, dst))
        rows = [_row(case, medium, name, nbytes, own) for name, own in samples.items()]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for row in rows:
        print(row, file=sys.stderr, flush=True)
    return rows


def _ours(source: Source, src: Path, dst: Path) -> list[Contestant]:
    ucp = str(Path(sys.executable).parent / "ucp")
    inspect = Contestant("ucp inspect", (ucp, "inspect", str(src)))
    virtual = Contestant("ucp convert --virtual", (ucp, "convert", "-q", "--virtual", str(src), str(dst)))
    if source.only_index:
        return [inspect, virtual]
    places = (str(src), str(dst))
    writing = {
        "cp -r": ("cp", "-r", *places),
        "cp -r; sync": ("sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', *places),
        "ucp convert": (ucp, "convert", "-q", *places),
        "ucp convert --no-fsync": (ucp, "convert", "-q", "--no-fsync", *places),
    }
    writing |= {name: (ucp, "convert", "-q", *places, *options) for name, options in source.targets.items()}
    return [*(Contestant(name, command) for name, command in writing.items()), virtual, inspect]


def _rivals(source: Source, src: Path, dst: Path) -> list[Contestant]:
    """Commands of others for the same job."""
    return [
        Contestant(name, tuple(word.format(src=src, dst=dst) for word in words))
        for name, words in source.rivals.items()
    ]


def _deepspeed(src: Path, dst: Path) -> dict[str, list[Sample]]:
    """DeepSpeed's converter: once with each worker count, then the best one again; the runs of the best."""
    (tag,) = (path for path in src.iterdir() if path.is_dir())
    tried: dict[Contestant, Sample] = {}
    for workers in CONVERTER_WORKERS:
        command = (
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--num_extract_workers", str(workers), "--num_merge_workers", str(workers)),
            *("--input_folder", str(tag), "--output_folder", str(dst)),
        )
        contestant = Contestant(f"ds_to_universal ({workers} workers)", command)
        try:
            tried[contestant] = _timed(contestant, dst)
        except CalledProcessError as error:
            print(f"ds_to_universal with {workers} workers failed:\n{error.stderr[-2000:]}", file=sys.stderr)
    if not tried:
        return {}
    best = min(tried, key=lambda contestant: tried[contestant].seconds)
    return {best.name: [tried[best], *(_timed(best, dst) for _ in range(2))]}


def _timed(contestant: Contestant, dst: Path) -> Sample:
    shutil.rmtree(dst, ignore_errors=True)
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    try:
        return run(contestant.command, env=env)
    finally:
        shutil.rmtree(dst, ignore_errors=True)


def _row(case: str, medium: str, name: str, nbytes: int, samples: list[Sample]) -> Row:
    return Row(
        source=case,
        medium=medium,
        command=name,
        source_bytes=nbytes,
        seconds=median(sample.seconds for sample in samples),
        fastest=min(sample.seconds for sample in samples),
        slowest=max(sample.seconds for sample in samples),
        cpu_seconds=median(sample.cpu_seconds for sample in samples),
        peak_bytes=max(sample.peak_bytes for sample in samples),
    )


def _titles(rows: list[Row]) -> dict[str, str]:
    return {row.source: SOURCES[row.source].title for row in rows}


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, {platform.system()}"


if __name__ == "__main__":
    main()
