"""The contract of targets, for both kinds of Megatron's files."""

from __future__ import annotations

from tests.unit.formats.megatron.conftest import FakeLegacy
from ucp.conversion.options import ConvertOptions
from ucp.core.topology import Topology
from ucp.testing import TargetContract

LOCAL = {"transformer_impl": "local"}


def options(topology: str, layout: str, **settings: str) -> ConvertOptions:
    return ConvertOptions(
        to="megatron",
        topology=Topology.parse(topology),
        layout=layout,
        settings={**LOCAL, **settings},
    )


class TestTorchDist(TargetContract):
    def cases(self, folder):
        llama = FakeLegacy(kind="llama", tp=2, pp=2, optimizer="L3a").save(folder / "llama")
        gpt = FakeLegacy(kind="gpt", tied=True, pp=2, optimizer="whole").save(folder / "gpt")
        return [(llama, options("tp=4", "")), (gpt, options("tp=2", "torch_dist"))]


class TestLegacy(TargetContract):
    def cases(self, folder):
        mixtral = FakeLegacy(kind="mixtral", ep=2, optimizer="L3a").save(folder / "mixtral")
        gpt = FakeLegacy(kind="gpt", tied=True, optimizer="whole").save(folder / "gpt")
        return [(mixtral, options("tp=2,ep=2,etp=1", "torch")), (gpt, options("tp=2,pp=2", "torch"))]
