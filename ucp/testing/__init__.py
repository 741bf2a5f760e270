"""Test suites for third-party patterns, formats, targets and engines, and handmade checkpoints to run them on.

Subclass a suite in your test module and name what is tested; pytest collects the tests::

    from ucp.testing import PatternContract

    class TestStriped(PatternContract):
        cases = ((Striped(2), (8, 3), 4), (Striped(1), (5,), 2))
"""

from ucp.testing.engines import EngineContract
from ucp.testing.formats import FormatContract
from ucp.testing.handmade import Shards, make_index, write_checkpoint
from ucp.testing.patterns import PatternContract
from ucp.testing.targets import TargetContract

__all__ = [
    "EngineContract",
    "FormatContract",
    "PatternContract",
    "Shards",
    "TargetContract",
    "make_index",
    "write_checkpoint",
]
