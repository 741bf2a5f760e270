"""The report of a load, for the user."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ucp.core.index import WEIGHT
from ucp.core.tensor import TensorRef
from ucp.core.text.page import Page, Report, facts, lines
from ucp.core.text.units import count_text, nbytes_text, rate_text, seconds_text
from ucp.errors import format_count
from ucp.live.checkpoint import Checkpoint
from ucp.live.exchange.carry import Traffic
from ucp.live.match.decide import Decision
from ucp.live.parts import is_memory
from ucp.live.resume.beside import ResumePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Report):
    """What was loaded, and what was not."""

    path: str
    """Checkpoint that was read."""
    format: str
    """Its format."""
    step: int | None
    """Training step it was saved at, where recorded."""
    names: tuple[str, ...]
    """Parameters and buffers of the model that were loaded."""
    states: tuple[str, ...]
    """Names of the optimizer states that were restored."""
    fresh: tuple[str, ...]
    """Parameters of the optimizer that have no state, because they were never stepped."""
    nbytes_read: int
    """Bytes that this rank read."""
    nbytes_total: int
    """Bytes that all ranks read together."""
    nbytes_wanted: int
    """Bytes of files that all ranks needed; what they read also includes small gaps, and bytes for checksums."""
    nbytes_exchanged: int
    """Bytes that this rank received from others."""
    nbytes_loaded: int
    """Bytes that were stored on this rank: weights, buffers, states."""
    nbytes_memory: int
    """Bytes of these that came from snapshots in the memory of this rank and of others, not from files."""
    nbytes_peak: int
    """Most host memory that this rank used for buffers; 0 if everything was read straight into tensors."""
    is_verified: bool
    """Whether everything that was stored was read again and compared, bit for bit."""
    ranks: int
    """Ranks of the run."""
    stages: Mapping[str, float]
    """Seconds of every stage: index, plan, read, restore."""
    casts: tuple[str, ...]
    """Changes of dtype, e.g. "weight: float32 -> bfloat16 in 12 parameters"."""
    missing: tuple[str, ...]
    """Tensors of the model that the checkpoint lacks: they keep their values. Empty when `strict`."""
    unexpected: tuple[str, ...]
    """Atoms of the checkpoint that the model lacks. Empty when `strict`."""
    problems: tuple[str, ...]
    """What else did not fit, and was not loaded. Empty when `strict`."""
    unchecked: tuple[str, ...]
    """Files read whose bytes were not all compared with a recorded checksum."""
    restored: tuple[str, ...]
    """What was restored beside the model: the scheduler, the loss scale, RNG states."""
    carried: Mapping[str, object]
    """What `rank_extras` gave to this rank, with tensors read: RNG states, already set, and values that you set."""
    extras: tuple[str, ...]
    """What else the checkpoint holds (client state, ...) and was not used: `.saved.extra(name)`."""
    notes: tuple[str, ...]
    """What was assumed, inferred or changed."""
    dropped: tuple[str, ...]
    """What the checkpoint holds and was not loaded, with the reasons."""
    saved: Checkpoint = field(repr=False, compare=False)
    """The checkpoint without its parameters, so that no rank opens it again: `report.saved.extra("client_state")`."""

    @property
    def seconds(self) -> float:
        """Time it took."""
        return sum(self.stages.values())

    @property
    def gigabytes_per_second(self) -> float:
        """Gigabytes that were loaded on this rank per second of reading."""
        return self.nbytes_loaded / 1e9 / max(self.stages["read"], 1e-9)

    def as_dict(self) -> dict[str, object]:
        """Everything as JSON values; of `carried` only the names."""
        fields = {key: getattr(self, key) for key in self.__dataclass_fields__ if key != "saved"}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
        rates = {"seconds": self.seconds, "gigabytes_per_second": self.gigabytes_per_second}
        return {**plain, "stages": dict(self.stages), "carried": list(self.carried), **rates}

    def page(self) -> Page:
        """What was loaded and how fast, then lists of what was restored, cast, missing, noted and not loaded."""
        yield facts(_facts(self))
        yield lines("Restored", self.restored)
        yield lines("Casts", self.casts)
        yield lines("Missing", self.missing)
        yield lines("Unexpected", self.unexpected)
        yield lines("Problems", self.problems)
        yield lines("Notes", self.notes)
        yield lines("Left behind", self.dropped)
        yield lines("Unused extras", self.extras)


def _facts(report: LoadReport) -> Iterator[tuple[str, str]]:
    yield "loaded", f"{report.path} ({report.format})"
    yield "step", "not recorded" if report.step is None else count_text(report.step)
    yield "tensors", ", ".join((format_count(len(report.names), "tensor"), *report.states))
    if report.fresh:
        names = ", ".join((*report.fresh[:5], *(["..."] if len(report.fresh) > 5 else [])))
        yield "fresh", f"{format_count(len(report.fresh), 'parameter')} without optimizer states: {names}"
    share = f" by {report.ranks} ranks, {nbytes_text(report.nbytes_read)} by this one" if report.ranks > 1 else ""
    yield "read", f"{nbytes_text(report.nbytes_total)}{share}"
    yield "received", f"{nbytes_text(report.nbytes_exchanged)} from other ranks" if report.nbytes_exchanged else ""
    yield "from memory", nbytes_text(report.nbytes_memory) if report.nbytes_memory else ""
    rate = rate_text(report.nbytes_loaded, report.stages["read"])
    yield "stored", f"{nbytes_text(report.nbytes_loaded)} in tensors of this rank ({rate})"
    stages = ", ".join(f"{stage} {seconds_text(seconds)}" for stage, seconds in report.stages.items())
    yield "time", f"{seconds_text(report.seconds)} ({stages})"
    yield "buffers", f"{nbytes_text(report.nbytes_peak)} of host memory at most"
    yield "verified", "read again and equal" if report.is_verified else ""


class Clock:
    """Seconds of the stages of a load."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Stage to seconds."""
        self._began = time.perf_counter()

    def lap(self, stage: str) -> None:
        """End a stage, and begin the next."""
        now = time.perf_counter()
        self.seconds[stage], self._began = now - self._began, now


