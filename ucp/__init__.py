"""ucp: universal checkpoints for teams that train large models.

    import ucp

    checkpoint = ucp.open("ckpt")                          # DeepSpeed, Megatron, FSDP/DCP, torch.save, Hugging Face
    moment = checkpoint.read("layers.0.mlp.weight", "exp_avg")  # one torch tensor, whatever the sharding was
    print(ucp.plan("ckpt", to="deepspeed", topology="dp=2,zero=3"))  # what a conversion would do
    ucp.convert("ckpt", "resumed", to="deepspeed", topology="dp=2,zero=3")
    ucp.verify("resumed", against="ckpt").ok               # complete, undamaged and equal bit for bit?
    ucp.diff("ckpt", "other").changes                      # where two checkpoints differ
    ucp.experts("ckpt")                                    # how trained every expert of an MoE model is
    ucp.load_into(model, "dp=2", "ckpt", optimizer=optimizer)  # at resume time, on every rank
    ucp.save(model, optimizer, "dp=2", "ckpt/step100")         # from a run, on every rank

`ucp.inspect` gives the index, even of a checkpoint with holes. `ucp.densify` replays a sparse window on a live model.
Importing this package imports no torch.
"""

from typing import TYPE_CHECKING

from ucp.api import (  # ucp.open is the name users look for
    PlanReport,
    add_to_chain,
    advise,
    convert,
    delta,
    diff,
    experts,
    inspect,
    migrate,
    open,  # noqa: A004  # ucp.open is the name users look for
    place,
    plan,
    verify,
)
from ucp.core.region import Box
from ucp.core.topology import Topology
from ucp.errors import UcpError

if TYPE_CHECKING:
    from ucp import replay
    from ucp.advice.report import AdviceReport
    from ucp.chain.delta.write import DeltaReport
    from ucp.checks.verify import DiffReport, VerifyReport
    from ucp.conversion.convert import ConvertReport
    from ucp.live.checkpoint import Atom, Checkpoint
    from ucp.live.load import load_into
    from ucp.live.report import LoadReport
    from ucp.moe.report import ExpertsReport
    from ucp.placement.migrate import Migration
    from ucp.placement.placement import Placement
    from ucp.replay.densify import DensifyReport, densify
    from ucp.saving.job import SaveHandle
    from ucp.saving.plan import Full, PartialExperts
    from ucp.saving.report import SaveReport
    from ucp.saving.save import save
    from ucp.saving.snapshots import Snapshots
    from ucp.saving.window import SparseWindow
    from ucp.streaming.stream import Stream, stream

    __version__: str
else:
    _PLACES = {
        "AdviceReport": "ucp.advice.report",
        "Atom": "ucp.live.checkpoint",
        "Checkpoint": "ucp.live.checkpoint",
        "ConvertReport": "ucp.conversion.convert",
        "DeltaReport": "ucp.chain.delta.write",
        "DensifyReport": "ucp.replay.densify",
        "DiffReport": "ucp.checks.verify",
        "ExpertsReport": "ucp.moe.report",
        "Full": "ucp.saving.plan",
        "LoadReport": "ucp.live.report",
        "PartialExperts": "ucp.saving.plan",
        "Migration": "ucp.placement.migrate",
        "Placement": "ucp.placement.placement",
        "SaveHandle": "ucp.saving.job",
        "Snapshots": "ucp.saving.snapshots",
        "SaveReport": "ucp.saving.report",
        "SparseWindow": "ucp.saving.window",
        "VerifyReport": "ucp.checks.verify",
        "densify": "ucp.replay.densify",
        "load_into": "ucp.live.load",
        "save": "ucp.saving.save",
        "Stream": "ucp.streaming.stream",
        "stream": "ucp.streaming.stream",
    }

    def __getattr__(name: str) -> object:
        """The version, or a public name that is imported at its first use (PEP 562)."""
        if name == "__version__":
            from importlib.metadata import version

            return version("universal-checkpoint")
        from importlib import import_module

        if name == "replay":
            return import_module("ucp.replay")
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_PLACES[name]), name)


__all__ = [
    "AdviceReport",
    "Atom",
    "Box",
    "Checkpoint",
    "ConvertReport",
    "DeltaReport",
    "DensifyReport",
    "DiffReport",
    "ExpertsReport",
    "Full",
    "LoadReport",
    "Migration",
    "PartialExperts",
    "Placement",
    "PlanReport",
    "SaveHandle",
    "SaveReport",
    "Snapshots",
    "SparseWindow",
    "Stream",
    "Topology",
    "UcpError",
    "VerifyReport",
    "add_to_chain",
    "advise",
    "convert",
    "delta",
    "densify",
    "diff",
    "experts",
    "inspect",
    "load_into",
    "migrate",
    "open",
    "place",
    "plan",
    "replay",
    "save",
    "stream",
    "verify",
]


def __dir__() -> list[str]:
    """The public names, including those that are imported at their first use (PEP 562)."""
    return __all__
