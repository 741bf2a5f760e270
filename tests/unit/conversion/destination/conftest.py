from tests.unit.io.remote.conftest import memory

__all__ = ["memory"]
