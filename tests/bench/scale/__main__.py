"""`make bench-scale`: what indexes of up to 150,000 tensors and 1,024 ranks cost; the table and the plot.

Checkpoints are made in a folder, a few at a time of a few GB on the disk (13 TiB by their sizes), and removed when
they are measured. Three commands each, whole processes started anew: `ucp inspect`, `ucp plan` for another layout, and
`ucp convert --virtual`. Processor time is told beside wall time, which other work on the machine disturbs more.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path

from tests.bench.measure import run
from tests.bench.scale.deepspeed import expert_groups, write_expert_run
from tests.bench.scale.megatron import Layout, write_torch_dist
from tests.bench.scale.moe import Moe
from tests.bench.scale.report import PAGE, Row, write_report

RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A checkpoint to measure."""

    series: str
    ranks: int
    make: Callable[[Path], None]
    tensors: int
    """Parameters with a weight and two moments each, counted as three, and the copies of weights as a fourth."""
    plan: tuple[str, ...]


def _megatron(experts: int, *, layers: int) -> Case:
    """A run of 1,024 ranks, to be resumed at other degrees."""
    moe = Moe(layers=layers, experts=experts)
    ep = min(64, experts)
    layout = Layout(tp=8, pp=16, ep=ep, dp=8)
    degrees = f"tp=4,pp=1,ep={gcd(128, experts)},etp=1,dp=256"
    return Case(
        series="Megatron torch_dist",
        ranks=layout.world,
        make=partial(write_torch_dist, moe=moe, layout=layout),
        tensors=4 * (layers * (2 * experts + len(moe.attention())) + len(moe.ends())),
        plan=("--to", "megatron", "--topology", degrees),
    )


def _deepspeed(ranks: int, *, layers: int, experts: int) -> Case:
    """A run of ZeRO-1 with experts, to be resumed on half as many ranks."""
    moe = Moe(layers=layers, experts=experts)
    ep = min(64, ranks, experts)
    return Case(
        series="DeepSpeed ZeRO-1",
        ranks=ranks,
        make=partial(_write_experts, moe=moe, ranks=ranks, ep=ep),
        tensors=4 * (layers * (3 * experts + len(moe.attention())) + len(moe.ends())),
        plan=("--to", "deepspeed", "--topology", f"dp={ranks // 2},ep={ep // 2},zero=1"),
    )


def _write_experts(folder: Path, *, moe: Moe, ranks: int, ep: int) -> None:
    dense, starts, own, experts = expert_groups(moe, ranks=ranks, ep=ep)
    write_expert_run(folder, dense=dense, experts=starts, own=own, run=experts)


SERIES: dict[str, tuple[Case, ...]] = {
    "tensors": (
        _megatron(4, layers=19),  # 1,000 tensors
        *(_megatron(experts, layers=61) for experts in (4, 16, 64, 128, 256)),
        _megatron(320, layers=58),  # 149,652
    ),
    "ranks": tuple(_deepspeed(ranks, layers=8, experts=64) for ranks in (8, 32, 128, 512, RANKS)),
    "large": (_deepspeed(RANKS, layers=61, experts=256),),
}
"""By the name that `--series` takes."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", action="append", choices=(*SERIES,), help="only this one")
    parser.add_argument("--most", type=int, default=1 << 30, help="leave out cases of more tensors")
    parser.add_argument(
        "--work", type=Path, default=Path(".bench/scale"), help="where checkpoints are made and removed"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="where the report goes")
    asked = parser.parse_args()
    if not (asked.out / PAGE).is_file():
        parser.error(
            f"expected the page {PAGE} in {asked.out}, whose table is replaced; copy docs/benchmarks/{PAGE} there"
        )
    rows: list[Row] = []
    for name in asked.series or SERIES:
        for case in SERIES[name]:
            if case.tensors <= asked.most:
                rows += _measured(case, asked.work)
                write_report(asked.out, rows, machine=_machine())


def _measured(case: Case, work: Path) -> Iterator[Row]:
    """A row for each command."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    src, dst = work / "src", work / "dst"
    ucp = str(Path(sys.executable).parent / "ucp")
    try:
        case.make(src)
        apparent = sum(path.stat().st_size for path in src.rglob("*") if path.is_file())
        for command in (("inspect", str(src)), ("plan", str(src), str(dst), *case.plan), _virtual(src, dst)):
            sample = run((ucp, *command), env={"OMP_NUM_THREADS": "1"})
            row = Row(
                series=case.series,
                tensors=case.tensors,
                ranks=case.ranks,
                command=f"ucp {'convert --virtual' if command[0] == 'convert' else command[0]}",
                source_bytes=apparent,
                seconds=sample.seconds,
                cpu_seconds=sample.cpu_seconds,
                peak_bytes=sample.peak_bytes,
            )
            print(row, file=sys.stderr, flush=True)
            yield row
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _virtual(src: Path, dst: Path) -> tuple[str, ...]:
    return "convert", "-q", "--virtual", str(src), str(dst)


def _machine() -> str:
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.0f}, Python {platform.python_version()}, {platform.system()}"


if __name__ == "__main__":
    main()
