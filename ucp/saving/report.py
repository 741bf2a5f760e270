"""The report of a save, for the user."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ucp.core.text.page import Page, Report, facts
from ucp.core.text.units import count_text, nbytes_text, seconds_text
from ucp.errors import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(Report):
    """What was saved."""

    path: str
    """The atom store."""
    step: int | None
    """Training step, where known."""
    tensors: int
    """Parameters and buffers of the whole model that were saved."""
    nbytes_written: int
    """Bytes of tensors that this rank wrote."""
    nbytes_planned: tuple[int, ...]
    """Bytes of tensors that each rank wrote."""
    seconds: float
    """Time it took."""

    @property
    def nbytes_total(self) -> int:
        """Bytes of tensors that all ranks wrote."""
        return sum(self.nbytes_planned)

    def as_dict(self) -> dict[str, object]:
        """Everything as JSON values."""
        return {**asdict(self), "nbytes_planned": list(self.nbytes_planned), "nbytes_total": self.nbytes_total}

    def page(self) -> Page:
        """What was saved, where, and how evenly."""
        most = f", at most {nbytes_text(max(self.nbytes_planned))} by one" if len(self.nbytes_planned) > 1 else ""
        yield facts(
            [
                ("saved", self.path),
                ("step", "not known" if self.step is None else count_text(self.step)),
                ("tensors", count_text(self.tensors)),
                (
                    "written",
                    f"{nbytes_text(self.nbytes_total)} by {format_count(len(self.nbytes_planned), 'rank')}{most}",
                ),
                ("time", seconds_text(self.seconds)),
            ]
        )
