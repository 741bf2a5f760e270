"""How to exchange, and what an exchange has cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ucp.contract.protocols import Observer
from ucp.core.tensor import Record


class Exchange(StrEnum):
    """Whether ranks that hold the same read it once between them."""

    AUTO = "auto"
    """Where that is faster, as measured on the first windows."""
    ALWAYS = "always"
    """Yes, so that storage is read as little as can be."""
    NEVER = "never"
    """No: every rank reads all that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryOptions:
    """How to carry items to where they land; the same on all ranks."""

    exchange: Exchange = Exchange.AUTO
    """Whether ranks that hold the same read it once between them."""
    memory: int = 1 << 30
    """Bytes of main memory for what is under way."""
    verify: bool = False
    """Whether to read everything again at the end, and compare."""
    records: Sequence[Record] = ()
    """Stretches of files with their checksums, which are compared."""
    observer: Observer | None = None
    """Is told of the bytes that have come to this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What was read and exchanged, and what it cost."""

    nbytes: tuple[int, ...]
    """Bytes that each rank read from files."""
    rank: int
    """Which of them this is."""
    wanted_nbytes: int
    """Bytes of files that all ranks asked for; what they read beyond that lay in short gaps, or under a checksum."""
    exchanged_nbytes: int
    """Bytes that this rank received from others."""
    landed_nbytes: int
    """Bytes that were put in place on this rank."""
    peak_nbytes: int
    """Most main memory of this rank that windows took."""
    seconds: float
    """Time it took."""
    is_verified: bool = False
    """Whether all that was put in place was read again and compared."""
    checked: frozenset[str] = frozenset()
    """Files all of whose stretches that were read have been compared with their checksums."""

    @property
    def rate(self) -> float:
        """Bytes per second that landed on this rank."""
        return self.landed_nbytes / self.seconds if self.seconds else 0.0
