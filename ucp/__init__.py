"""ucp: universal checkpoints for teams that train large models.

`ucp.open`, `ucp.convert`, `ucp.inspect`, `ucp.plan`, `ucp.verify`, `ucp.diff` read and write checkpoints of any
framework; `ucp.load_into` brings one into a live model. Importing this package imports no torch.
"""

from ucp.api import Atom, Checkpoint, DiffReport, VerifyReport, convert, diff, inspect, open, plan, verify  # noqa: A004
from ucp.convert import ConvertReport
from ucp.errors import UcpError
from ucp.load import LoadReport, load_into
from ucp.region import Box
from ucp.topology import Topology

__all__ = [
    "Atom",
    "Box",
    "Checkpoint",
    "ConvertReport",
    "DiffReport",
    "LoadReport",
    "Topology",
    "UcpError",
    "VerifyReport",
    "convert",
    "diff",
    "inspect",
    "load_into",
    "open",
    "plan",
    "verify",
]
