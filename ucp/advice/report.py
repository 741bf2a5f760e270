"""What `ucp.advise` says: every way of saving at its best interval, and which one makes most progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import cast

from ucp.advice.models import METHODS, Estimate
from ucp.advice.residency import Residency, plan_residency
from ucp.advice.run import Range, Run, corners
from ucp.advice.simulate import Replay, draw_failures, mean_gap, simulate
from ucp.core.text.page import Page, Report, facts, lines, table
from ucp.core.text.units import nbytes_text, seconds_text
from ucp.errors import UsageError, format_count, format_list, nearest

_FAILURES = 2000
"""Failures of a simulation, about, where no trace is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One way of saving, over all values that the inputs may have."""

    method: str
    """Name."""
    low: Estimate
    """Where it makes least progress."""
    high: Estimate
    """Where it makes most."""
    replay: Replay | None
    """What a simulation gave, for the first values of ranges; None if the way is not to be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceReport(Report):
    """Ways of saving, the best first."""

    methods: tuple[Advice, ...]
    """Ways, by the least progress that they make."""
    run: Mapping[str, Range]
    """What is known of the run."""
    residency: Residency | None
    """Whether its states fit; None if the memory of the machine is not given."""
    notes: tuple[str, ...]
    """What you should know."""

    @property
    def best(self) -> Advice:
        """The way whose least progress is the highest, of those that can be used."""
        return self.methods[0]

    def page(self) -> Page:
        """The best way, a row for each, and remarks."""
        best = self.best
        yield facts(
            [
                ("best", f"{best.method}: {describe_interval(best)}"),
                ("progress", f"{_span(best.low.ettr, best.high.ettr)} of the time"),
            ]
        )
        rows = [
            (
                advice.method,
                describe_interval(advice),
                nbytes_text(advice.low.nbytes) if advice.low.nbytes else "",
                "" if not advice.low.ettr else seconds_text(advice.low.stall),
                "" if not advice.low.ettr else seconds_text(advice.low.recovery),
                _span(advice.low.ettr, advice.high.ettr) if advice.low.ettr else "",
                "" if advice.replay is None else f"{advice.replay.ettr:.1%}",
                f"{advice.low.plt:.2%}" if advice.low.plt else "",
            )
            for advice in self.methods
        ]
        columns = ("way", "save every", ">bytes", ">stall", ">failure costs", ">progress", ">simulated", ">lost tokens")
        yield table("Ways of saving", columns, rows, most=16, all_in="--json")
        if self.residency is not None:
            fits = self.residency
            yield facts(
                [
                    ("GPUs", nbytes_text(fits.gpu_nbytes)),
                    ("hosts", nbytes_text(fits.host_nbytes)),
                    ("disks", nbytes_text(fits.disk_nbytes)),
                    ("experts near GPUs", f"{fits.share:.1%}" if fits.fits else "does not fit"),
                ],
                "Memory",
            )
        problems = (f"{advice.method}: {advice.low.problem}" for advice in self.methods if advice.low.problem)
        yield lines("Not to be used", problems)
        yield lines("Notes", self.notes)


def describe_interval(advice: Advice) -> str:
    """How often to save, such as "2 to 3 iterations (14 of 64)"."""
    low, high = sorted((advice.low.interval, advice.high.interval))
    detail = " or ".join(dict.fromkeys(filter(None, (advice.low.detail, advice.high.detail))))
    if not high:
        return "-"
    every = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{every} {'iteration' if high == 1 else 'iterations'}" + (f" ({detail})" if detail else "")


def _span(low: float, high: float) -> str:
    return f"{low:.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:.1%} to {high:.1%}"


MEMORY = ("gpu_memory", "host_memory", "disk")
"""Inputs for the memory plan: bytes of all GPUs, hosts and disks."""


_COUNTS = ("experts", "moe_layers")
"""Inputs that are counted."""


