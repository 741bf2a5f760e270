"""Numbers as people read them.

>>> nbytes_text(1536), rate_text(3 << 30, 2.0), seconds_text(75.2), shape_text((4, 8)), count_text(1234567)
('1.50 KiB', '1.50 GiB/s', '1 min 15 s', '4x8', '1,234,567')
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

_PREFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi")


def nbytes_text(nbytes: float) -> str:
    """Bytes with a binary prefix and three digits.

    >>> nbytes_text(0), nbytes_text(1023), nbytes_text(1 << 20), nbytes_text(123 << 30)
    ('0 B', '1023 B', '1.00 MiB', '123 GiB')
    """
    value, power = float(nbytes), 0
    while value >= 999.5 and power + 1 < len(_PREFIXES) and nbytes >= 1024:
        value /= 1024
        power += 1
    if power == 0:
        return f"{value:.0f} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {_PREFIXES[power]}B"


def rate_text(nbytes: float, seconds: float) -> str:
    """Bytes per second; "-" where no time has passed."""
    return f"{nbytes_text(nbytes / seconds)}/s" if seconds > 0 else "-"


def seconds_text(seconds: float) -> str:
    """A duration.

    >>> seconds_text(0.0213), seconds_text(12.34), seconds_text(7325)
    ('0.02 s', '12.3 s', '2 h 2 min')
    """
    if seconds < 9.95:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def time_text(nanoseconds: int) -> str:
    """A time, of nanoseconds since 1970; all digits, so that two times that differ are two texts.

    >>> time_text(1_795_696_322_096_739_395)
    '2026-11-26 12:32:02.096739395 UTC'
    """
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest:09} UTC"


def shape_text(shape: Sequence[int]) -> str:
    """Elements per dim.

    >>> shape_text((8192,)), shape_text(())
    ('8192', 'scalar')
    """
    return "x".join(map(str, shape)) if shape else "scalar"


def count_text(count: int) -> str:
    """A number with thousands separated."""
    return f"{count:,}"


def ranges_text(numbers: Sequence[int]) -> str:
    """Increasing whole numbers; consecutive ones are written as a range.

    >>> ranges_text([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def printable(text: str) -> str:
    r"""`text` with control characters written out: names in a checkpoint may hold anything.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
