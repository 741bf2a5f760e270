from __future__ import annotations

import pytest

from ucp.testing.engines import EngineContract
from ucp.transfer.engines.ray.engine import RayEngine

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def local():
    """Ray on this machine, which every run of this module finds."""
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="WARNING", object_store_memory=80 << 20)
    yield
    ray.shutdown()


class TestRayEngine(EngineContract):
    def make(self):
        return RayEngine()