def advise(values: Mapping[str, Range | float | str], *, trace: Sequence[float] | None = None) -> AdviceReport:
    """The report for a run. `values`: fields of `Run` and `MEMORY`, numbers or ranges; `trace`: times of failures.

    Without `mtbf`, that is the mean gap of the trace. Raises UsageError.
    """
    known = {field.name for field in fields(Run)}
    unknown = [name for name in values if name not in known and name not in MEMORY]
    if unknown:
        hints = (f"{name}: {near}?" if (near := nearest(name, known)) else name for name in unknown)
        raise UsageError(f"expected numbers of a run ({', '.join(sorted(known))}); got\n{format_list(hints)}")
    ranges = {name: Range.parse(value) for name, value in values.items()}
    parts = {
        name: values[name] for name in _COUNTS if name in ranges and (ranges[name].low % 1 or ranges[name].high % 1)
    }
    if parts:
        shown = ", ".join(f"{name} {value}" for name, value in parts.items())
        raise UsageError(f"expected whole numbers of experts and of layers with experts; got {shown}")
    if trace and "mtbf" not in ranges:
        ranges["mtbf"] = Range.parse(mean_gap(trace))
    missing = [name for name in ("iter_time", "mtbf", "params_dense", "bandwidth") if name not in ranges]
    if missing:
        raise UsageError(f"expected all numbers that decide how often to save; missing:\n{format_list(missing)}")
    memory = {name: ranges.pop(name) for name in MEMORY if name in ranges}
    runs = [_make_run(corner) for corner in corners(ranges)]
    first = _make_run({name: value.low for name, value in ranges.items()})
    methods = []
    for method in METHODS:
        estimates = sorted(map(method, runs), key=lambda estimate: (not estimate.problem, estimate.ettr))
        usable = method(first)
        replay = None if usable.problem else _replay(first, usable, trace)
        methods.append(Advice(method=usable.method, low=estimates[0], high=estimates[-1], replay=replay))
    methods.sort(key=lambda advice: (bool(advice.low.problem), -advice.low.ettr))
    return AdviceReport(
        methods=tuple(methods),
        run=ranges,
        residency=_find_residency(first, memory),
        notes=tuple(_list_notes(methods, runs, trace)),
    )


def _make_run(values: Mapping[str, float]) -> Run:
    others = {name: value for name, value in values.items() if name not in _COUNTS}
    return Run(**others, experts=int(values.get("experts", 1)), moe_layers=int(values.get("moe_layers", 1)))


def _replay(run: Run, estimate: Estimate, trace: Sequence[float] | None) -> Replay:
    horizon = max(trace) if trace else _FAILURES * run.mtbf
    undone = (1.5 * estimate.window or estimate.interval / 2) * run.iter_time + estimate.lag
    failures = trace if trace is not None else draw_failures(run.mtbf, horizon=horizon)
    return simulate(
        iter_time=run.iter_time,
        interval=estimate.interval,
        stall=estimate.stall,
        restart=estimate.recovery - undone,
        lag=estimate.lag,
        failures=failures,
        horizon=horizon,
        window=estimate.window,
    )


def _find_residency(run: Run, memory: Mapping[str, Range]) -> Residency | None:
    if not memory:
        return None
    missing = [name for name in MEMORY if name not in memory]
    if missing:
        raise UsageError(f"expected the memory of all GPUs, hosts and disks; missing:\n{format_list(missing)}")
    return plan_residency(
        params_dense=run.params_dense,
        params_expert=run.params_expert,
        moe_layers=run.moe_layers,
        gpu_nbytes=memory["gpu_memory"].low,
        host_nbytes=memory["host_memory"].low,
        disk_nbytes=memory["disk"].low,
    )


def _list_notes(methods: Sequence[Advice], runs: Sequence[Run], trace: Sequence[float] | None) -> list[str]:
    notes = []
    best, others = methods[0], [advice for advice in methods[1:] if not advice.low.problem]
    rivals = [advice.method for advice in others if advice.high.ettr > best.low.ettr]
    if rivals and len(runs) > 1:
        notes.append(
            f"the inputs do not decide between {best.method} and {', '.join(rivals)}: their progress overlaps. "
            "Pass narrower ranges"
        )
    if trace:
        notes.append(f"the simulation replayed {format_count(len(trace), 'failure')} of the trace")
    if not runs[0].copy_bandwidth:
        notes.append("without the bandwidth of copies from GPUs to hosts, they are taken to need no time")
    if best.low.window:
        notes.append("a sparse window needs its iterations replayed before the run goes on: ucp.densify")
    return notes


def to_document(report: AdviceReport) -> dict[str, object]:
    """The report as JSON values."""
    document = cast("dict[str, object]", asdict(report))
    return {"schema": "ucp.advise/1", "best": report.best.method, **document}