def make_report(decision: Decision, resume: ResumePlan, traffic: Traffic, stages: Mapping[str, float]) -> LoadReport:
    """The report of a completed load."""
    index, findings, items = decision.index, decision.findings, decision.items
    # encoded blocks carry their own checksums, other elements do not
    refs = (f.ref for item in items for f in item.source.fragments if f.replica == 0 and f.box.numel)
    files = (ref for ref in refs if isinstance(ref, TensorRef) and not is_memory(ref.path))
    without_checksum = {ref.path for ref in files if not ref.codec}
    others = sorted({state for _, state, _ in index.states()} - {WEIGHT}) if decision.run.optimizer is None else []
    not_loaded = [f"optimizer states {', '.join(others)}: no optimizer was given"] if others else []
    return LoadReport(
        path=index.path,
        format=index.format,
        step=index.step,
        names=tuple(dict.fromkeys(i.name for i in items if not i.is_optimizer_state or i.state == WEIGHT)),
        states=tuple(dict.fromkeys(item.state for item in items if item.is_optimizer_state)),
        fresh=decision.without_states,
        nbytes_read=traffic.nbytes[traffic.rank],
        nbytes_total=sum(traffic.nbytes),
        ranks=len(traffic.nbytes),
        nbytes_wanted=traffic.wanted_nbytes,
        nbytes_exchanged=traffic.exchanged_nbytes,
        nbytes_loaded=traffic.landed_nbytes,
        nbytes_memory=traffic.memory_nbytes,
        nbytes_peak=traffic.peak_nbytes,
        is_verified=traffic.is_verified,
        stages=stages,
        restored=resume.restored,
        carried=resume.carried,
        casts=tuple(f"{cast} in {format_count(count, 'parameter')}" for cast, count in findings.casts.items()),
        missing=tuple(findings.missing),
        unexpected=tuple(findings.unexpected),
        problems=tuple(findings.problems),
        unchecked=tuple(sorted(without_checksum - traffic.checked)),
        extras=resume.ignored,
        notes=(*index.notes, *findings.notes),
        dropped=(*index.dropped, *resume.dropped, *not_loaded),
        saved=Checkpoint(replace(index, atoms={}, aliases={}, records=())),
    )
