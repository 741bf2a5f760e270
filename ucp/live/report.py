"""What a load did, for the person who asked for it."""

from __future__ import annotations

from dataclasses import dataclass

from ucp.core.names import WEIGHT
from ucp.core.tensor import TensorRef
from ucp.errors import counted
from ucp.live.decide import Decision
from ucp.live.exchange.traffic import Traffic

__all__ = ["LoadReport", "report_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
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
    ranks: int
    """Ranks that shared the reading."""
    seconds: float
    """Time it took."""
    casts: tuple[str, ...]
    """Changes of dtype, e.g. "weight: float32 to bfloat16, 12 tensors"."""
    missing: tuple[str, ...]
    """Tensors of the model that the checkpoint lacks: they are as they were. Empty when `strict`."""
    unexpected: tuple[str, ...]
    """Atoms of the checkpoint that the model lacks. Empty when `strict`."""
    problems: tuple[str, ...]
    """What else did not fit and was left as it was. Empty when `strict`."""
    unchecked: tuple[str, ...]
    """Files read whose bytes were not all compared with a recorded checksum."""
    extras: tuple[str, ...]
    """What else the checkpoint holds (scheduler, client state, ...): `ucp.open(path).extras` has the values."""
    notes: tuple[str, ...]
    """What was assumed, inferred or changed."""
    dropped: tuple[str, ...]
    """What the checkpoint holds and was not brought, with the reasons."""

    def __str__(self) -> str:
        states = f", {', '.join(self.states)}" if self.states else ""
        share = f" ({self.nbytes_read:,} by this one of {self.ranks} ranks)" if self.ranks > 1 else ""
        text = [
            f"{self.path} ({self.format}, step {self.step}): {counted(len(self.names), 'tensor')}{states}",
            f"{self.nbytes_total:,} bytes read{share} in {self.seconds:.2f} s",
        ]
        told = {
            "cast": self.casts,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "problem": self.problems,
            "note": self.notes,
            "dropped": self.dropped,
        }
        if self.fresh:
            text.append(
                f"fresh: {counted(len(self.fresh), 'parameter has', 'parameters have')} "
                f"no optimizer states: {', '.join(self.fresh[:5])}"
            )
        text += [f"{kind}: {line}" for kind, lines in told.items() for line in lines]
        return "\n".join(text)


def report_of(decision: Decision, traffic: Traffic) -> LoadReport:
    """The report of a load that is done."""
    index, findings = decision.index, decision.findings
    states = dict.fromkeys(want.state for want in decision.wants if want.stepped)
    return LoadReport(
        path=index.path,
        format=index.format,
        step=index.step,
        names=tuple(want.name for want in decision.wants if not want.stepped),
        states=tuple(states),
        fresh=decision.fresh,
        nbytes_read=traffic.nbytes[traffic.rank],
        nbytes_total=sum(traffic.nbytes),
        ranks=len(traffic.nbytes),
        seconds=traffic.seconds,
        casts=tuple(f"{cast}, {counted(count, 'tensor')}" for cast, count in findings.casts.items()),
        missing=tuple(findings.missing),
        unexpected=tuple(findings.unexpected),
        problems=tuple(findings.problems),
        unchecked=tuple(sorted(_bare(decision) - traffic.checked)),
        extras=tuple(dict.fromkeys(extra.name for extra in index.extras)),
        notes=(*index.notes, *findings.notes),
        dropped=(*index.dropped, *_left_out(decision)),
    )


def _bare(decision: Decision) -> set[str]:
    """Files read from in which an element does not carry a checksum of its own, as encoded blocks do."""
    taken = (f for want in decision.wants for f in want.source.fragments if f.replica == 0 and f.box.numel)
    return {f.ref.path for f in taken if isinstance(f.ref, TensorRef) and not f.ref.codec}


def _left_out(decision: Decision) -> list[str]:
    states = {state for _, state, _ in decision.index.states()} - {WEIGHT}
    if decision.run.optimizer is not None or not states:
        return []
    return [f"optimizer states {', '.join(sorted(states))}: no optimizer was given"]
